"""The agents of docs/examples, with the real frameworks: what they send is answered, captured, continued, trained on.

The engine says what a good model would, scored by the tiny model; everything else is real: packages, HTTP, sessions.
"""

from __future__ import annotations

import asyncio
import gc
import importlib.util
import math
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from minirllm import Config, Episode, flow, harness
from minirllm.engines.scripted import ScriptedEngine
from minirllm.log import read_metrics
from minirllm.models import tiny
from minirllm.policy import Policy
from minirllm.renderer import Renderer
from minirllm.rollouts import Job, Runner
from minirllm.server import Endpoint, Server
from minirllm.sessions import Sessions
from minirllm.store import EpisodeStore
from tests.clerk import EXAMPLES, STOCK, call

ROOT = Path(__file__).parent.parent
TASK = flow.load_task(EXAMPLES / "stock.py")  # the problems and the grader of all
CONFIG = Config(model="tiny", lora_rank=0, threads=1, max_context=16384, retries=0, max_calls=8)
ANSWER = f"There are {STOCK['lamps']} lamps in stock."
LOOK = call("stock", item="lamps")


@dataclass(frozen=True)
class Example:
    """`packages` must be there; the model says `replies`; `extended` calls go on from the tokens of an earlier one."""

    name: str
    packages: str
    replies: tuple[str, ...] = (LOOK, ANSWER)
    extended: int = 1
    edited: int = 0  # calls whose history is not what was said


EXAMPLE = {
    example.name: example
    for example in (
        Example("langgraph", "langgraph langchain_openai"),
        Example("openai_agents", "agents"),
        Example("openai_agents_chat", "agents"),
        Example("smolagents", "smolagents", (LOOK, call("final_answer", answer="402")), extended=0, edited=1),
        Example("pydantic_ai", "pydantic_ai", (LOOK, call("final_result", item="lamps", count=402))),
        Example("pydantic_ai_anthropic", "pydantic_ai"),
        Example("openai", "openai"),
        Example("anthropic", "anthropic"),
    )
}


