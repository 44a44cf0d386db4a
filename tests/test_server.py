"""The endpoint over a real socket: official clients, routes, keys, admin, start and shutdown."""

from __future__ import annotations

import asyncio
import gc
import json
import socket
import struct
import weakref
from collections.abc import AsyncIterator
from urllib.parse import quote

import httpx
import openai
import pytest

from minirllm.dialects import DIALECTS
from minirllm.errors import RequestError, UserError
from minirllm.server import Endpoint, Server
from minirllm.session import Session
from minirllm.sessions import Sessions
from minirllm.types import SamplingParams
from tests.endpoint import ADMIN, CALL, KEY, TOOL, USER, Place, error_of, raw, serving, until


@pytest.fixture
async def place() -> AsyncIterator[Place]:
    async with serving() as place:
        yield place


# ---- official clients ----


async def test_the_official_client_gets_an_answer(place: Place) -> None:
    async with place.client() as client:
        answer = await client.chat.completions.create(model="whatever", messages=[USER])
        assert answer.choices[0].message.content == "Hello"
        assert answer.choices[0].finish_reason == "stop"
        assert answer.usage.completion_tokens == 6
        assert answer.id == f"chatcmpl-{place.session.steps[0].id}"
        raw = await client.completions.create(model="tiny", prompt="Say", max_tokens=3)
        assert (raw.choices[0].text, raw.choices[0].finish_reason) == ("Hel", "length")
        assert [m.id for m in (await client.models.list()).data] == ["tiny"]


async def test_the_sync_client_in_a_thread(place: Place) -> None:
    def ask() -> str:
        with openai.OpenAI(base_url=place.url, api_key=KEY) as client:
            pieces = client.chat.completions.create(model="m", messages=[USER], stream=True)
            return "".join(chunk.choices[0].delta.content or "" for chunk in pieces)

    assert await asyncio.to_thread(ask) == "Hello"


async def test_a_stream_comes_token_by_token_with_one_id(place: Place) -> None:
    async with place.client() as client:
        options = {"include_usage": True}
        stream = await client.chat.completions.create(model="m", messages=[USER], stream=True, stream_options=options)
        chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].delta.content for c in chunks if c.choices and c.choices[0].delta.content] == list("Hello")
    assert {chunk.id for chunk in chunks} == {f"chatcmpl-{place.session.steps[0].id}"}
    assert chunks[-1].usage.completion_tokens == 6
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"


async def test_tool_calls_whole_and_streamed_and_their_results(place: Place) -> None:
    place.engine.texts = [CALL, "done", CALL]
    async with place.client() as client:
        answer = (await client.chat.completions.create(model="m", messages=[USER], tools=[TOOL])).choices[0]
        call = answer.message.tool_calls[0]
        assert (answer.finish_reason, call.function.name, json.loads(call.function.arguments)) == (
            "tool_calls",
            "run",
            {"cmd": "ls"},
        )
        result = {"role": "tool", "tool_call_id": call.id, "content": [{"type": "text", "text": "a.txt"}]}
        messages = [USER, answer.message.model_dump(exclude_none=True), result]
        second = await client.chat.completions.create(model="m", messages=messages, tools=[TOOL])
        assert second.choices[0].message.content == "done"
        assert place.session.counters["extended"] == 1
        async with client.chat.completions.stream(model="m", messages=[USER], tools=[TOOL]) as stream:
            final = (await stream.get_final_completion()).choices[0]
        assert final.finish_reason == "tool_calls"
        assert final.message.tool_calls[0].function.name == "run"
        assert json.loads(final.message.tool_calls[0].function.arguments) == {"cmd": "ls"}


async def test_n_stop_logprobs_and_token_ids(place: Place) -> None:
    async with place.client() as client:
        answer = await client.chat.completions.create(
            model="m",
            messages=[USER],
            n=2,
            stop="lo",
            logprobs=True,
            top_logprobs=2,
            extra_body={"return_token_ids": True},
        )
    assert [c.message.content for c in answer.choices] == ["Hel", "Hel"]
    assert answer.choices[1].token_ids == [*b"Hello"]
    content = answer.choices[0].logprobs.content
    assert [t.token for t in content] == list("Hello")
    assert [(t.token, t.logprob, t.bytes) for t in content[0].top_logprobs] == [("H", -0.25, [72]), ("A", -2.0, [65])]
    assert answer.prompt_token_ids == place.session.tree.ids(0)[: len(answer.prompt_token_ids)]
    assert len(answer.prompt_token_ids) == answer.usage.prompt_tokens


async def test_overridden_sampling_is_said() -> None:
    async with serving(SamplingParams(temperature=1.0)) as place:
        body = (await place.post(body={"messages": [USER], "temperature": 0, "max_tokens": 3})).json()
        assert body["overridden"] == {"temperature": 1.0}
        assert "overridden" not in (await place.post(body={"messages": [USER]})).json()


