"""Sandboxes started ahead: as many as are asked for, never more than rollouts, alive, and gone in the end."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from minirllm import flow, harness
from minirllm.config import Config
from minirllm.errors import SandboxError
from minirllm.rollouts import Job
from minirllm.sandboxes import Spec
from minirllm.sandboxes.kept import Recipe
from minirllm.sandboxes.pool import ALIVE, Pool, of
from minirllm.types import Episode, Task
from tests.counted import Counted
from tests.test_harness import CALL, running, scripted

KIND = "tests.counted:Counted"
FIXTURES = Path(__file__).parent / "fixtures" / "harbor"


@pytest.fixture(autouse=True)
def counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> type[Counted]:
    monkeypatch.setenv("MINIRLLM_CACHE", str(tmp_path / "cache"))
    for name in ("started", "live", "most", "execs"):
        monkeypatch.setattr(Counted, name, 0)
    return Counted


def recipe(name: str = "") -> Recipe:
    return Recipe(KIND, Spec(env={"NAME": name}))


async def rollouts(pool: Pool, recipes: list[Recipe], slots: int, seconds: float = 0.05) -> list[str]:
    """As a run has them: some at a time, in order."""
    free = asyncio.Semaphore(slots)

    async def one(recipe: Recipe) -> str:
        async with free, pool.take(recipe) as box:
            done = await box.run("echo $NAME; test ! -e mark && touch mark", timeout=20)
            await asyncio.sleep(seconds)
            return done.stdout.strip() if done.exit_code == 0 else "used before"

    async with pool.ahead(lambda: recipes):
        running = [asyncio.ensure_future(one(each)) for each in recipes]
        try:
            return list(await asyncio.gather(*running))
        finally:
            for each in running:
                each.cancel()
            await asyncio.gather(*running, return_exceptions=True)


async def test_a_warm_start_costs_one_command() -> None:
    pool = Pool(KIND, warm=1)
    async with pool.ahead(lambda: [recipe()]):
        await pool.settled()
        async with pool.take(recipe()) as box:
            assert (Counted.started, Counted.execs, box.running) == (1, 1, True)
        assert Counted.live == 0
    assert ALIVE == ("/usr/bin/true",)


@pytest.mark.parametrize(("warm", "slots", "count"), [(3, 2, 7), (1, 4, 9), (8, 1, 3), (2, 2, 1), (0, 2, 4)])
async def test_never_more_are_started_than_rollouts_remain(warm: int, slots: int, count: int) -> None:
    pool = Pool(KIND, warm=warm)
    names = [str(number) for number in range(count)]
    assert await rollouts(pool, [recipe(name) for name in names], slots) == names
    assert (Counted.started, Counted.live) == (count, 0)
    assert Counted.most <= slots + warm
    assert pool.started == (0 if warm == 0 else count if warm >= slots else pool.started)


async def test_what_nobody_took_is_closed() -> None:
    pool = Pool(KIND, warm=3)
    async with pool.ahead(lambda: [recipe(name) for name in "abcdef"]):
        async with pool.take(recipe("c")) as box:  # not the first one in the schedule
            assert (await box.run("echo $NAME", timeout=20)).stdout == "c\n"
        await asyncio.sleep(0.2)
        assert (Counted.live, Counted.started) == (3, 4)
        async with pool.take(recipe("other")):  # one that was not scheduled, say of a retry
            assert (Counted.live, Counted.started) == (4, 5)
    assert Counted.live == 0
    async with pool.take(recipe("a")):
        assert Counted.live == 1


async def test_one_that_does_not_start_or_live_is_replaced(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Counted, "fails", staticmethod(lambda number: number in (1, 2)))
    monkeypatch.setattr(Counted, "dead", staticmethod(lambda number: number in (4, 5)))
    assert await rollouts(Pool(KIND, warm=2), [recipe(name) for name in "abcde"], 1) == list("abcde")
    assert (Counted.live, caplog.text.count("so another is started: no machine is free")) == (0, 1)
    assert caplog.text.count("so another is started") == 1
    assert Counted.most <= 1 + 2  # a dead one is closed before another takes its place
    monkeypatch.setattr(Counted, "fails", staticmethod(lambda number: True))
    with pytest.raises(SandboxError, match="no machine is free"):
        await rollouts(Pool(KIND, warm=2), [recipe()], 1)


@pytest.mark.parametrize("after", [0.0, 0.01, 0.03, 0.06, 0.15])
async def test_nothing_is_left_when_a_run_is_cancelled(after: float) -> None:
    running = asyncio.ensure_future(rollouts(Pool(KIND, warm=3), [recipe(name) for name in "abcdefgh"], 2, 5.0))
    await asyncio.sleep(after)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert Counted.live == 0


async def test_two_schedules_at_once_share_what_is_warm() -> None:
    """A step's rollouts and an evaluation, say."""
    pool = Pool(KIND, warm=2)
    found = await asyncio.gather(
        rollouts(pool, [recipe(name) for name in "abcd"], 1), rollouts(pool, [recipe(name) for name in "wxyz"], 1)
    )
    assert (found, Counted.live, Counted.started) == ([list("abcd"), list("wxyz")], 0, 8)
    assert Counted.most <= 2 + 2