@pytest.fixture(scope="module")
def policy() -> Iterator[Policy]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny, "MAX_POSITIONS", CONFIG.max_context)  # a token is a byte, and frameworks have much to say
        made = Policy(*tiny.build(), CONFIG)
    yield made
    made.close()


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No keys or addresses in the environment, and nobody is looked up."""
    for name in ("OPENAI_API_KEY", "OPENAI_BASE_URL", "ANTHROPIC_API_KEY", "ANTHROPIC_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    asked: list[Any] = []
    real = socket.getaddrinfo

    def look_up(host: Any, *args: Any, **named: Any) -> Any:
        if host not in ("127.0.0.1", b"127.0.0.1"):
            asked.append(host)
            raise socket.gaierror(f"{host} was looked up")
        return real(host, *args, **named)

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    yield
    assert asked == []


def example(name: str) -> Example:
    found = EXAMPLE[name]
    missing = [package for package in found.packages.split() if importlib.util.find_spec(package) is None]
    if missing:
        pytest.skip(f"NOT RUN: no package {' or '.join(missing)}; make setup installs it (extra: agents)")
    return found


def close_clients() -> None:
    """Libraries keep connections open as long as the process lives; the loop of a test ends before."""
    for transport in gc.get_objects():
        if issubclass(type(transport), asyncio.Transport) and not transport.is_closing():
            transport.abort()


async def run(policy: Policy, agent: Any, replies: tuple[str, ...]) -> tuple[Episode, list[list[int]]]:
    """One episode about lamps, and the prompts that the model read."""
    engine = ScriptedEngine(policy, CONFIG, replies)
    await engine.start()
    sessions = Sessions(engine, Renderer(policy.tokenizer), "tiny", max_calls=CONFIG.max_calls)
    server = Server(Endpoint(sessions, model="tiny"))
    runner = Runner(sessions, await server.start(), agent, TASK.evaluator, CONFIG)
    try:
        (lamps,) = [one for one in TASK.train(CONFIG) if one.id == "lamps"]
        return await runner.run(Job(lamps)), engine.prompts
    finally:
        await runner.close()
        await server.close()
        close_clients()


def captured(policy: Policy, episode: Episode, prompts: list[list[int]], replies: tuple[str, ...]) -> None:
    """Every call is in the token tree: the ids read, the ids sampled, a log-probability for each."""
    assert episode.reason == ""
    assert episode.reward == 1.0
    (trajectory,) = episode.trajectories
    assert [step.prompt_length for step in trajectory.steps] == list(map(len, prompts))
    for step, prompt, reply in zip(trajectory.steps, prompts, replies, strict=True):
        sampled = [*policy.tokenizer.encode(reply), policy.tokenizer.eos_token_id]
        ids, logprobs = episode.tree.response(step.node)
        assert episode.tree.prompt_ids(step.node) == prompt
        assert ids == sampled
        assert len(logprobs) == len(sampled)
        assert all(math.isfinite(logprob) and logprob < 0 for logprob in logprobs)
    assert {call.name for step in trajectory.steps for call in step.response.tool_calls} >= {"stock"}
    assert [episode.metrics[name] for name in ("malformed_tool_calls", "aborted", "drift")] == [0, 0, 0]


@pytest.mark.parametrize("name", EXAMPLE)
def test_framework(policy: Policy, name: str) -> None:
    wanted = example(name)
    agent = flow.load_task(EXAMPLES / f"{name}_agent.py").agent()
    episode, prompts = asyncio.run(run(policy, agent, wanted.replies))
    captured(policy, episode, prompts, wanted.replies)
    made = [episode.metrics[kind] for kind in ("calls", "extended", "edited", "branches")]
    assert made == [len(wanted.replies), wanted.extended, wanted.edited, wanted.edited]


@pytest.mark.parametrize("name", ["pydantic_ai", "smolagents"])
def test_words_where_a_call_is_required(policy: Policy, name: str) -> None:
    """Nothing forces the model; the library sees what it said, and goes on."""
    wanted = example(name)
    replies = ("Let me see.", *wanted.replies)
    episode, prompts = asyncio.run(run(policy, flow.load_task(EXAMPLES / f"{name}_agent.py").agent(), replies))
    captured(policy, episode, prompts, replies)


@pytest.mark.parametrize(("program", "needs"), [("agent.mjs", "node"), ("agent.sh", "curl jq")])
def test_a_program_in_another_language(policy: Policy, program: str, needs: str) -> None:
    missing = [name for name in needs.split() if shutil.which(name) is None]
    if missing:
        pytest.skip(f"NOT RUN: there is no {' or '.join(missing)} on this machine")
    agent = harness.flow(harness.find(f"command:{EXAMPLES / program} {{instruction}}"))
    episode, prompts = asyncio.run(run(policy, agent, (LOOK, ANSWER)))
    captured(policy, episode, prompts, (LOOK, ANSWER))
    assert episode.metrics["extended"] == 1


def test_an_example_trains(tmp_path: Path) -> None:
    """The command of the page, but for the model."""
    example("langgraph")
    command = [sys.executable, "-m", "minirllm.train", str(EXAMPLES / "langgraph_agent.py"), "--model", "tiny"]
    command += ["--set", "engine=tests.clerk:Clerk", "--steps", "2", "--batch-size", "1", "--group-size", "4"]
    command += ["--set", "eval_tasks=0", "--runs-dir", str(tmp_path), "--run", "r", "--quiet"]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert done.returncode == 0, done.stderr[-3000:]
    rows = read_metrics(tmp_path / "r/metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2]
    assert len({row["weights_sha256"] for row in rows}) == 2
    for row in rows:
        assert (row["episodes"], row["ungraded"], row["drift"]) == (4, 0, 0)
        assert row["mismatch_max"] <= 1e-4
        episodes = EpisodeStore(tmp_path / "r/episodes").finished(row["step"]).values()
        assert sorted(episode.reward for episode in episodes) == [0, 0, 1, 1]
        assert [episode.metrics["extended"] for episode in episodes] == [1] * 4
