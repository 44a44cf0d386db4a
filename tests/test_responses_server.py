"""The Responses dialect over a real socket: the official client in all its forms, the token tree behind it, answers
asked for again, and what each agent cannot do without."""

from __future__ import annotations

import asyncio
import gc
import json
import weakref
from collections.abc import AsyncIterator

import httpx
import openai
import pydantic
import pytest

from minirllm.errors import EngineError
from minirllm.types import SamplingParams
from tests.endpoint import CALL, KEY, USER, Place, error_of, serving, until

TOOL = {
    "type": "function", "name": "run", "strict": False,
    "parameters": {"type": "object", "properties": {"cmd": {"type": "string"}}},
}  # fmt: skip
PATCH = {"type": "custom", "name": "patch", "description": "Edits files."}
PATCH_CALL = '<tool_call>\n{"name": "patch", "arguments": {"input": "*** a\\nb"}}\n</tool_call>'
THOUGHTFUL = "<think>\nhm\n</think>\n\nI look.\n" + CALL


@pytest.fixture
async def place() -> AsyncIterator[Place]:
    async with serving() as place:
        yield place


async def events(place: Place, **body) -> list[dict]:
    """The events as they come over the wire."""
    answer = await place.post("responses", {"input": "hi", "stream": True, **body})
    assert answer.headers["content-type"].startswith("text/event-stream")
    return [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: ")]


# ---- the official client ----


async def test_the_official_client_gets_an_answer(place: Place) -> None:
    async with place.client() as client:
        answer = await client.responses.create(model="whatever", input="hi", instructions="be brief")
        assert answer.output_text == "Hello"
        assert answer.id == f"resp_{place.session.steps[0].id}"
        assert (answer.status, answer.usage.output_tokens) == ("completed", 6)
        assert place.session.claim([answer.id])[0].response.content == "Hello"
        cut = await client.responses.create(model="m", input="hi", max_output_tokens=3)
        assert (cut.status, cut.incomplete_details.reason, cut.output_text) == (
            "incomplete",
            "max_output_tokens",
            "Hel",
        )
        counted = await client.responses.input_tokens.count(model="m", input="hi", instructions="be brief")
        assert counted.input_tokens == answer.usage.input_tokens
        assert len(place.session.steps) == 2


async def test_the_sync_client_in_a_thread(place: Place) -> None:
    def ask() -> tuple[str, str]:
        with openai.OpenAI(base_url=place.url, api_key=KEY) as client:
            whole = client.responses.create(model="m", input="hi").output_text
            pieces = client.responses.create(model="m", input=[USER], stream=True)
            return whole, "".join(event.delta for event in pieces if event.type == "response.output_text.delta")

    assert await asyncio.to_thread(ask) == ("Hello", "Hello")


async def test_a_stream_comes_token_by_token(place: Place) -> None:
    async with place.client() as client:
        found = [event async for event in await client.responses.create(model="m", input="hi", stream=True)]
    assert [event.delta for event in found if event.type == "response.output_text.delta"] == list("Hello")
    assert [event.sequence_number for event in found] == list(range(len(found)))
    assert found[-1].response.output_text == "Hello"


@pytest.mark.parametrize("text", ["Hello", THOUGHTFUL, CALL + CALL, "<tool_call>\n{broken", ""])
async def test_the_streaming_helper_accepts_every_answer(place: Place, text: str) -> None:
    """It follows each event and raises at the first that does not fit."""
    place.engine.texts = [text]
    async with place.client() as client:
        async with client.responses.stream(model="m", input="hi", tools=[TOOL]) as stream:
            found = [event async for event in stream]
            final = await stream.get_final_response()
        whole = await client.responses.create(model="m", input="hi", tools=[TOOL])
    done = [event.item for event in found if event.type == "response.output_item.done"]
    assert [item.type for item in done] == [item.type for item in final.output] == [item.type for item in whole.output]
    assert final.output_text == whole.output_text
    assert place.session.counters["malformed_tool_calls"] == 2 * text.endswith("broken")


async def test_the_parse_helper_reads_what_follows_the_schema(place: Place) -> None:
    class Answer(pydantic.BaseModel):
        word: str

    place.engine.texts = ['{"word": "yes"}']
    async with place.client() as client:
        answer = await client.responses.parse(model="m", input="hi", text_format=Answer)
        assert answer.output_parsed == Answer(word="yes")
        async with client.responses.stream(model="m", input="hi", text_format=Answer) as stream:
            assert (await stream.get_final_response()).output_parsed == Answer(word="yes")
    place.engine.texts = ["no"]
    body = (await place.post("responses", {"input": "hi", "text": {"format": {"type": "json_object"}}})).json()
    assert "not JSON" in body["format_error"]


@pytest.mark.parametrize(("tool", "call"), [(TOOL, THOUGHTFUL), (PATCH, PATCH_CALL)])
@pytest.mark.parametrize("how", ["items", "previous", "references"])
async def test_a_tool_round_trip_continues_the_very_tokens(place: Place, tool, call, how) -> None:
    place.engine.texts = [call, "done"]
    async with place.client() as client:
        first = await client.responses.create(model="m", input=[USER], tools=[tool])
        called = first.output[-1]
        kind = "custom_tool_call" if tool is PATCH else "function_call"
        assert (called.type, called.name) == (kind, tool["name"])
        given = called.input if tool is PATCH else json.loads(called.arguments)
        assert given == ("*** a\nb" if tool is PATCH else {"cmd": "ls"})
        out = {"type": f"{kind}_output", "call_id": called.call_id, "output": "files"}
        ways = {
            "items": {"input": [USER, *[item.model_dump() for item in first.output], out]},
            "previous": {"input": [out], "previous_response_id": first.id},
            "references": {"input": [USER, *({"type": "item_reference", "id": i.id} for i in first.output), out]},
        }
        second = await client.responses.create(model="m", tools=[tool], **ways[how])
    assert second.output_text == "done"
    assert place.session.counters["extended"] == 1
    assert place.session.counters["branches"] == place.session.counters["edited"] == 0
    assert place.session.steps[1].parent == place.session.steps[0].id
    assert [message.role for message in place.session.steps[1].messages] == ["tool"]


async def test_arguments_spelled_anew_and_thoughts_left_out_continue_the_very_tokens(place: Place) -> None:
    """As opencode, Qwen Code and pi send calls back, and as OpenHands leaves out reasoning."""
    place.engine.texts = [THOUGHTFUL, "done"]
    async with place.client() as client:
        first = await client.responses.create(model="m", input=[USER], tools=[TOOL])
        message, call = (item.model_dump() for item in first.output[1:])
        call = {"type": "function_call", "call_id": call["call_id"], "name": "run", "arguments": '{"cmd":"ls"}'}
        echo = [{"role": "assistant", "content": message["content"][0]["text"]}, call]
        out = {
            "type": "function_call_output",
            "call_id": call["call_id"],
            "output": [{"type": "input_text", "text": "x"}],
        }
        await client.responses.create(model="m", input=[USER, *echo, out], tools=[TOOL])
    assert place.session.counters["extended"] == 1


# ---- answers that are kept ----


async def test_an_answer_is_found_listed_continued_and_deleted(place: Place) -> None:
    place.engine.texts = [CALL, "done", "bye"]
    async with place.client() as client:
        first = await client.responses.create(model="m", input=[USER], instructions="old", tools=[TOOL])
        assert (await client.responses.retrieve(first.id)).model_dump() == first.model_dump()
        out = {"type": "function_call_output", "call_id": first.output[-1].call_id, "output": "files"}
        async with client.responses.stream(
            model="m", input=[out], previous_response_id=first.id, tools=[TOOL], instructions="new"
        ) as stream:
            second = await stream.get_final_response()
        assert second.previous_response_id == first.id
        assert (await client.responses.retrieve(second.id)).output_text == "done"
        assert [(m.role, m.content) for m in place.session.steps[1].messages[:2]] == [("system", "new"), ("user", "hi")]
        listed = [item async for item in client.responses.input_items.list(second.id, order="asc", limit=1)]
        assert [item.type for item in listed] == ["message", "function_call", "function_call_output"]
        newest = await client.responses.input_items.list(second.id)
        assert [item.type for item in newest.data] == ["function_call_output", "function_call", "message"]
        await client.responses.delete(first.id)
        for lost in (client.responses.retrieve(first.id), client.responses.delete(first.id)):
            with pytest.raises(openai.NotFoundError, match="not found"):
                await lost
        # the conversation of a later answer does not need the answers before it
        third = await client.responses.create(model="m", input="more", previous_response_id=second.id, tools=[TOOL])
        assert third.output_text == "bye"
        assert [message.content for message in place.session.steps[2].messages][:1] == ["hi"]


async def test_an_answer_that_was_not_to_be_stored_is_not_found(place: Place) -> None:
    async with place.client() as client:
        answer = await client.responses.create(model="m", input="hi", store=False)
        with pytest.raises(openai.NotFoundError) as caught:
            await client.responses.retrieve(answer.id)
        assert caught.value.body["type"] == "invalid_request_error"
        for unknown in (answer.id, "resp_0", "", "x" * 10_000):
            reply = await place.post("responses", {"input": "hi", "previous_response_id": unknown or "-"})
            assert (reply.status_code, error_of(reply)["code"]) == (400, "previous_response_not_found")
        reference = {"type": "item_reference", "id": answer.output[0].id}
        reply = await place.post("responses", {"input": [USER, reference]})
        assert (reply.status_code, error_of(reply)["param"]) == (400, "input[1].id")
    assert len(place.session.steps) == 1


@pytest.mark.parametrize("query", ["?limit=0", "?limit=101", "?limit=x", "?limit=-1"])
async def test_a_wrong_question_about_an_answer_is_refused(place: Place, query: str) -> None:
    headers = {"Authorization": f"Bearer {KEY}"}
    async with place.client() as client, httpx.AsyncClient(trust_env=False, headers=headers) as plain:
        id = (await client.responses.create(model="m", input="hi")).id
        answer = await plain.get(f"{place.url}/responses/{id}/input_items{query}")
        assert (answer.status_code, error_of(answer)["param"]) == (400, "limit")
        answer = await plain.get(f"{place.url}/responses/{id}?stream=true")
        assert (answer.status_code, error_of(answer)["param"]) == (400, "stream")
        assert (await plain.post(f"{place.url}/responses/{id}", json={})).status_code == 404
        # Codex, told to use its built-in provider, asks for a websocket first
        assert (await plain.get(f"{place.url}/responses", headers={"Upgrade": "websocket"})).status_code == 404


async def test_answers_belong_to_their_session_and_its_key(place: Place) -> None:
    other = place.sessions.create("other", key="other-key")
    async with place.client() as client, httpx.AsyncClient(trust_env=False) as plain:
        id = (await client.responses.create(model="m", input="hi")).id
        for method in ("GET", "DELETE"):
            wrong = await plain.request(method, f"{place.url}/responses/{id}")
            assert (wrong.status_code, error_of(wrong)["code"]) == (401, "invalid_api_key")
        answer = await plain.get(
            f"{place.base}/sessions/other/v1/responses/{id}", headers={"Authorization": f"Bearer {other.key}"}
        )
        assert answer.status_code == 404
        assert (await client.responses.retrieve(id)).id == id
        place.sessions.close(place.session.id)
        with pytest.raises(openai.APIStatusError) as late:
            await client.responses.retrieve(id)
        assert late.value.status_code == 410


async def test_a_session_that_ended_takes_its_answers_with_it(place: Place) -> None:
    other = weakref.ref(place.sessions.create("other", key=KEY))
    async with openai.AsyncOpenAI(base_url=f"{place.base}/sessions/other/v1", api_key=KEY) as client:
        await client.responses.create(model="m", input="hi")
        kept = weakref.ref(place.server.endpoint.kept(other()))
        assert kept() is not None
    place.sessions.close("other")
    await until(lambda: not place.server.endpoint.exchanges)
    gc.collect()
    assert (other(), kept()) == (None, None)


async def test_ids_are_the_same_in_every_run_and_a_lost_answer_is_given_again() -> None:
    found = []
    for _ in range(2):
        async with serving() as place, place.client() as client:
            place.engine.texts = [THOUGHTFUL]
            place.engine.gate.clear()
            flying = asyncio.create_task(client.responses.create(model="m", input=[USER], tools=[TOOL], stream=True))
            await until(lambda place=place: place.engine.calls == 1)
            stream = await flying
            place.engine.gate.set()
            await stream.response.aclose()  # the client leaves; its request comes again
            again = await client.responses.create(model="m", input=[USER], tools=[TOOL])
            kept = await client.responses.retrieve(again.id)
            assert kept.model_dump() == again.model_dump()
            found.append(json.dumps([item.model_dump() for item in again.output]) + again.id)
    assert found[0] == found[1]


# ---- what agents cannot do without ----


async def test_what_codex_cannot_do_without(place: Place) -> None:
    """Whole items with `call_id` and `role` in output_item.done, and response.completed with an id."""
    place.engine.texts = [THOUGHTFUL]
    agents = {"type": "namespace", "name": "multi", "description": "", "tools": [TOOL]}
    found = await events(place, tools=[agents, {"type": "web_search"}], store=False, include=[], prompt_cache_key="k")
    done = {event["item"]["type"]: event["item"] for event in found if event["type"] == "response.output_item.done"}
    assert done["message"]["role"] == "assistant"
    assert done["message"]["content"][0]["text"] == "I look."
    assert done["function_call"]["call_id"]
    assert json.loads(done["function_call"]["arguments"]) == {"cmd": "ls"}
    assert done["function_call"]["namespace"] == "multi"
    assert done["reasoning"]["summary"][0]["text"] == "hm"
    assert found[-1]["type"] == "response.completed"
    assert found[-1]["response"]["id"].startswith("resp_")
    assert found[-1]["response"]["usage"]["total_tokens"] == sum(
        found[-1]["response"]["usage"][f"{kind}_tokens"] for kind in ("input", "output")
    )


async def test_what_pi_cannot_do_without(place: Place) -> None:
    """Every item is begun by output_item.added, and its deltas add up to it."""
    place.engine.texts = [THOUGHTFUL]
    found = await events(place, tools=[TOOL])
    added = {event["item"]["id"]: event["item"] for event in found if event["type"] == "response.output_item.added"}
    assert [item["type"] for item in added.values()] == ["reasoning", "message", "function_call"]
    pieces: dict[str, str] = {}
    for event in found:
        if "delta" in event:
            pieces[event["item_id"]] = pieces.get(event["item_id"], "") + event["delta"]
    assert list(pieces) == list(added)
    assert list(pieces.values())[:2] == ["hm", "I look."]
    assert json.loads(pieces[list(added)[2]]) == {"cmd": "ls"}


async def test_real_events_keep_a_silent_stream_alive() -> None:
    async with serving(keep_alive=0.05) as place:
        place.engine.gate.clear()
        call = asyncio.create_task(events(place))
        await until(lambda: place.engine.calls == 1)
        await asyncio.sleep(0.3)
        place.engine.gate.set()
        found = await call
    assert [event["type"] for event in found[:4]] == ["response.created", *["response.in_progress"] * 3]
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    assert found[-1]["type"] == "response.completed"


async def test_context_overflow_is_said_as_every_agent_understands_it() -> None:
    async with serving() as place:
        place.engine.max_context = 10
        answer = await place.post("responses", {"input": "x" * 50, "stream": True})
    assert answer.status_code == 400
    problem = error_of(answer)
    assert problem["code"] == "context_length_exceeded"
    assert problem["message"].startswith("This model's maximum context length is 10 tokens. However, your messages")


async def test_an_engine_that_fails_is_told_to_both_kinds_of_clients(place: Place) -> None:
    place.engine.fault = EngineError("out of order")
    async with place.client() as client:
        with pytest.raises(openai.APIError, match="engine cannot serve"):
            async for _ in await client.responses.create(model="m", input="hi", stream=True):
                pass
    found = await events(place)
    assert [event["type"] for event in found[-2:]] == ["error", "response.failed"]
    assert (await place.post("responses", {"input": "hi"})).status_code == 503


async def test_overridden_sampling_and_token_ids_are_said() -> None:
    async with serving(SamplingParams(temperature=1.0)) as place, place.client() as client:
        extra = {"return_token_ids": True}
        answer = await client.responses.create(model="m", input="hi", temperature=0, top_logprobs=2, extra_body=extra)
        assert answer.overridden == {"temperature": 1.0}
        assert answer.prompt_token_ids + answer.token_ids == place.session.tree.ids(place.session.steps[0].node)
        logprobs = answer.output[0].content[0].logprobs
        assert [entry.token for entry in logprobs][:5] == list("Hello")
        assert [(t.token, t.logprob) for t in logprobs[0].top_logprobs] == [("H", -0.25), ("A", -2.0)]


async def test_malformed_requests_are_refused_and_leave_no_trace(place: Place) -> None:
    for body in ([], "x", {}, {"input": []}, {"input": "hi", "background": True}, {"input": [{"role": "x"}]}):
        answer = await place.post("responses", body)
        assert answer.status_code == 400
        error_of(answer)
    broken = await place.post("responses", content=b"{")
    assert (broken.status_code, "not valid JSON" in error_of(broken)["message"]) == (400, True)
    assert place.session.steps == []
    assert place.engine.calls == 0
