"""Rollouts that run ahead of training: which weights sample a step, what was known of the tasks then, and the rollouts
under way.

Owns: the schedule, copies of the weights that it needs, one task for each step whose rollouts have begun. Does not
know: what a rollout or an update is.

With ``lag = N`` step k is sampled by the weights that training had made after step ``max(0, k - 1 - N)``, and its
rollouts run while the N steps before it are trained: at most ``(N + 1) * batch_size`` groups are ahead of training. So
which weights sample a token is a function of the step's number, never of timing, and a run repeats bit for bit. With
``lag = 0`` sampler and trainer have the same weights, and nothing is copied.

With ``partial_calls = n``, too, an episode goes on across updates: its first n calls are sampled by those weights, the
next n by those of the next update, and so on, up to the newest that there can be, after step k - 1. A call whose
weights are not there yet waits for them. What counts is how many calls a call continues in its conversation, which no
timing changes. An episode still belongs to step k, with all of its group.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from minirllm.config import Config
from minirllm.errors import ConfigError
from minirllm.standing import NOTHING, Means, Standing
from minirllm.types import DEPTH, Episode, Step

if TYPE_CHECKING:  # rollouts also run where torch is not needed
    from minirllm.policy import Policy

T = TypeVar("T")


class Weights(NamedTuple):
    """Those of one moment of a run."""

    version: int
    sha256: str
    standing: Standing = NOTHING  # how the tasks stood then


def validate(config: Config) -> None:
    """Raises ConfigError for a lag that would never end, and for partial rollouts without one."""
    if config.partial_calls and not config.lag:
        raise ConfigError("partial_calls has no effect with lag = 0: set lag to the updates that an episode may span.")
    if 0 < config.steps <= config.lag:
        raise ConfigError(
            f"With lag = {config.lag} and steps = {config.steps} the first weights would sample every step: "
            "lower lag, or take more steps."
        )


class History:
    """The weights and the tasks' standing after the last steps, as many as the steps to come are sampled by."""

    def __init__(self, policy: Policy, config: Config):
        self.policy, self.config, self.lag, self.calls = policy, config, config.lag, config.partial_calls
        self.after: dict[int, Weights] = {}  # by step
        self._added = asyncio.Event()

    async def add(self, step: int, means: tuple[Means, Means] | None = None) -> Weights:
        """The policy's weights as they are now are those after `step`, which showed these means of tasks (None: nothing
        new). Not while it is trained."""
        standing = self.after.get(step, self.after.get(step - 1, Weights(0, ""))).standing
        standing = standing if means is None else standing.after(*means, self.config)
        now = Weights(self.policy.version, await self.policy.run(self.policy.weights_sha256), standing)
        if self.lag:
            await self.policy.run(self.policy.keep)
        self.after = {at: weights for at, weights in self.after.items() if step - self.lag <= at < step}
        self.after[step] = now
        versions = {weights.version for weights in self.after.values()}
        for version in self.policy.kept.keys() - versions:
            del self.policy.kept[version]
        self._added.set()
        self._added = asyncio.Event()
        return now

    def sampling(self, step: int, depth: int = 0) -> Weights:
        """Those that sample a call of `step` which continues `depth` others; of a run resumed with a larger lag the
        oldest that it has."""
        return self.after[min(at for at in self.after if at >= self._moment(step, depth))]

    def _moment(self, step: int, depth: int) -> int:
        """The step that they are made by."""
        fresher = min(self.lag, depth // self.calls) if self.calls else 0
        return max(0, step - 1 - self.lag + fresher)

    def pace(self, step: int) -> Pace | None:
        """For the calls of `step`; None: the policy's own weights answer."""
        return Pace(self, step) if self.lag else None

    def version(self, episode: Episode, call: Step) -> int:
        """Of the weights that the schedule has sample this call."""
        return self.sampling(episode.metadata["step"], depth_of(call)).version

    async def sha256(self, step: int, episode: Episode) -> str:
        """Of all weights that sampled an episode of `step`, once they are there."""
        depths = [depth_of(call) for call in episode.steps]
        pace, last = Pace(self, step), max(depths, default=0)
        await pace(last)
        return "+".join(dict.fromkeys(self.sampling(step, depth).sha256 for depth in range(last + 1)))

    def staleness(self, episodes: Iterable[Episode]) -> dict[str, float]:
        """Figures of a step which is to be trained next: how many updates came after the weights that sampled a token,
        mean and maximum, and how many versions of them there are."""
        tokens: Counter[int] = Counter()
        for node in (node for episode in episodes for node in episode.sampled):
            if not node.aborted:
                tokens[self.policy.version - node.weight_version] += len(node.tokens)
        if not self.lag or not tokens:
            return {}
        mean = sum(lag * count for lag, count in tokens.items()) / tokens.total()
        return {"lag_mean": mean, "lag_max": float(max(tokens)), "sampled_versions": float(len(tokens))}

    def state(self) -> dict[str, Any]:
        """For the checkpoint that also holds the policy's kept weights."""
        return {str(step): [*weights[:2], asdict(weights.standing)] for step, weights in self.after.items()}

    async def restore(self, step: int, state: Mapping[str, Any]) -> Weights:
        """The policy's weights are those after `step`; `state` is what it was then."""
        self.after = {int(at): Weights(version, sha256, Standing(**s)) for at, (version, sha256, s) in state.items()}
        return await self.add(step)


class Pace(NamedTuple):
    """Which weights answer the calls of a step's rollouts, by version."""

    history: History
    step: int

    def ready(self, depth: int) -> bool:
        """Are those there that answer a call which continues `depth` others?"""
        return max(self.history.after) >= self.history._moment(self.step, depth)

    async def __call__(self, depth: int) -> int:
        """Their version, once they are there."""
        while not self.ready(depth):
            await self.history._added.wait()
        return self.history.sampling(self.step, depth).version


def depth_of(call: Step) -> int:
    """How many calls it continues."""
    return int(call.metadata.get(DEPTH, 0))


class Ahead(Generic[T]):
    """One task for each step whose rollouts have begun; `begin` runs those of one."""

    def __init__(self, begin: Callable[[int], Awaitable[T]], config: Config):
        self.begin, self.config = begin, config
        self.awaited = 0  # the step that training waits for
        self._tasks: dict[int, asyncio.Task[tuple[T, float]]] = {}

    async def take(self, step: int) -> tuple[T, dict[str, float]]:
        """What `begin` has for `step`, and metrics: the seconds that it took, and those that training waited for it.
        Begins it and the steps that may run ahead."""
        self.awaited, began = step, time.perf_counter()
        for number in range(step, min(step + self.config.lag, self.config.steps) + 1):
            if number not in self._tasks:
                self._tasks[number] = asyncio.create_task(self._timed(number), name=f"rollouts of step {number}")
        result, seconds = await self._tasks[step]
        del self._tasks[step]
        waited = {"seconds_waited": time.perf_counter() - began} if self.config.lag else {}
        return result, {"seconds_generate": seconds, **waited}

    async def _timed(self, step: int) -> tuple[T, float]:
        began = time.perf_counter()
        return await self.begin(step), time.perf_counter() - began

    async def close(self) -> None:
        """End what runs. What is finished of it is on disk."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
