"""Serving outside any session, weights of a checkpoint, engines by name."""

from __future__ import annotations

import asyncio
import gc
import socket
from pathlib import Path

import httpx
import pytest

from minirllm.config import Config
from minirllm.errors import CheckpointError, TaskError, UserError
from minirllm.server import Endpoint, Server
from minirllm.sessions import Sessions
from minirllm.stack import load, serving

TINY = Config(model="tiny", max_tokens=12, slots=4)


async def ask(base_url: str, key: str, **fields: object) -> httpx.Response:
    body = {"messages": [{"role": "user", "content": "Hello"}], **fields}
    async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
        return await client.post(
            f"{base_url}/v1/chat/completions", json=body, headers={"Authorization": f"Bearer {key}"}
        )


async def test_open_serving_samples_anew_unless_a_seed_is_given() -> None:
    async with serving(TINY, open_key="sk-open") as stack:
        answers = [(await ask(stack.base_url, "sk-open")).json()["choices"][0]["message"]["content"] for _ in range(3)]
        assert len(set(answers)) == 3
        seeded = [
            (await ask(stack.base_url, "sk-open", seed=7)).json()["choices"][0]["message"]["content"] for _ in range(3)
        ]
        assert len(set(seeded)) == 1
        assert (await ask(stack.base_url, "wrong")).status_code == 401
        assert list(stack.sessions) == []


async def test_the_collector_leaves_alone_what_start_up_made() -> None:
    async with serving(TINY):
        assert gc.get_freeze_count() > 100_000
        assert len(gc.get_objects()) < gc.get_freeze_count()
    assert gc.get_freeze_count() == 0


async def test_without_a_key_nothing_is_served_outside_sessions() -> None:
    async with serving(TINY) as stack:
        assert (await ask(stack.base_url, "any")).status_code == 404
        async with httpx.AsyncClient(trust_env=False) as client:
            assert (await client.get(f"{stack.base_url}/admin/sessions")).status_code in (401, 404)


async def test_the_admin_routes_have_a_key_of_their_own() -> None:
    async with serving(TINY, open_key="sk-open", admin_key="sk-admin") as stack:
        async with httpx.AsyncClient(trust_env=False) as client:
            url = f"{stack.base_url}/admin/sessions"
            statuses = [
                (await client.get(url, headers={"Authorization": f"Bearer {key}"})).status_code
                for key in ("sk-open", "sk-admin")
            ]
        assert statuses == [401, 200]


async def test_answers_are_not_held_back_by_the_socket() -> None:
    server = Server(Endpoint(Sessions(None, None, "m"), model="m"))
    base_url = await server.start()
    host, _, port = base_url.removeprefix("http://").partition(":")
    _reader, writer = await asyncio.open_connection(host, int(port))
    accepted = [c.transport.get_extra_info("socket") for c in server._uvicorn.server_state.connections]
    for _ in range(100):
        if accepted:
            break
        await asyncio.sleep(0.01)
        accepted = [c.transport.get_extra_info("socket") for c in server._uvicorn.server_state.connections]
    assert [s.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) for s in accepted] == [1]
    writer.close()
    await server.close()


async def test_a_taken_port_and_a_missing_checkpoint_are_sentences(tmp_path: Path) -> None:
    async with serving(TINY) as stack:
        port = int(stack.base_url.rpartition(":")[2])
        with pytest.raises(UserError, match=str(port)):
            async with serving(TINY, address=("127.0.0.1", port)):
                pass
    with pytest.raises(CheckpointError, match="MANIFEST"):
        async with serving(TINY, weights=tmp_path):
            pass
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(CheckpointError, match=r"holds no whole checkpoint\.$"):
        async with serving(TINY, weights=tmp_path):
            pass
    await asyncio.to_thread((tmp_path / "checkpoints" / "step_000001").mkdir)
    with pytest.raises(CheckpointError, match=r"no whole checkpoint\. Checkpoint .* is not whole: .* last\.$"):
        async with serving(TINY, weights=tmp_path):
            pass


@pytest.mark.parametrize("name", ["TINY", "Path"])
def test_an_engine_that_is_none_is_named(name: str) -> None:
    with pytest.raises(TaskError, match=f"^engine {__name__}:{name}: TypeError: "):
        load(Config(**{**TINY.to_dict(), "engine": f"{__name__}:{name}"}))
