"""Streams of the Responses dialect: every event, its fields and its place, and that all of it is the answer."""

from __future__ import annotations

import json
from itertools import count
from typing import get_args

import pytest
from openai.types.responses import ResponseStreamEvent

from minirllm.dialects import responses
from minirllm.errors import RequestError, SessionClosed
from minirllm.types import CallDelta, Delta, Message, ModelReply, ModelRequest, SampledToken, ToolCall
from tests.test_responses import ID, LS, parse, reply, text_of
from tests.test_responses_items import PATCH, RUN

EVENTS = {
    get_args(kind.model_fields["type"].annotation)[0]: kind for kind in get_args(get_args(ResponseStreamEvent)[0])
}


def events(frames: list[str]) -> list[dict]:
    """The data of the events, each checked: its name, its number, the official type."""
    found = []
    for number, frame in zip(count(), frames, strict=False):
        name, data, *rest = frame.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert (name, rest) == (f"event: {event['type']}", ["", ""])
        assert event["sequence_number"] == number
        EVENTS[event["type"]].model_validate(event)
        found.append(event)
    return found


def told(request: ModelRequest, answer: ModelReply, *deltas: Delta) -> list[dict]:
    stream = responses.Stream(request, text_of, "tiny")
    stream.accepted(answer.id, answer.prompt_ids)
    return events([*stream.start(), *(f for d in deltas for f in stream.delta(d)), *stream.finish(answer)])


def kinds(found: list[dict]) -> list[str]:
    return [event["type"].removeprefix("response.") for event in found]


BEGIN = ["created", "in_progress"]
TEXT = ["output_item.added", "content_part.added", "output_text.delta", "output_text.done", "content_part.done"]
SUMMARY = ("part.added", "text.delta", "text.done", "part.done")
THINK = ["output_item.added", *(f"reasoning_summary_{name}" for name in SUMMARY)]
CALLED = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"]
PATCHED = ["output_item.added", "custom_tool_call_input.delta", "custom_tool_call_input.done", "output_item.done"]


def test_the_events_of_a_text_in_their_order() -> None:
    found = told(parse(), reply(), Delta(0, "He"), Delta(0), Delta(0, "llo"))
    assert kinds(found) == [*BEGIN, *TEXT[:2], "output_text.delta", *TEXT[2:], "output_item.done", "completed"]
    assert [event["delta"] for event in found if "delta" in event] == ["He", "llo"]
    assert found[0]["response"]["status"] == found[1]["response"]["status"] == "in_progress"
    added, done = found[2], found[-2]
    assert (added["item"]["content"], added["item"]["status"], added["item"]["role"]) == (
        [],
        "in_progress",
        "assistant",
    )
    assert (done["item"]["content"][0]["text"], done["item"]["status"], done["item"]["role"]) == (
        "Hello", "completed", "assistant",
    )  # fmt: skip
    assert {event["item_id"] for event in found if "item_id" in event} == {f"msg_{ID}_0"} == {done["item"]["id"]}
    assert {event["response"]["id"] for event in found if "response" in event} == {f"resp_{ID}"}
    assert found[-1]["response"]["output"] == [done["item"]]
    assert found[-1]["response"]["usage"]["total_tokens"] == 7


def test_the_events_of_thoughts_text_and_calls_in_their_order() -> None:
    patch = ToolCall(f"call_{ID}_1", "patch", '{"input": "a\\nb"}')
    answer = reply(Message("assistant", "I look.", (LS, patch), reasoning="hm ok"), finish="tool_calls")
    pieces = [
        Delta(0, reasoning="hm"), Delta(0, reasoning=" ok"), Delta(0, "I look."),
        Delta(0, calls=(CallDelta(0, LS.id, "run", '{"cmd"'),)), Delta(0, calls=(CallDelta(0, arguments=': "ls"}'),)),
        Delta(0, calls=(CallDelta(1, patch.id, "patch"),)),
        Delta(0, calls=(CallDelta(1, arguments='{"input": "a\\nb"}'),)),
    ]  # fmt: skip
    found = told(parse(tools=[RUN, PATCH]), answer, *pieces)
    assert kinds(found) == [
        *BEGIN, *THINK[:2], THINK[2], THINK[2], *THINK[3:], "output_item.done", *TEXT, "output_item.done",
        *CALLED, *PATCHED, "completed",
    ]  # fmt: skip
    assert [event["item"]["type"] for event in found if event["type"] == "response.output_item.done"] == [
        "reasoning", "message", "function_call", "custom_tool_call",
    ]  # fmt: skip
    assert [event["output_index"] for event in found if event["type"] == "response.output_item.added"] == [0, 1, 2, 3]
    done = [event["item"] for event in found if event["type"] == "response.output_item.done"]
    assert (done[2]["call_id"], done[2]["name"], done[2]["arguments"]) == (LS.id, "run", '{"cmd": "ls"}')
    assert (done[3]["call_id"], done[3]["name"], done[3]["input"]) == (patch.id, "patch", "a\nb")
    assert found[-1]["response"]["output"] == done
    # streamed or not, cut into pieces or not, the answer is the same
    whole = responses.response(answer, parse(tools=[RUN, PATCH]), text_of)
    assert {**found[-1]["response"], "created_at": 0} == {**whole, "created_at": 0}
    assert kinds(told(parse(tools=[RUN, PATCH]), answer)) == [kind for i, kind in enumerate(kinds(found)) if i != 5]


