"""Credit: how the calls of a trajectory share in what it earned. Pick one by name, or as ``module:attr``.

Owns: the name table, discounted returns, GiGPO's two levels. Does not know: where rewards come from, the formula by
which an algorithm compares the values of a group (it is handed over).

Legend: K calls of one trajectory.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import numpy as np

from minirllm.algorithms import Algorithm, Group
from minirllm.config import Config, find, refuse
from minirllm.errors import ConfigError


class Path(NamedTuple):
    """One trajectory of a group, call by call."""

    reward: float  # of the whole
    reward_K: np.ndarray  # float64: each call's own, which come on top
    tokens_K: np.ndarray  # int64: how many each sampled
    state_K: Sequence[Hashable]  # what each call saw: those that saw the same can be compared


Values = tuple[Sequence[float], Sequence[int]]  # of a group: what is compared, and how many tokens each stands for
Compare = Callable[[Sequence[Values]], list[np.ndarray]]  # values of groups to advantages, by the algorithm
Credit = Callable[[Sequence[Sequence[Path]], Compare, Config], list[list[np.ndarray]]]  # groups to advantages ``[K]``

CREDITS = {name: f"minirllm.algorithms.credit:{name}" for name in ("trajectory", "returns", "gigpo")}


def of(config: Config) -> Credit:
    """The way of a run. Raises ConfigError when there is none of this name."""
    found: Credit = find("credit", config.credit, CREDITS)
    if not callable(found):
        raise ConfigError(f"credit {config.credit!r} is not a function (groups, compare, config) -> advantages.")
    return found


def validate(config: Config, algorithms: Sequence[Algorithm]) -> None:
    """Raises ConfigError for options without effect, and for a credit or a baseline that an algorithm cannot have."""
    of(config)
    if config.credit == "trajectory":
        refuse("credit = trajectory", config, "discount")
    if config.credit != "gigpo":
        refuse(f"credit = {config.credit}", config, "state_weight")
    grouped = [_is_relative(algorithm, config) for algorithm in algorithms]
    if config.credit == "gigpo" and not all(grouped):
        raise ConfigError(
            "credit = gigpo compares within groups, which not every algorithm of this run does: set algorithm = grpo."
        )
    if config.baseline == "task" and all(grouped):
        raise ConfigError(
            "baseline = task has no effect with algorithms that subtract the mean of the group: set algorithm to "
            "reinforce or reinforce_pp, or leave it out."
        )
    if config.baseline == "task" and config.credit != "trajectory":
        raise ConfigError(f"baseline = task is of whole trajectories, but credit is {config.credit}: leave one out.")


def _is_relative(algorithm: Algorithm, config: Config) -> bool:
    """Does it look at differences within a group only? Then a constant added to a group's rewards changes nothing."""
    low_G, tokens_G = np.array([0.0, 1.0]), np.array([1, 1])
    plain, moved = (
        algorithm.advantages([Group(low_G, tokens_G), Group(low_G + more, tokens_G)], config) for more in (0, 4)
    )
    return all(np.allclose(a, b) for a, b in zip(plain, moved, strict=True))


# ---- the ways ----


def trajectory(groups: Sequence[Sequence[Path]], compare: Compare, config: Config) -> list[list[np.ndarray]]:
    """Trajectories are compared by their rewards, and every call has its trajectory's advantage."""
    return _spread(groups, compare([_whole(group, [path.reward for path in group]) for group in groups]))


def returns(groups: Sequence[Sequence[Path]], compare: Compare, config: Config) -> list[list[np.ndarray]]:
    """The k-th calls of a group's trajectories are compared by their `returns_of`."""
    return _by_call(groups, lambda path, k: k, compare, config)


def gigpo(groups: Sequence[Sequence[Path]], compare: Compare, config: Config) -> list[list[np.ndarray]]:
    """GiGPO (arXiv 2505.10978, eq. 3, 6 and 7): the advantage of the trajectory, by all that it earned, plus
    ``state_weight`` times that of the call, among the group's calls that saw the same state, by their `returns_of`."""
    totals = [_whole(group, [path.reward + path.reward_K.sum() for path in group]) for group in groups]
    levels = _spread(groups, compare(totals)), _by_call(groups, lambda path, k: path.state_K[k], compare, config)
    return [
        [whole_K + config.state_weight * call_K for whole_K, call_K in zip(*pair, strict=True)]
        for pair in zip(*levels, strict=True)
    ]


def returns_of(path: Path, discount: float) -> list[float]:
    """``G_k = r_k + discount G_(k+1)``; the trajectory's own reward is added to that of its last call."""
    found, after = list[float](), path.reward
    for k, reward in reversed(list(enumerate(path.reward_K.tolist()))):
        after = reward + (after if k == len(path.reward_K) - 1 else discount * after)
        found.append(after)
    return found[::-1]


def _whole(group: Sequence[Path], values: Sequence[float]) -> Values:
    return values, [int(path.tokens_K.sum()) for path in group]


def _spread(groups: Sequence[Sequence[Path]], advantages: Sequence[np.ndarray]) -> list[list[np.ndarray]]:
    """Each trajectory's advantage for all of its calls."""
    return [
        [np.full(len(path.reward_K), value) for path, value in zip(group, value_G.tolist(), strict=True)]
        for group, value_G in zip(groups, advantages, strict=True)
    ]


def _by_call(
    groups: Sequence[Sequence[Path]], alike: Callable[[Path, int], Hashable], compare: Compare, config: Config
) -> list[list[np.ndarray]]:
    """The advantage of each call among those of its group that are `alike` (given a path and k), by `returns_of`."""
    found = [[np.zeros(len(path.reward_K)) for path in group] for group in groups]
    places: dict[Hashable, list[tuple[int, int, int]]] = {}  # group, trajectory, call
    shown: dict[Hashable, tuple[list[float], list[int]]] = {}
    for g, group in enumerate(groups):
        for p, path in enumerate(group):
            for k, value in enumerate(returns_of(path, config.discount)):
                key: Hashable = (g, alike(path, k))
                places.setdefault(key, []).append((g, p, k))
                values, tokens = shown.setdefault(key, ([], []))
                values.append(value)
                tokens.append(int(path.tokens_K[k]))
    for which, value_M in zip(places, compare(list(shown.values())), strict=True):
        for (g, p, k), value in zip(places[which], value_M.tolist(), strict=True):
            found[g][p][k] = value
    return found
