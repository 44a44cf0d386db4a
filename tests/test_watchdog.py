"""Nothing can hang a run: agents, graders and clients that do not end are named and ended. Over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from minirllm import AgentConfig, Episode, Task, evaluator, watchdog
from minirllm.client import chat
from minirllm.rollouts import Job
from minirllm.types import TerminationReason
from tests import agent_server as agents
from tests.agent_server import TASK, USER, ask
from tests.endpoint import KEY, Place, raw, serving, until

ROOT = Path(__file__).parent.parent


@pytest.fixture
async def place() -> AsyncIterator[agents.Place]:
    async with agents.serving() as it:
        yield it


def threads_of_agents() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "agent"]


# ---- agents ----


@pytest.mark.parametrize("is_async", [True, False])
async def test_an_agent_that_never_returns_is_named_and_ended(
    place: agents.Place, caplog: pytest.LogCaptureFixture, is_async: bool
) -> None:
    async def waits(task: Task, config: AgentConfig) -> None:
        await ask(task, config)
        await asyncio.Event().wait()  # here

    def spins(task: Task, config: AgentConfig) -> None:
        while True:
            time.sleep(0.01)  # here

    episode = await place.run(waits if is_async else spins, episode_timeout=0.6, retries=3)
    assert (episode.termination_reason, episode.attempt, episode.reward) == (TerminationReason.TIMEOUT, 0, None)
    here = [n for n, line in enumerate(Path(__file__).read_text().splitlines(), 1) if line.endswith("# here")]
    line = here[0] if is_async else here[1]
    where = rf"test_watchdog.py line {line}; no unanswered model call since [0-9.]+ s"
    pattern = rf"agent did not end within 0.6 s \({where}\)$"
    assert re.match(pattern, episode.reason)
    (record,) = caplog.records
    assert record.getMessage() == f"task 'org/t:1', rollout 3, attempt 0: {episode.reason}"
    await until(lambda: not threads_of_agents())  # the thread has ended, too


async def test_a_model_call_that_is_not_answered_is_named(place: agents.Place) -> None:
    place.engine._permits = asyncio.Semaphore(0)  # no token is ever sampled
    episode = await place.run(ask, episode_timeout=0.3)
    assert re.search(r"; 1 unanswered model call\(s\), the first since 0\.\d+ s\)$", episode.reason)
    await until(lambda: (place.engine.active, list(place.sessions)) == (0, []))  # and it was ended in the engine


async def test_an_agent_that_floods_calls_is_stopped_and_the_others_are_served(place: agents.Place) -> None:
    refusals: list[int] = []

    async def agent(task: Task, config: AgentConfig) -> str:
        if task.id != "flood":
            return await ask(task, config)
        async with httpx.AsyncClient(base_url=config.base_url, trust_env=False) as client:
            headers = {"Authorization": f"Bearer {config.api_key}"}
            while True:  # whatever it is told
                reply = await client.post("chat/completions", json={"model": "m", "messages": USER}, headers=headers)
                if reply.status_code != 200:
                    refusals.append(reply.status_code)

    jobs = [Job(Task("flood")), *(Job(Task(str(i))) for i in range(8))]
    flood, *others = await place.runner(agent, episode_timeout=2.0).run_many(jobs)
    assert flood.termination_reason is TerminationReason.TIMEOUT
    assert flood.metrics["calls"] == 4  # its quota
    assert set(refusals) == {403}
    assert [episode.reward for episode in others] == [1.0] * 8


@pytest.mark.filterwarnings("ignore:.*ignored GeneratorExit:pytest.PytestUnraisableExceptionWarning")
@pytest.mark.filterwarnings("ignore:.*stubborn:pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("swallows", [asyncio.CancelledError, Exception, BaseException])
async def test_a_task_that_ignores_its_cancellation_is_ended_all_the_same(place: agents.Place, swallows: Any) -> None:
    ticks: list[float] = []

    async def stubborn(task: Task, config: AgentConfig) -> None:
        while True:
            with contextlib.suppress(swallows):
                await asyncio.sleep(0.01)
                ticks.append(time.monotonic())

    episode = await place.run(stubborn, episode_timeout=0.05)
    assert episode.termination_reason is TerminationReason.TIMEOUT
    ended = len(ticks)
    assert (await place.run(ask)).reward == 1.0
    await asyncio.sleep(0.2)
    assert 0 < len(ticks) == ended


async def test_a_thread_that_ignores_its_end_is_left_behind_and_refused(place: agents.Place) -> None:
    go_on, refused = threading.Event(), threading.Event()
    late: list[int] = []

    def stubborn(task: Task, config: AgentConfig) -> None:
        while not go_on.is_set():
            with contextlib.suppress(BaseException):
                time.sleep(0.01)
        key = {"Authorization": f"Bearer {config.api_key}"}
        late.append(httpx.post(f"{config.base_url}/chat/completions", json={"messages": USER}, headers=key).status_code)
        refused.set()

    episode = await place.run(stubborn, episode_timeout=0.2)
    assert episode.termination_reason is TerminationReason.TIMEOUT
    assert (await place.run(ask)).reward == 1.0  # the run goes on
    go_on.set()
    await until(refused.is_set)
    assert late == [410]


@pytest.mark.parametrize("how", ["spin", "sleep"])
async def test_an_agent_that_blocks_the_loop_past_the_deadline_is_ended(place: agents.Place, how: str) -> None:
    async def agent(task: Task, config: AgentConfig) -> None:
        await chat(config, USER)
        if how == "sleep":
            real_sleep(3600)
        while True:
            pass

    (episode,) = await place.runner(agent, episode_timeout=0.5).run_many([Job(TASK)])
    assert (episode.termination_reason, episode.reward) == (TerminationReason.ERROR, None)
    assert "TimeoutError: it blocked the event loop for 0.5 s (test_watchdog.py line" in episode.reason


class Nameless(Exception):
    def __str__(self) -> str:
        raise ValueError("no")


@pytest.mark.parametrize("where", ["agent", "evaluator"])
async def test_an_error_without_a_message_is_data_too(place: agents.Place, where: str) -> None:
    async def agent(task: Task, config: AgentConfig) -> str:
        if where == "agent":
            raise Nameless
        return await ask(task, config)

    def grade(task: Task, episode: Episode) -> float:
        raise Nameless

    assert "Nameless: its message cannot be had" in (await place.run(agent, grade)).reason


PROGRAM = """
import asyncio, sys, threading, time
from minirllm import watchdog
watchdog.GRACE = 0.05