def test_a_call_is_told_at_the_end_and_what_follows_it_at_once() -> None:
    answer = reply(Message("assistant", "then", (LS,)), finish="tool_calls")
    found = told(
        parse(tools=[RUN]), answer, Delta(0, calls=(CallDelta(0, LS.id, "run", LS.arguments),)), Delta(0, "then")
    )
    assert kinds(found) == [*BEGIN, *TEXT, "output_item.done", *CALLED, "completed"]


@pytest.mark.parametrize("text", ['{"cmd": "l', '{"cmd": "ls"}', "nonsense"])
@pytest.mark.parametrize("finish", ["stop", "length"])
def test_a_call_that_broke_is_text_and_no_client_sees_it_begin(text, finish) -> None:
    """An item that was begun and is not there at the end makes the official client give up the answer."""
    answer = reply(Message("assistant", f"<tool_call>{text}", malformed=True), finish=finish)
    begun = Delta(0, calls=(CallDelta(0, LS.id, "run", text),))
    broken = told(parse(tools=[RUN]), answer, begun)
    assert kinds(broken) == [*BEGIN, *TEXT, "output_item.done", "completed" if finish == "stop" else "incomplete"]
    assert broken[-1]["response"]["output"][0]["content"][0]["text"] == f"<tool_call>{text}"
    assert broken[-1]["response"]["malformed_tool_call"] is True
    assert kinds(told(parse(tools=[RUN]), answer, begun, Delta(0, f"<tool_call>{text}"))) == kinds(broken)


def test_an_empty_answer_has_the_events_of_a_message() -> None:
    found = told(parse(), reply(Message("assistant")))
    assert kinds(found) == [*BEGIN, *(kind for kind in TEXT if "delta" not in kind), "output_item.done", "completed"]


def test_an_answer_that_was_cut_ends_incomplete() -> None:
    found = told(parse(), reply(finish="length"), Delta(0, "He"))
    assert kinds(found)[-1] == "incomplete"
    assert found[-2]["item"]["status"] == "incomplete"
    assert found[-1]["response"]["incomplete_details"] == {"reason": "max_output_tokens"}


def test_keep_alive_events_are_events_that_clients_know() -> None:
    stream = responses.Stream(parse(instructions="x" * 100_000), text_of, "tiny")
    stream.accepted(f"chatcmpl-{ID}", [5])
    frames = [*stream.start(), *stream.keep_alive(), *stream.delta(Delta(0, "He")), *stream.keep_alive()]
    assert len(frames[2]) < 500  # many calls may wait at once
    found = events([*frames, *stream.finish(reply())])
    assert [event["type"] for event in (found[2], found[6])] == ["response.in_progress"] * 2
    assert found[6]["response"]["id"] == f"resp_{ID}"


def test_an_answer_begun_before_its_id_was_known_keeps_the_one_it_has() -> None:
    stream = responses.Stream(parse(), text_of, "tiny")
    frames = stream.keep_alive() and stream.start()
    stream.accepted(f"chatcmpl-{ID}", [5])
    ids = {json.loads(frame.split("data: ")[1])["response"]["id"] for frame in [*frames, *stream.finish(reply())[-1:]]}
    assert len(ids) == 1
    assert ids != {f"resp_{ID}"}


def test_logprobs_come_with_the_text_and_again_with_its_end() -> None:
    request = parse(include=["message.output_text.logprobs"], return_token_ids=True)
    tokens = [SampledToken(1, -0.5), SampledToken(2, -1.0), SampledToken(9, -1.5)]
    pieces = [Delta(0, tokens=(tokens[0],)), Delta(0, "Hello", tokens=(tokens[1],)), Delta(0, tokens=(tokens[2],))]
    found = told(request, reply(), *pieces)
    heard = [entry["logprob"] for event in found if "delta" in event for entry in event["logprobs"]]
    (done,) = [event for event in found if event["type"] == "response.output_text.done"]
    assert heard == [entry["logprob"] for entry in done["logprobs"]] == [-0.5, -1.0, -1.5]
    assert found[-1]["response"]["output"] == responses.response(reply(), request, text_of)["output"]
    assert found[0]["response"]["prompt_token_ids"] == [5, 6, 7, 8]
    assert found[-1]["response"]["token_ids"] == [1, 2, 9]


@pytest.mark.parametrize(
    ("problem", "code"),
    [(RequestError("broken", status=503), "server_error"), (SessionClosed("over"), "session_closed")],
)
def test_an_error_after_the_beginning_is_told_in_both_ways(problem, code) -> None:
    stream = responses.Stream(parse(), text_of, "tiny")
    stream.accepted(f"chatcmpl-{ID}", [5])
    stream.start()
    error, failed = (json.loads(frame.split("data: ")[1]) for frame in stream.fail(problem))
    assert (error["type"], error["message"], error["error"]["message"]) == ("error", problem.message, problem.message)
    assert (failed["type"], failed["response"]["status"]) == ("response.failed", "failed")
    assert failed["response"]["error"] == {"code": code, "message": problem.message}
    assert (error["sequence_number"], failed["sequence_number"]) == (2, 3)
