"""ahead.py: rollouts that run while earlier steps are trained, by weights that depend on the step's number alone."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from minirllm import AgentConfig, Episode, Task, flow, rollout, train
from minirllm.ahead import Ahead, validate
from minirllm.client import chat
from minirllm.config import Config, from_mapping
from minirllm.errors import ConfigError
from minirllm.log import read_metrics
from minirllm.rollouts import _Slot
from minirllm.store import EpisodeStore
from minirllm.tools.replay import replay
from minirllm.trainer import Trainer
from tests.test_end_to_end import content, hashes

pytestmark = pytest.mark.timeout(900)  # whole runs, on a machine that may be busy
TASK = Path(__file__).with_name("delayed.py")
SMALL = {"steps": 4, "batch_size": 2, "group_size": 3, "max_tokens": 6}


def run(runs: Path, name: str, resume: bool = False, **options: Any) -> list[dict[str, Any]]:
    task = flow.load_task(str(TASK))
    train.run(
        task, Config(**{**task.defaults, **SMALL, **options, "runs_dir": str(runs), "run": name}),
        resume=resume, quiet=True,
    )  # fmt: skip
    return read_metrics(runs / name / "metrics.jsonl")


def versions(folder: Path, step: int) -> set[int]:
    """Of the weights that sampled a step, as its tokens carry them."""
    episodes = EpisodeStore(folder / "episodes").finished(step).values()
    return {node.weight_version for episode in episodes for node in episode.tree.nodes if node.sampled}


def cut(runs: Path, step: int, options: dict[str, Any]) -> None:
    """A run that is killed when the first episode of `step` has ended."""
    settings = [f"--set={name}={value}" for name, value in {**SMALL, **options}.items()]
    command = [sys.executable, "-m", "minirllm.train", str(TASK), "--runs-dir", str(runs), "--run", "cut", "--quiet"]
    with subprocess.Popen([*command, *settings], env={**os.environ, "DELAY": "0.3"}) as process:
        while not EpisodeStore(runs / "cut/episodes").finished(step):
            assert process.poll() is None, "it ended before"
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)


@pytest.mark.parametrize("options", [{"lora_rank": 4}, {"lora_rank": 0}, {"determinism": "fixed"}, {"lag": 2}], ids=str)
def test_agents_in_any_order_end_at_the_same_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    options = {"lag": 1, **options}
    quick = run(tmp_path, "quick", **options)
    monkeypatch.setenv("DELAY", "0.1")
    assert flow.load_task(str(TASK)).agent().fn.__globals__["DELAY"] == 0.1
    slow = run(tmp_path, "slow", **options, concurrency=3)
    assert hashes(quick) == hashes(slow)
    assert len(set(hashes(quick))) == 4
    lag = options["lag"]
    for step in range(1, 5):
        assert content(tmp_path, "quick", step) == content(tmp_path, "slow", step)
        assert versions(tmp_path / "slow", step) == {max(0, step - 1 - lag)}
    assert [(row["lag_mean"], row["lag_max"]) for row in quick] == [(min(step, lag),) * 2 for step in range(4)]
    assert [row["sampled_versions"] for row in quick] == [1] * 4
    if json.loads((tmp_path / "quick/manifest.json").read_text())["level"] == "exact":
        assert [row["mismatch_max"] > 0 for row in quick] == [False, True, True, True]
        assert [row["ratio_max"] > 0 for row in quick] == [False, True, True, True]


def test_without_lag_nothing_is_copied_and_the_first_step_is_the_same(tmp_path: Path) -> None:
    rows, ahead = run(tmp_path, "r", steps=2), run(tmp_path, "ahead", steps=2, lag=1)
    assert [row["mismatch_max"] <= 1e-4 for row in rows] == [True, True]
    assert not any(name in row for row in rows for name in ("lag_mean", "lag_max", "seconds_waited"))
    assert not list((tmp_path / "r").rglob("older.safetensors"))
    assert hashes(rows)[0] == hashes(ahead)[0]
    assert hashes(rows)[1] != hashes(ahead)[1]


def test_killed_it_resumes_to_the_same_weights_with_the_older_ones_that_it_needs(tmp_path: Path) -> None:
    options = {"lag": 2, "steps": 6, "lr": 3e-3}
    whole = run(tmp_path, "whole", **options)
    cut(tmp_path, 6, {**options, "save_every": 2})
    files = tmp_path / "cut/episodes"
    assert len(read_metrics(tmp_path / "cut/metrics.jsonl")) in (3, 4, 5)
    before = {step: EpisodeStore(files).finished(step) for step in (4, 5, 6)}
    assert before[6]
    rows = run(tmp_path, "cut", resume=True, **options)
    assert hashes(rows) == hashes(whole)
    for step in range(1, 7):
        assert content(tmp_path, "cut", step) == content(tmp_path, "whole", step)
    after = {step: EpisodeStore(files).finished(step) for step in (4, 5, 6)}
    for step, found in before.items():
        assert all(after[step][key].metrics == episode.metrics for key, episode in found.items())  # not run again


def test_a_run_is_replayed_from_its_seed_and_from_a_checkpoint(tmp_path: Path) -> None:
    run(tmp_path, "r", lag=1, save_every=3)
    assert replay(tmp_path / "r")  # step 4 from the checkpoint of step 3, which holds the weights after step 2, too
    assert replay(tmp_path / "r", step=4)


def test_resumed_with_another_lag_it_goes_on_from_the_weights_that_it_has(tmp_path: Path) -> None:
    run(tmp_path, "r", steps=2)
    rows = run(tmp_path, "r", resume=True, lag=1)
    assert [row.get("lag_mean") for row in rows] == [None, None, 0, 1]
    assert [versions(tmp_path / "r", step) for step in (3, 4)] == [{2}, {2}]
    assert replay(tmp_path / "r", step=4)
    rows = run(tmp_path, "r", resume=True, lag=0, steps=5)
    assert versions(tmp_path / "r", 5) == {4}
    assert rows[-1]["mismatch_max"] <= 1e-4


async def test_rollouts_run_while_earlier_steps_are_trained_but_no_further(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An update waits until the next step's rollouts have begun: without a lag it would for ever."""
    begun, places = {step: asyncio.Event() for step in range(1, 5)}, dict[int, int]()
    trained, update = [0], Trainer.update

    @rollout
    async def talk(task: Task, config: AgentConfig) -> str:
        step = config.metadata["step"]
        assert step <= trained[0] + 1 + 1  # the quota: one step's groups beyond those of the next update
        places[step] = config.metadata["ahead"]
        begun[step].set()
        return str((await chat(config, [{"role": "user", "content": str(task.instruction)}])).output)

    async def grade(task: Task, episode: Episode) -> float:
        return episode.rollout_idx % 2

    async def waiting(self: Trainer, batch: Any) -> dict[str, float]:
        step = trained[0] + 1
        if step < 4:
            await asyncio.wait_for(begun[step + 1].wait(), 300)
        metrics = await update(self, batch)
        trained[0] = step
        return metrics

    monkeypatch.setattr(Trainer, "update", waiting)
    options = {
        "model": "tiny",
        "steps": 4,
        "batch_size": 1,
        "group_size": 2,
        "max_tokens": 4,
        "eval_tasks": 0,
        "lag": 1,
    }
    task = flow.task_of(talk, grade, [Task("a", "Say a")], [])
    row = await train.train(task, from_mapping({**options, "runs_dir": str(tmp_path), "run": "r"}), quiet=True)
    assert row["step"] == 4
    assert places == {1: 1, 2: 0, 3: 1, 4: 0}  # no two steps at one time have the same folders