async def stubborn():
    while True:
        try:
            await asyncio.sleep(0.01)
        except BaseException:
            pass

async def main():
    {body}
    return 7

code = watchdog.run(main())
watchdog.LEAVING = 0.5
watchdog.leave(code)
print("over", flush=True)
sys.exit(code)
"""


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("asyncio.create_task(stubborn()); await asyncio.sleep(0.05)", ""),
        ("for _ in range(99): asyncio.create_task(asyncio.to_thread(time.sleep, 3600))\n"
         "    await asyncio.sleep(0.1); await asyncio.to_thread(int)", ""),
        ("threading.Thread(target=time.sleep, args=(3600,), name='mine').start()", "threads that an agent left: mine"),
    ],
    ids=["task", "pool", "thread"],
)  # fmt: skip
def test_the_program_ends_whatever_an_agent_left(body: str, said: str) -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", PROGRAM.format(body=body)]
    ended = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (7, "over\n")
    assert ended.stderr == "" if not said else said in ended.stderr


# ---- graders ----


@evaluator(timeout=0.5)
def spins_in_a_process(task: Task, episode: Episode) -> float:
    while True:
        pass


@pytest.mark.parametrize("in_process", [True, False])
async def test_a_grader_that_spins_is_named_and_ended(place: agents.Place, in_process: bool) -> None:
    def spins(task: Task, episode: Episode) -> float:
        while True:
            time.sleep(0.01)

    runner = place.runner(ask, spins_in_a_process if in_process else spins, grading_timeout=0.5)
    assert (runner.graders is not None) == in_process
    try:
        episode = await runner.run(Job(TASK))
        assert (episode.termination_reason, episode.reward) == (TerminationReason.GRADING_TIMEOUT, None)
        assert "0.5 s" in episode.reason
        if runner.graders is not None:
            await asyncio.gather(*runner.graders.reaping)  # the process is gone
            assert runner.graders.idle == []
        else:
            assert "(test_watchdog.py line" in episode.reason
            await until(lambda: not threads_of_agents())
    finally:
        await runner.close()


# ---- clients ----


@pytest.fixture
async def hasty(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Place]:
    for module in ("server", "exchange"):
        monkeypatch.setattr(f"minirllm.{module}.STALLED", 0.4)
    async with serving() as place:
        yield place


async def connect(place: Place, limit: int = 2**16) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    url = urlsplit(place.base)
    return await asyncio.open_connection(url.hostname, url.port, limit=limit)


def connections(place: Place) -> int:
    assert place.server._uvicorn is not None
    return len(place.server._uvicorn.server_state.connections)


@pytest.mark.parametrize("sent", [b"", b"POST /v1/chat/comple", b"GET /health HTTP/1.1\r\nhost: x\r\nx: "])
async def test_a_client_that_stalls_in_its_headers_is_closed(hasty: Place, caplog: Any, sent: bytes) -> None:
    reader, writer = await connect(hasty)
    writer.write(sent)
    with contextlib.suppress(ConnectionResetError):
        assert await reader.read() == b""
    await until(lambda: connections(hasty) == 0)
    assert "a client neither sent nor read for" in caplog.text
    writer.close()
    assert (await hasty.post(body={"messages": agents.USER})).status_code == 200


async def test_a_client_that_drips_its_second_headers_is_closed(hasty: Place) -> None:
    reader, writer = await connect(hasty)
    writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
    assert b" 200 " in await reader.readline()
    writer.write(b"GET /health HTTP/1.1\r\n")
    try:
        while connections(hasty):
            writer.write(b"x: y\r\n")
            await asyncio.sleep(0.05)
    finally:
        writer.close()


@pytest.mark.parametrize("drips", [False, True])
async def test_a_client_that_sends_headers_and_stalls_gets_a_408(hasty: Place, caplog: Any, drips: bool) -> None:
    reader, writer = await raw(hasty, "content-length: 5000", b'{"messages"')

    async def drip() -> None:
        while True:
            writer.write(b" ")
            await asyncio.sleep(0.05)

    dripping = asyncio.create_task(drip()) if drips else None
    answer = await reader.readuntil(b"}}")
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b"The body did not arrive within 0.4 s." in answer
    assert f"/sessions/{hasty.session.id}/v1/chat/completions: The body did not arrive" in caplog.text
    if dripping is not None:
        dripping.cancel()
    writer.close()
    await until(lambda: connections(hasty) == 0)
    assert hasty.server.endpoint.exchanges == set()


@pytest.mark.parametrize("close", [False, True])
async def test_a_client_that_opens_a_stream_and_never_reads_is_closed(hasty: Place, caplog: Any, close: bool) -> None:
    hasty.engine.texts = ["x" * 3000]
    body = json.dumps({"messages": agents.USER, "stream": True, "logprobs": True, "top_logprobs": 2, "n": 8,
                       "max_tokens": 3000}).encode()  # fmt: skip
    plain = socket.socket()
    plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)  # so that the answer does not fit in it
    plain.setblocking(False)
    url = urlsplit(hasty.url)
    await asyncio.get_running_loop().sock_connect(plain, (url.hostname, url.port))
    head = f"POST {url.path}/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\n"
    head += ("connection: close\r\n" if close else "") + f"content-length: {len(body)}\r\n\r\n"
    await asyncio.get_running_loop().sock_sendall(plain, head.encode() + body)
    await until(lambda: hasty.engine.calls == 8)
    await until(lambda: connections(hasty) == 0)
    plain.close()
    await until(lambda: hasty.server.endpoint.exchanges == set())
    assert "closed" in caplog.text
    assert hasty.session.waiting().startswith("no unanswered")


async def test_a_slow_but_honest_client_is_served(hasty: Place) -> None:
    """Longer than STALLED altogether, but it never keeps anyone waiting."""
    hasty.engine.texts, hasty.engine.pause = ["a" * 60], 0.02
    reader, writer = await raw(hasty, stream=True)
    assert b"[DONE]" in await reader.readuntil(b"[DONE]")
    writer.close()


real_sleep = time.sleep


async def test_watches_that_overlap_do_not_end_each_other() -> None:
    """Rollouts of the next step begin before those of this one end."""
    before = signal.getsignal(signal.SIGURG)
    first, second = watchdog.watched([None], 100), watchdog.watched([None], 100)
    await first.__aenter__()
    await second.__aenter__()
    inner = signal.getsignal(signal.SIGURG)
    await first.__aexit__(None, None, None)
    assert signal.getsignal(signal.SIGURG) is inner  # the second still watches
    await second.__aexit__(None, None, None)
    os.kill(os.getpid(), signal.SIGURG)  # nobody listens any more
    await asyncio.sleep(0)
    signal.signal(signal.SIGURG, before)
