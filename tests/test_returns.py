"""returns.py: what agents and evaluators may return."""

import math
import re
from typing import Any

import numpy as np
import pytest

from minirllm.errors import GradingError
from minirllm.returns import WITHIN, as_episode, step_values, trajectory_rewards, verdict
from minirllm.types import Episode, EvalOutput, Signal, Step, TerminationReason, Trajectory


@pytest.mark.parametrize(
    ("result", "names", "answer"),
    [
        (None, ["default"], ""),
        ("42", ["default"], "42"),
        (Trajectory("solver", output="x"), ["solver"], "x"),
        ([Trajectory("a"), Trajectory("b", output="y")], ["a", "b"], "y"),
        (Episode(trajectories=[Trajectory("e")], artifacts={"answer": 7}), ["e"], "7"),
        (Episode(), ["default"], ""),
    ],
)
def test_what_an_agent_may_return(result: Any, names: list[str], answer: str) -> None:
    episode = as_episode(result)
    assert [t.name for t in episode.trajectories] == names
    assert episode.answer == answer
    assert episode.termination_reason is TerminationReason.ENV_DONE


@pytest.mark.parametrize("result", [3, {"answer": 1}, ["x"], Episode(trajectories=["x"])])  # type: ignore[list-item]
def test_any_other_type_is_named(result: Any) -> None:
    with pytest.raises(TypeError, match=r"not int|not dict|got str"):
        as_episode(result)


@pytest.mark.parametrize(
    ("result", "sentence"),
    [
        (Trajectory(steps=["x"]), "Trajectory.steps holds Step objects, got str"),  # type: ignore[list-item]
        (Trajectory(steps=None), "Trajectory.steps must be a list, got NoneType"),  # type: ignore[arg-type]
        (Trajectory(steps=[Step(id=5)]), "Step.id must be a str, got int"),  # type: ignore[arg-type]
        (Trajectory(steps=[Step(metadata=3)]), "Step.metadata must be a dict, got int"),  # type: ignore[arg-type]
        (Trajectory(name=3), "Trajectory.name must be a str, got int"),  # type: ignore[arg-type]
        (Trajectory(reward="good"), f"Trajectory.reward must be a finite number{WITHIN}, or None, got 'good'"),  # type: ignore[arg-type]
        (Trajectory(reward=math.nan), f"Trajectory.reward must be a finite number{WITHIN}, or None, got nan"),
        (Trajectory(signals=[1]), "Trajectory.signals must be a dict, got list"),  # type: ignore[arg-type]
        (Episode(trajectories=None), "Episode.trajectories must be a list, got NoneType"),  # type: ignore[arg-type]
        (Episode(artifacts="x"), "Episode.artifacts must be a dict, got str"),  # type: ignore[arg-type]
        (Episode(metadata=[]), "Episode.metadata must be a dict, got list"),  # type: ignore[arg-type]
        (Episode(signals={"s": math.inf}), f"Episode.signals['s'] must be a finite number{WITHIN}, got inf"),
        (Episode(termination_reason="won"), "Episode.termination_reason is no TerminationReason, got 'won'"),  # type: ignore[arg-type]
    ],
)
def test_a_wrong_type_inside_is_named(result: Any, sentence: str) -> None:
    with pytest.raises(TypeError, match=re.escape(sentence)):
        as_episode(result)


def test_an_agents_own_termination_reason_stays() -> None:
    made = Episode(termination_reason=TerminationReason.MAX_TURNS_EXCEEDED)
    assert as_episode(made).termination_reason is TerminationReason.MAX_TURNS_EXCEEDED
    assert as_episode(Episode(termination_reason="timeout")).termination_reason is TerminationReason.TIMEOUT  # type: ignore[arg-type]
    assert as_episode(Episode(termination_reason=None)).termination_reason is TerminationReason.ENV_DONE  # type: ignore[arg-type]


def test_an_object_that_an_agent_returns_twice_is_two_episodes() -> None:
    made = Episode(trajectories=[Trajectory(steps=[Step()])])
    first, second = as_episode(made), as_episode(made)
    first.trajectories[0].steps.clear()
    first.metadata["seed"] = first.metrics["turns"] = 1
    assert second == as_episode(made)
    assert (made.metadata, len(made.trajectories[0].steps)) == ({}, 1)


