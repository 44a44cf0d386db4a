"""Rollouts that run ahead of training: which weights sample a step, and the rollouts under way.

Owns: the schedule, copies of the weights that it needs, one task for each step whose rollouts have begun. Does not
know: what a rollout or an update is.

With ``lag = N`` step k is sampled by the weights that training had made after step ``max(0, k - 1 - N)``, and its
rollouts run while the N steps before it are trained: at most ``(N + 1) * batch_size`` groups are ahead of training. So
which weights sample a token is a function of the step's number, never of timing, and a run repeats bit for bit. With
``lag = 0`` sampler and trainer have the same weights, and nothing is copied.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Generic, NamedTuple, TypeVar

from minirllm.config import Config
from minirllm.errors import ConfigError
from minirllm.policy import Policy

T = TypeVar("T")


class Weights(NamedTuple):
    """Those of one moment of a run."""

    version: int
    sha256: str


def validate(config: Config) -> None:
    """Raises ConfigError for a lag that would never end."""
    if 0 < config.steps <= config.lag:
        raise ConfigError(
            f"With lag = {config.lag} and steps = {config.steps} the first weights would sample every step: "
            "lower lag, or take more steps."
        )


class History:
    """The weights after the last steps, as many as the steps to come are sampled by."""

    def __init__(self, policy: Policy, config: Config):
        self.policy, self.lag = policy, config.lag
        self.after: dict[int, Weights] = {}  # by step

    async def add(self, step: int) -> Weights:
        """The policy's weights as they are now are those after `step`. Not while it is trained."""
        now = Weights(self.policy.version, await self.policy.run(self.policy.weights_sha256))
        if self.lag:
            await self.policy.run(self.policy.keep)
        self.after = {at: weights for at, weights in self.after.items() if step - self.lag <= at < step}
        self.after[step] = now
        versions = {weights.version for weights in self.after.values()}
        for version in self.policy.kept.keys() - versions:
            del self.policy.kept[version]
        return now

    def sampling(self, step: int) -> Weights:
        """Those that sample `step`; of a run resumed with a larger lag the oldest that it has."""
        return self.after[min(at for at in self.after if at >= max(0, step - 1 - self.lag))]

    def kept(self, step: int) -> int | None:
        """What the engine is told: their version, or None for the policy's own."""
        return self.sampling(step).version if self.lag else None

    def staleness(self, step: int) -> dict[str, float]:
        """Figures of `step`, which is to be trained next: how many updates came after the weights that sampled it."""
        version = self.sampling(step).version
        return {"sampled_version": version, "lag": self.policy.version - version} if self.lag else {}

    def state(self) -> dict[str, Any]:
        """For the checkpoint that also holds the policy's kept weights."""
        return {str(step): list(weights) for step, weights in self.after.items()}

    async def restore(self, step: int, state: Mapping[str, Any]) -> Weights:
        """The policy's weights are those after `step`; `state` is what it was then."""
        self.after = {int(at): Weights(*weights) for at, weights in state.items()}
        return await self.add(step)


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