def by_depth(folder: Path, step: int) -> dict[int, set[int]]:
    """How many calls a call continues -> versions of the weights that sampled such calls."""
    found: dict[int, set[int]] = {}
    for episode in EpisodeStore(folder / "episodes").finished(step).values():
        for call in episode.trajectories[0].steps:
            found.setdefault(call.metadata["depth"], set()).add(call.weight_version)
    return found


def test_partial_rollouts_go_on_with_newer_weights_whatever_the_timing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One call of a conversation with each of the weights."""
    options = {"lag": 2, "partial_calls": 1, "steps": 5}
    quick = run(tmp_path, "quick", **options)
    monkeypatch.setenv("DELAY", "0.1")
    slow = run(tmp_path, "slow", **options, concurrency=2)
    assert hashes(quick) == hashes(slow)
    for step in range(1, 6):
        assert content(tmp_path, "quick", step) == content(tmp_path, "slow", step)
        expected = {depth: {max(0, step - 3 + depth)} for depth in (0, 1)}
        assert by_depth(tmp_path / "quick", step) == by_depth(tmp_path / "slow", step) == expected
    assert [row["sampled_versions"] for row in quick] == [1, 1, 2, 2, 2]
    assert [row["lag_max"] for row in quick] == [0, 1, 2, 2, 2]
    assert 1 < quick[-1]["lag_mean"] < 2  # the second call of an episode is one update fresher
    assert replay(tmp_path / "quick")
    assert hashes(quick)[2:] != hashes(run(tmp_path, "whole", **{**options, "partial_calls": 0}))[2:]


def test_killed_with_calls_that_wait_for_weights_it_resumes_to_the_same(tmp_path: Path) -> None:
    options = {"lag": 2, "partial_calls": 1, "steps": 5}
    whole = run(tmp_path, "whole", **options)
    cut(tmp_path, 4, {**options, "save_every": 2})
    rows = run(tmp_path, "cut", resume=True, **options)
    assert hashes(rows) == hashes(whole)
    for step in range(1, 6):
        assert content(tmp_path, "cut", step) == content(tmp_path, "whole", step)


async def test_a_failure_ahead_is_told_when_its_step_comes_and_the_rest_is_ended() -> None:
    ended = []

    async def begin(step: int) -> int:
        if step == 2:
            raise OSError("no room")
        try:
            await asyncio.sleep(0 if step == 1 else 1000)
        finally:
            ended.append(step)
        return step * 10

    ahead = Ahead(begin, Config(lag=2, steps=9))
    assert (await ahead.take(1))[0] == 10
    with pytest.raises(OSError, match="no room"):
        await ahead.take(2)
    await asyncio.sleep(0)
    await ahead.close()
    assert ended == [1, 3, 4]


def test_a_lag_that_outlasts_the_run_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^With lag = 3 and steps = 3 the first weights would sample every step"):
        validate(Config(lag=3, steps=3))
    validate(Config(lag=2, steps=3))
    validate(Config(lag=0, steps=1))
    with pytest.raises(ConfigError, match="partial_calls has no effect with lag = 0"):
        validate(Config(partial_calls=2))


async def test_a_rollout_that_waits_for_weights_gives_its_place_to_another() -> None:
    made, slots = asyncio.Event(), asyncio.Semaphore(1)

    class Pacing:
        def ready(self, depth: int) -> bool:
            return made.is_set()

        async def __call__(self, depth: int) -> int:
            await made.wait()
            return 7

    first, second = _Slot(slots), _Slot(slots)
    await first.take()
    weights = first.around(Pacing())  # type: ignore[arg-type]
    calls = [asyncio.create_task(weights(depth)) for depth in (1, 1)]  # at once
    await asyncio.wait_for(second.take(), 60)
    made.set()
    await asyncio.sleep(0.01)
    assert not any(call.done() for call in calls)  # the place is taken
    second.leave()
    assert await asyncio.wait_for(asyncio.gather(*calls), 60) == [7, 7]  # both with one place
    assert (first.held, second.held, slots.locked()) == (True, False, True)
    assert await weights(1) == 7  # there is nothing to wait for
    first.leave()
    first.leave()
    await slots.acquire()
    assert slots.locked()  # there is one place, as before