# ---- routes and keys ----


async def test_health_and_unknown_routes(place: Place) -> None:
    async with httpx.AsyncClient(base_url=place.base, trust_env=False) as client:
        assert (await client.get("/health")).json()["status"] == "ok"
        for path in ("/nowhere", "/v1/chat/completions/x", "/sessions/task:0%2F1/v1/embeddings"):
            assert "no route" in error_of(missing := await client.get(path))["message"]
            assert missing.status_code == 404
        assert (await client.post("/sessions/task:0%2F1/v1/embeddings", json={})).status_code == 404
        wrong = await client.delete("/sessions/task:0%2F1/v1/chat/completions")
        assert wrong.status_code == 405
        assert "DELETE is not allowed" in error_of(wrong)["message"]


async def test_probing_the_session_base(place: Place) -> None:
    async with httpx.AsyncClient(base_url=place.base, trust_env=False) as client:
        for path in ("/sessions/task:0%2F1", "/sessions/task%3A0%2F1/v1"):
            assert (await client.head(path)).status_code == 200
        assert (await client.head("/sessions/other")).status_code == 404


@pytest.mark.parametrize("header", [None, "Bearer wrong", "Bearer", "Basic secret", "secret", "Bearer s\xe9cret"])
async def test_a_session_needs_its_own_key(place: Place, header) -> None:
    headers = {} if header is None else {"Authorization": header.encode("latin-1")}
    async with httpx.AsyncClient(trust_env=False) as client:
        answer = await client.post(f"{place.url}/chat/completions", json={"messages": [USER]}, headers=headers)
    assert answer.status_code == 401
    assert error_of(answer)["code"] == "invalid_api_key"
    assert KEY not in answer.text
    assert place.engine.calls == 0


async def test_unknown_and_closed_sessions(place: Place) -> None:
    async with httpx.AsyncClient(
        base_url=place.base, trust_env=False, headers={"Authorization": f"Bearer {KEY}"}
    ) as client:
        answer = await client.post("/sessions/nobody/v1/chat/completions", json={"messages": [USER]})
        assert (answer.status_code, error_of(answer)["code"]) == (404, "session_not_found")
        place.sessions.close(place.session.id)
        late = await place.post(body={"messages": [USER]})
        assert (late.status_code, error_of(late)["code"]) == (410, "session_closed")


async def test_serving_without_a_session_is_off_unless_enabled(place: Place) -> None:
    async with httpx.AsyncClient(base_url=place.base, trust_env=False) as client:
        answer = await client.post("/v1/chat/completions", json={"messages": [USER]})
        assert answer.status_code == 404
        assert "serves sessions only" in error_of(answer)["message"]

        def open_session() -> Session:
            return Session("open", "open-key", place.engine, place.engine.renderer, "tiny")

        async with (
            serving(serve_session=open_session) as other,
            openai.AsyncOpenAI(base_url=f"{other.base}/v1", api_key="open-key") as agent,
        ):
            said = await agent.chat.completions.create(model="tiny", messages=[USER])
            assert said.choices[0].message.content == "Hello"
            refused = await client.post(f"{other.base}/v1/completions", json={"prompt": "x"})
            assert refused.status_code == 401


async def test_admin_creates_lists_and_closes_sessions(place: Place) -> None:
    async with httpx.AsyncClient(
        base_url=place.base, trust_env=False, headers={"Authorization": f"Bearer {ADMIN}"}
    ) as admin:
        made = (await admin.post("/admin/sessions", json={"id": "my task/7"})).json()
        assert made["base_url"] == f"{place.base}/sessions/my%20task%2F7/v1"
        async with openai.AsyncOpenAI(base_url=made["base_url"], api_key=made["key"]) as agent:
            await agent.chat.completions.create(model="tiny", messages=[USER])
        listed = (await admin.get("/admin/sessions")).json()["data"]
        assert {s["id"]: s["counters"]["calls"] for s in listed} == {"task:0/1": 0, "my task/7": 1}
        assert not any("key" in s for s in listed)
        assert (await admin.get("/admin/sessions/my%20task%2F7")).json()["model"] == "tiny"
        assert (await admin.post("/admin/sessions", json={"id": "my task/7"})).status_code == 409
        assert error_of(await admin.post("/admin/sessions", json={"id": 5}))["param"] == "id"
        assert (await admin.post("/admin/sessions")).json()["id"]
        assert (await admin.delete("/admin/sessions/my%20task%2F7")).json()["closed"] is True
        assert (await admin.get("/admin/sessions/none")).status_code == 404