@pytest.mark.parametrize(
    ("value", "reward", "correct"),
    [
        (1.0, 1.0, True),
        (0.99, 0.99, False),
        (2, 2.0, True),
        (True, 1.0, True),
        (False, 0.0, False),
        ((0.3, True), 0.3, True),
        ((1.0, False), 1.0, False),
        (EvalOutput(0.5, True, [Signal("len", 3)]), 0.5, True),
    ],
)
def test_what_an_evaluator_may_return(value: Any, reward: float, correct: bool) -> None:
    output = verdict(value)
    assert (output.reward, output.is_correct, output.reason) == (reward, correct, "")
    assert type(output.reward) is float


def test_no_reward_has_a_reason() -> None:
    assert verdict(None) == EvalOutput(None, reason="evaluator returned None")
    assert verdict(EvalOutput(None, reason="judge is down")).reason == "judge is down"
    assert verdict(EvalOutput(None)).reason == "evaluator gave no reward and no reason"


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        (math.nan, r"finite reward, between -1e\+30 and 1e\+30, got nan"),
        (1e31, r"finite reward, between -1e\+30 and 1e\+30, got 1e\+31"),
        (-math.inf, r"finite reward, between -1e\+30 and 1e\+30, got -inf"),
        ("1.0", "reward is '1.0'"),
        (EvalOutput(math.nan), "finite reward"),
        (EvalOutput("x"), "reward is 'x'"),  # type: ignore[arg-type]
        (EvalOutput(1.0, signals=[Signal("n", math.inf)]), "finite signal 'n'"),
        (10**400, r"finite reward, between -1e\+30 and 1e\+30, got 1000"),
        ([1.0], "must return"),
        ((1.0, 2.0), "must return"),
    ],
)
def test_a_verdict_that_is_none_is_an_error(value: Any, sentence: str) -> None:
    with pytest.raises(GradingError, match=sentence):
        verdict(value)


def test_rewards_that_an_evaluator_sets_are_checked() -> None:
    assert trajectory_rewards(Episode(trajectories=[Trajectory(), Trajectory(reward=True)])) == [None, 1.0]
    for reward in (math.nan, "x"):
        with pytest.raises(GradingError, match="reward of trajectory 'judge'"):
            trajectory_rewards(Episode(trajectories=[Trajectory("judge", reward=reward)]))  # type: ignore[arg-type]


def test_advantages_are_of_a_call_or_of_each_of_its_tokens() -> None:
    given = [Step(response_length=2, advantage=value) for value in (None, 1, [1, 2.5], np.array([0.5, -1]))]
    episode = Episode(trajectories=[Trajectory(steps=given[:1]), Trajectory(steps=given[1:])])
    given[1].reward = np.float32(0.5)  # type: ignore[assignment]
    assert step_values(episode) == [(0.0, None), (0.5, 1.0), (0.0, [1.0, 2.5]), (0.0, [0.5, -1.0])]
    given[2].id, given[2].reward = "c", math.nan
    with pytest.raises(GradingError, match=r"finite Step\.reward of call c, between -1e\+30 and 1e\+30, got nan"):
        step_values(episode)


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        ([1.0], "Step.advantage of call c has 1 numbers, but the call sampled 2 tokens"),
        ([1.0, math.nan], f"Step.advantage of call c must be finite numbers{WITHIN}, got nan for sampled token 2"),
        ([1e31, 0.0], "got 1e+31 for sampled token 1"),
        (-1e31, "or one for each sampled token, got -1e+31"),
        ([1.0, "x"], f"must be finite numbers{WITHIN}, got 'x' for sampled token 2"),
        (math.inf, f"must be a finite number{WITHIN}, or one for each sampled token, got inf"),
        ("12", f"must be a finite number{WITHIN}, or one for each sampled token, got '12'"),
    ],
)
def test_an_advantage_that_is_none_is_named(value: Any, sentence: str) -> None:
    with pytest.raises(GradingError, match=re.escape(sentence)):
        step_values(Episode(trajectories=[Trajectory(steps=[Step(id="c", response_length=2, advantage=value)])]))