# ---- in a run ----


@pytest.mark.skipif(os.geteuid() != 0, reason="a port into the sandbox needs root")
async def test_rollouts_of_a_program_are_the_same_with_and_without() -> None:
    own = scripted(CALL.replace(sys.executable, "/usr/bin/python3"))

    async def episodes(warm: int) -> tuple[list[Any], int]:
        boxes = Pool("local", warm=warm)
        async with running(harness.flow(own, boxes=boxes), concurrency=1) as runner:
            jobs = [Job(Task(f"task {number}", "do it"), number, 3) for number in range(4)]
            found: list[Episode] = await runner.run_many(jobs)
        told = [(one.metadata["seed"], one.session_id, one.reward, one.artifacts["stdout"]) for one in found]
        return told, boxes.started

    cold, warm = await episodes(0), await episodes(2)
    assert (cold[0], cold[1], warm[1]) == (warm[0], 0, 4)


async def test_trials_of_harbor_tasks_begin_warm() -> None:
    task = await asyncio.to_thread(flow.load_task, FIXTURES / "plain")
    config = Config(harness="oracle", sandbox="local", warm=2, concurrency=1)
    agent = await asyncio.to_thread(harness.agent, task, config)
    (one,) = task.held_out(config)
    async with running(agent, concurrency=1) as runner:
        runner.evaluator = task.evaluator
        found = await runner.run_many([Job(one, number) for number in range(3)])
    assert [episode.reward for episode in found] == [1.0] * 3


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_no_sandbox(number: int, tmp_path: Path) -> None:
    (tmp_path / "tmp").mkdir()
    command = [sys.executable, "-m", "minirllm.cli", "eval", str(FIXTURES / "slow"), "--harness", "oracle", "--n", "40"]
    command += ["--sandbox", "local", "--model", "tiny", "--concurrency", "1", "--set", "warm=2"]
    root = Path(__file__).parent.parent
    env = {**os.environ, "TMPDIR": str(tmp_path / "tmp"), "PYTHONPATH": str(root)}
    with subprocess.Popen(command, env=env, cwd=root, stdout=-1, stderr=-1) as process:
        until = time.monotonic() + 120
        while _places(tmp_path) < 3 and process.poll() is None and time.monotonic() < until:
            time.sleep(0.1)
        assert _places(tmp_path) == 3
        process.send_signal(number)
        process.communicate(timeout=60)
    assert process.returncode == {signal.SIGINT: 130, signal.SIGTERM: 143}[number]
    assert _places(tmp_path) == 0


def _places(folder: Path) -> int:
    """Local sandboxes that are there now."""
    return sum(path.is_dir() for path in folder.glob("tmp/minirllm-sandboxes-*/*"))


LACKING = {
    "docker": (
        {"DOCKER_HOST": "unix:///no/such.sock"},
        r"^No Docker engine answers at unix:///no/such.sock: start one",
    ),
    "daytona": (
        {"DAYTONA_API_KEY": "", "DAYTONA_JWT_TOKEN": ""},
        "^There is no account at daytona: set DAYTONA_API_KEY",
    ),
    "modal": ({"MODAL_TOKEN_ID": ""}, "^There is no account at modal: see `modal token new`"),
    "local": ({"PATH": ""}, "^The local sandbox needs bubblewrap: install"),
}


@pytest.mark.parametrize("name", LACKING)
def test_a_run_is_refused_at_its_start_where_no_sandbox_can_be_started(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And does not go through all its steps with rollouts that fail."""
    environment, sentence = LACKING[name]
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    monkeypatch.setattr(
        "minirllm.sandboxes.local.importlib.util.find_spec", lambda _: None
    ) if name == "local" else None
    with pytest.raises(SandboxError, match=sentence):
        of(Config(sandbox=name))
    task = flow.load_task(str(FIXTURES / "plain"))
    with pytest.raises(SandboxError, match=sentence):
        harness.agent(task, Config(harness="nop", sandbox=name))