@pytest.mark.parametrize("sid", [".", "..", "a\nb", "a\x00", "", "x" * 201, 5])
async def test_a_session_id_that_no_url_can_carry_is_refused(place: Place, sid: object) -> None:
    async with httpx.AsyncClient(
        base_url=place.base, trust_env=False, headers={"Authorization": f"Bearer {ADMIN}"}
    ) as admin:
        refused = await admin.post("/admin/sessions", json={"id": sid})
        assert (refused.status_code, error_of(refused)["param"]) == (400, "id")


async def test_admin_sessions_sample_differently_and_an_id_repeats(place: Place) -> None:
    async with httpx.AsyncClient(
        base_url=place.base, trust_env=False, headers={"Authorization": f"Bearer {ADMIN}"}
    ) as admin:
        ids = []
        for sid in ("a", "b/../c", "%2e é?#", "a"):
            made = (await admin.post("/admin/sessions", json={"id": sid})).json()
            async with openai.AsyncOpenAI(base_url=made["base_url"], api_key=made["key"]) as agent:
                ids.append((await agent.chat.completions.create(model="tiny", messages=[USER])).id)
            assert (await admin.delete(f"/admin/sessions/{quote(sid, safe='')}")).status_code == 200
    assert ids[0] == ids[3]
    assert len(set(ids)) == 3


async def test_admin_needs_the_admin_key(place: Place) -> None:
    async with httpx.AsyncClient(
        base_url=place.base, trust_env=False, headers={"Authorization": f"Bearer {KEY}"}
    ) as agent:
        for method, path in [("GET", ""), ("POST", ""), ("GET", "/task:0%2F1"), ("DELETE", "/task:0%2F1")]:
            assert (await agent.request(method, f"/admin/sessions{path}")).status_code == 401
    assert not place.session.closed


# ---- the server itself ----


async def test_close_is_quick_and_tells_clients_in_flight(place: Place) -> None:
    place.engine.gate.clear()
    call = asyncio.create_task(place.post(body={"messages": [USER]}))
    reader, writer = await raw(place, stream=True, temperature=0)
    stuck_reader, stuck = await raw(place, "content-length: 5000", b"{")  # never sends the rest
    await until(lambda: place.engine.calls == 2)
    async with asyncio.timeout(5):
        await place.server.close()
        await place.server.close()
    assert (answer := await call).status_code == 503
    assert "shutting down" in error_of(answer)["message"]
    assert b"shutting down" in await reader.read()
    assert await stuck_reader.read() == b""
    for connection in (writer, stuck):
        connection.close()
    with pytest.raises(httpx.ConnectError):
        await place.post(body={"messages": [USER]})


async def test_a_taken_port_is_one_sentence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"Cannot listen on 127.0.0.1:{port}"):
            await Server(Endpoint(Sessions(None, None, "tiny"), model="tiny")).start(port=port)


async def test_many_calls_at_once_are_queued_never_refused(place: Place) -> None:
    place.engine.gate.clear()
    calls = [
        asyncio.create_task(place.post(body={"messages": [{"role": "user", "content": str(k)}]})) for k in range(60)
    ]
    await until(lambda: place.session.counters["calls"] == 60 and place.engine.calls == 16)
    assert place.session.max_streams == 16  # the rest wait
    place.engine.gate.set()
    assert {answer.status_code for answer in await asyncio.gather(*calls)} == {200}
    assert len(place.session.steps) == 60


async def test_a_connection_that_was_reset_is_forgotten(place: Place) -> None:
    body = json.dumps({"messages": [USER]}).encode()
    reader, writer = await raw(place, body=body)
    await reader.readuntil(b"}]")  # the answer has begun to arrive: a keep-alive timer of 75 seconds is running
    await until(lambda: not place.server.endpoint.exchanges)
    (connection,) = place.server._uvicorn.server_state.connections
    forgotten = weakref.ref(connection)
    del connection
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
    await until(lambda: not place.server._uvicorn.server_state.connections)
    await asyncio.sleep(0)
    gc.collect()
    assert forgotten() is None


@pytest.mark.parametrize("name", sorted(DIALECTS))
async def test_a_wrong_method_is_told_in_the_shape_of_the_route(place: Place, name: str) -> None:
    dialect = DIALECTS[name]
    shape = dialect.error(RequestError("x", status=405))
    async with httpx.AsyncClient(trust_env=False) as client:
        for route in (*dialect.ROUTES, *dialect.COUNT):
            for base in (place.base, place.url.removesuffix("/v1")):
                response = await client.put(base + route.replace("{model}", "tiny"))
                assert response.status_code == 405
                assert response.headers["allow"]
                assert response.json().keys() == shape.keys()
                assert response.json()["error"].keys() == shape["error"].keys()
