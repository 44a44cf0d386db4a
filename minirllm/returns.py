"""What agents and evaluators may return, checked: whatever a user's function gives is right, or named in one sentence.

Owns: `as_episode`, `verdict`, `trajectory_rewards`, `step_values`, and means of what they gave. Does not
know: how the functions are found, run or timed.
"""

from __future__ import annotations

import numbers
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from minirllm.errors import GradingError
from minirllm.types import MOST, Episode, EvalOutput, Signal, Step, TerminationReason, Trajectory

WITHIN = f", between {-MOST:g} and {MOST:g}"

T = TypeVar("T", Episode, Trajectory, Step)

#: The fields of an agent's objects that are read or added to, and what they hold.
CONTAINERS: dict[type, dict[str, type]] = {
    Episode: {"trajectories": list, "artifacts": dict, "metrics": dict, "metadata": dict, "signals": dict},
    Trajectory: {"name": str, "steps": list, "signals": dict, "metadata": dict},
    Step: {"id": str, "metadata": dict},
}


def as_episode(result: Any) -> Episode:
    """What an agent returned, as an Episode with at least one trajectory: copies, down to the steps, so that an object
    returned twice is two episodes. Raises TypeError naming what has a wrong type."""
    if isinstance(result, Episode):
        episode = result
    elif isinstance(result, Trajectory):
        episode = Episode(trajectories=[result])
    elif isinstance(result, list):
        episode = Episode(trajectories=result)
    elif isinstance(result, str):
        episode = Episode(trajectories=[Trajectory(output=result)], artifacts={"answer": result})
    elif result is None:
        episode = Episode()
    else:
        raise TypeError(
            f"an agent returns None, str, Trajectory, list[Trajectory] or Episode, not {type(result).__name__}"
        )
    episode = _own(Episode, episode)
    for name, value in episode.signals.items():
        if not _is_finite(value):
            raise TypeError(f"Episode.signals[{name!r}] must be a finite number{WITHIN}, got {value!r}")
    episode.trajectories = [_trajectory(t) for t in episode.trajectories] or [Trajectory()]
    try:
        reason = TerminationReason(episode.termination_reason or TerminationReason.UNKNOWN)
    except ValueError:
        got = episode.termination_reason
        raise TypeError(f"Episode.termination_reason is no TerminationReason, got {got!r}") from None
    episode.termination_reason = TerminationReason.ENV_DONE if reason is TerminationReason.UNKNOWN else reason
    return episode


def verdict(value: Any) -> EvalOutput:
    """What an evaluator returned, as a checked EvalOutput. Raises GradingError with a sentence for anything else."""
    if value is None:
        return EvalOutput(reward=None, reason="evaluator returned None")
    if isinstance(value, EvalOutput):
        reward = None if value.reward is None else _finite(value.reward, "reward")
        signals = [Signal(s.name, _finite(s.value, f"signal {s.name!r}"), s.metadata) for s in value.signals]
        reason = value.reason or ("evaluator gave no reward and no reason" if reward is None else "")
        return EvalOutput(reward, bool(value.is_correct), signals, value.metadata, reason)
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], bool | int):
        return EvalOutput(_finite(value[0], "reward"), bool(value[1]))
    reward = _finite(value, "reward")
    return EvalOutput(reward, reward >= 1.0)


def trajectory_rewards(episode: Episode) -> list[float | None]:
    """The reward of each trajectory, which an evaluator may have set. Raises GradingError for one that is no number."""
    return [
        None if t.reward is None else _finite(t.reward, f"reward of trajectory {t.name!r}")
        for t in episode.trajectories
    ]


def step_values(episode: Episode) -> list[tuple[float, float | list[float] | None]]:
    """The reward and the advantage of each step of each trajectory, which an agent or an evaluator may have set. Raises
    GradingError for a reward that is no number, an advantage that is none nor as many as the call sampled tokens."""
    return [(_finite(step.reward, f"Step.reward of call {step.id}"), _advantage(step)) for step in episode.steps]


def _advantage(step: Step) -> float | list[float] | None:
    value, what = step.advantage, f"Step.advantage of call {step.id}"
    if value is None or _is_finite(value):
        return None if value is None else float(value)  # type: ignore[arg-type]
    if isinstance(value, str | bytes) or not isinstance(value, Sequence | np.ndarray):
        raise GradingError(f"{what} must be a finite number{WITHIN}, or one for each sampled token, got {value!r}")
    if len(value) != step.response_length:
        raise GradingError(f"{what} has {len(value)} numbers, but the call sampled {step.response_length} tokens")
    for place, one in enumerate(value):
        if not _is_finite(one):
            raise GradingError(f"{what} must be finite numbers{WITHIN}, got {one!r} for sampled token {place + 1}")
    return [float(one) for one in value]


def _trajectory(value: Any) -> Trajectory:
    if not isinstance(value, Trajectory):
        raise TypeError(f"trajectories are Trajectory objects, got {type(value).__name__}")
    trajectory = _own(Trajectory, value)
    if trajectory.reward is not None and not _is_finite(trajectory.reward):
        raise TypeError(f"Trajectory.reward must be a finite number{WITHIN}, or None, got {trajectory.reward!r}")
    for step in trajectory.steps:
        if not isinstance(step, Step):
            raise TypeError(f"Trajectory.steps holds Step objects, got {type(step).__name__}")
    trajectory.steps = [_own(Step, step) for step in trajectory.steps]
    return trajectory


def _own(kind: type[T], value: T) -> T:
    """A copy of an agent's object whose containers are copies, too."""
    copies: dict[str, Any] = {}
    for name, container in CONTAINERS[kind].items():
        held = getattr(value, name)
        if not isinstance(held, list | tuple if container is list else container):
            raise TypeError(f"{kind.__name__}.{name} must be a {container.__name__}, got {type(held).__name__}")
        copies[name] = container(held)
    return replace(value, **copies)


def _is_finite(value: Any) -> bool:
    try:
        return isinstance(value, numbers.Real) and abs(float(value)) <= MOST
    except OverflowError:  # an int that no float can hold
        return False


def _finite(value: Any, what: str) -> float:
    if not isinstance(value, numbers.Real):
        raise GradingError(f"evaluator must return EvalOutput, a number, a bool or (number, bool): {what} is {value!r}")
    if not _is_finite(value):
        raise GradingError(f"evaluator must return a finite {what}{WITHIN}, got {value}")
    return float(value)


def mean_signals(episodes: Iterable[Episode]) -> dict[str, float]:
    """Each signal's mean over the episodes that have it, by name."""
    return dict(sorted(means(signal for episode in episodes for signal in episode.signals.items()).items()))


def means(values: Iterable[tuple[str, float]]) -> dict[str, float]:
    """The mean of each name's values, in the order in which names first come."""
    found: dict[str, list[float]] = {}
    for name, value in values:
        found.setdefault(name, []).append(float(value))
    return {name: sum(own) / len(own) for name, own in found.items()}
