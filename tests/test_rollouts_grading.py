"""rollouts.py: what evaluators give and fail to give, on the loop, in threads and in processes."""

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from minirllm import AgentConfig, Episode, EvalOutput, Task, Trajectory, evaluator
from minirllm.client import chat
from minirllm.flow import Evaluator, import_path
from minirllm.rollouts import Job
from minirllm.types import TerminationReason
from tests.agent_server import TASK, USER, Place, ask, serving


@pytest.fixture
async def place() -> AsyncIterator[Place]:
    async with serving() as it:
        yield it


async def test_one_deadline_for_agent_and_grader(place: Place) -> None:
    async def slow(task: Task, episode: Episode) -> float:
        await asyncio.sleep(60)
        return 1.0

    async def agent(task: Task, config: AgentConfig) -> str:
        assert 0.4 < config.metadata["timeout"] <= 0.5
        return await ask(task, config)

    began = time.monotonic()
    episode = await place.run(agent, slow, episode_timeout=0.5)
    assert time.monotonic() - began < 10
    assert (episode.termination_reason, episode.reward) == (TerminationReason.GRADING_TIMEOUT, None)
    assert len(episode.trajectories[0].steps) == 1


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        (float("nan"), "must return a finite reward, between -1e+30 and 1e+30, got nan"),
        ("1", "reward is '1'"),
        (None, "evaluator returned None"),
        (EvalOutput(None, True, reason="judge is down"), "judge is down"),
        (KeyError("answer"), "evaluator failed: KeyError: 'answer' (test_rollouts_grading.py"),
        (
            asyncio.CancelledError("x"),
            "evaluator failed: RuntimeError: CancelledError: x (test_rollouts_grading.py",
        ),
    ],
)
@pytest.mark.parametrize("is_async", [True, False])
async def test_no_reward_is_none_with_a_reason(place: Place, value: Any, sentence: str, is_async: bool) -> None:
    def sync(task: Task, episode: Episode) -> Any:
        if isinstance(value, BaseException):
            raise value
        return value

    async def later(task: Task, episode: Episode) -> Any:
        return sync(task, episode)

    episode = await place.run(ask, later if is_async else sync)
    assert (episode.termination_reason, episode.reward) == (TerminationReason.GRADING_ERROR, None)
    assert (episode.is_correct, episode.trajectories[0].reward) == (False, None)
    assert sentence in episode.reason


def grade_roles(task: Task, episode: Episode) -> float:
    """As rLLM's evaluators do: each trajectory has a reward of its own."""
    for trajectory in episode.trajectories:
        trajectory.reward = {"judge": 0.25, "broken": float("nan")}.get(trajectory.name)
    return 1.0


@evaluator
def top_level(task: Task, episode: Episode) -> float:
    return grade_roles(task, episode)


@pytest.mark.parametrize("in_process", [True, False])
async def test_an_evaluator_may_reward_each_trajectory(place: Place, in_process: bool) -> None:
    async def roles(task: Task, config: AgentConfig) -> list[Trajectory]:
        return [Trajectory(name, [await chat(config, USER)]) for name in ("solver", "judge", *task.metadata)]

    runner = place.runner(roles, top_level if in_process else lambda task, episode: grade_roles(task, episode))
    assert (runner.graders is not None) == in_process
    try:
        episode = await runner.run(Job(Task("t")))
        broken = await runner.run(Job(Task("t", metadata={"broken": 1})))
    finally:
        await runner.close()
    assert (episode.reward, [t.reward for t in episode.trajectories]) == (1.0, [1.0, 0.25])
    assert (broken.termination_reason, broken.reward) == (TerminationReason.GRADING_ERROR, None)
    assert "reward of trajectory 'broken', between -1e+30 and 1e+30, got nan" in broken.reason


def grade_tokens(task: Task, episode: Episode) -> float:
    step = episode.trajectories[0].steps[0]
    step.advantage = [float(place) for place in range(step.response_length + task.metadata.get("more", 0))]
    step.reward = 0.75
    return 1.0


@evaluator
def by_token(task: Task, episode: Episode) -> float:
    return grade_tokens(task, episode)


@pytest.mark.parametrize("in_process", [True, False])
async def test_an_evaluator_may_give_each_token_its_advantage(place: Place, in_process: bool) -> None:
    async def agent(task: Task, config: AgentConfig) -> Trajectory:
        return Trajectory("solver", [await chat(config, USER)])

    runner = place.runner(agent, by_token if in_process else lambda task, episode: grade_tokens(task, episode))
    try:
        episode = await runner.run(Job(Task("t")))
        broken = await runner.run(Job(Task("t", metadata={"more": 1})))
    finally:
        await runner.close()
    (step,) = episode.trajectories[0].steps
    assert step.response_length > 1
    assert (step.reward, step.advantage) == (0.75, list(range(step.response_length)))
    assert (broken.termination_reason, broken.reward) == (TerminationReason.GRADING_ERROR, None)
    count = step.response_length
    assert f"has {count + 1} numbers, but the call sampled {count} tokens" in broken.reason


GRADER = """
import threading
from minirllm import evaluator

@evaluator
def score(task, episode):
    assert threading.current_thread() is threading.main_thread()
    return float(episode.answer == task.metadata["answer"] and episode.tree is None) + threading.active_count() / 100
"""


@pytest.fixture
def in_a_file(tmp_path: Path) -> Evaluator:
    (tmp_path / "grader.py").write_text(GRADER)
    return import_path(tmp_path / "grader.py").score  # type: ignore[no-any-return]


async def test_a_sync_evaluator_that_can_be_imported_runs_in_a_process(place: Place, in_a_file: Evaluator) -> None:
    runner = place.runner(ask, in_a_file)
    assert runner.graders is not None
    try:
        episode = await runner.run(Job(TASK))
    finally:
        await runner.close()
    assert (episode.reward, episode.reason) == (1.01, "")
    assert episode.tree is not None
