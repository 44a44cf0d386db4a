"""Evaluate: n rollouts of each task, pass@1 to pass@n, what could not be graded, and how sure the numbers are.

Owns: the estimators, the result, its files. Does not know: how a rollout is run, models, torch.

Every attempted rollout is in the denominator of pass@k: one that errored, timed out or could not be graded did not
pass. Those are also counted apart by reason. The mean reward is over graded rollouts, every task weighing the same.

Intervals are 95 %. pass@1: Wilson's score interval (Wilson 1927) at the effective sample size ``p (1 - p) / var(p)``,
where var(p) is the variance of the mean over tasks, since rollouts of one task are alike (all tasks at 0, or all at 1:
the number of tasks). Mean reward: normal, over task means. With one task, both are over its rollouts and speak of that
task only.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from minirllm import harness, interrupt
from minirllm.config import Config
from minirllm.errors import UserError
from minirllm.files import write_whole
from minirllm.flow import TaskModule
from minirllm.providers.serving import serving
from minirllm.returns import mean_signals
from minirllm.rollouts import Job, Runner
from minirllm.store import EpisodeStore
from minirllm.types import Episode, Task, TerminationReason

Z = 1.959964  # 97.5 % point of the normal distribution
ANSWERING = ("model", "provider", "base_url", "sampling")  # facts of an endpoint that say who answered
ERRORS = frozenset({TerminationReason.ERROR, TerminationReason.TIMEOUT, TerminationReason.NO_CALLS})


@dataclass
class EvalResult:
    """What an evaluation found. `pass_at` is by k; `errors` and `ungraded` count termination reasons."""

    tasks: int
    rollouts: int  # per task
    graded: int  # of tasks x rollouts
    pass_at: dict[int, float]
    pass_at_1_interval: tuple[float, float]
    reward_mean: float | None
    reward_interval: tuple[float, float] | None
    errors: dict[str, int] = field(default_factory=dict)  # the agent failed
    ungraded: dict[str, int] = field(default_factory=dict)  # the agent ended, the evaluator gave no reward
    reason: str = ""  # of the first of both
    signals: dict[str, float] = field(default_factory=dict)
    seed: int = 0
    answered_by: dict[str, str] = field(default_factory=dict)  # the model; of a provider's also whose, and its sampling
    episodes: list[Episode] = field(default_factory=list, repr=False)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, without the episodes."""
        return {name: value for name, value in vars(self).items() if name != "episodes"}

    def metrics(self) -> dict[str, float | str | None]:
        """What a training run puts into its metrics row. None where nothing could be graded."""
        low, high = self.reward_interval or (None, None)
        return {
            "eval_reward": self.reward_mean,
            "eval_low": low,
            "eval_high": high,
            "eval_pass": self.pass_at[1],
            "eval_without_reward": float(self.tasks * self.rollouts - self.graded),
            **({"eval_ungraded_reason": self.reason} if self.reason else {}),
            "eval_drift": self.drift,
            **{f"eval_signal/{name}": value for name, value in self.signals.items()},
        }

    @property
    def drift(self) -> float:
        """Calls whose text, as sent, is not what their tokens say; must be 0."""
        return float(sum(episode.metrics.get("drift", 0) for episode in self.episodes))

    def __str__(self) -> str:
        low, high = self.pass_at_1_interval
        parts = [f"pass@1 {self.pass_at[1]:.3f} [{low:.3f}, {high:.3f}]"]
        parts += [
            f"pass@{k} {value:.3f}"
            for k, value in self.pass_at.items()
            if k > 1 and (k & (k - 1) == 0 or k == self.rollouts)
        ]
        if self.reward_mean is not None and self.reward_interval is not None:
            parts.append(
                f"mean reward {self.reward_mean:.3f} [{self.reward_interval[0]:.3f}, {self.reward_interval[1]:.3f}]"
            )
        parts += [f"{name} {value:.3f}" for name, value in self.signals.items()]
        parts.append(f"{self.tasks} tasks x {self.rollouts}, {self.graded} graded")
        parts += [
            f"{count} {reason} (counted as not passed)" for reason, count in {**self.errors, **self.ungraded}.items()
        ]
        parts += [f"the first: {self.reason}"] if self.reason else []
        if self.drift:
            parts.append(f"drift in {self.drift:.0f} calls")
        if provider := self.answered_by.get("provider"):
            parts.append(f"answered by {self.answered_by['model']} of {provider}, whose sampling it is")
        return ", ".join(parts)


async def evaluate(
    runner: Runner,
    tasks: Sequence[Task],
    n: int = 1,
    *,
    step: int = 0,
    folder: Path | None = None,
    on_done: Callable[[Episode], None] = lambda _: None,
    answered_by: Mapping[str, str] | None = None,
) -> EvalResult:
    """Run `n` rollouts of each task and summarise. With `folder`, writes what `write` does there.
    `step` is how far training was: it names the episodes, and changes nothing about them. `answered_by` is for the
    result."""
    if n < 1 or not tasks:
        raise UserError(
            f"An evaluation needs at least one task and one rollout of it, got {len(tasks)} tasks and {n} rollouts."
        )
    jobs = [Job(task, index, step, validation=True) for task in tasks for index in range(n)]
    episodes = await runner.run_many(jobs, on_done)
    result = summarise(episodes, n, runner.config.seed)
    result.answered_by = dict(answered_by or {})
    if folder is not None:
        await asyncio.to_thread(write, folder, result)
    return result


def run(
    task: TaskModule,
    config: Config,
    *,
    n: int = 1,
    split: str = "held_out",
    checkpoint: Path | None = None,
    output: Path | None = None,
) -> EvalResult:
    """Evaluate a model (or `checkpoint` of it), or a provider's, on the first ``config.eval_tasks`` tasks of `split`
    (0: all)."""
    tasks = task.train(config) if split == "train" else task.held_out(config)
    agent = harness.agent(task, config)

    async def work() -> EvalResult:
        async with serving(config, weights=checkpoint) as place:
            runner = Runner(place.sessions, place.base_url, agent, task.evaluator, config)
            who = {name: place.facts[name] for name in ANSWERING if name in place.facts}
            try:
                chosen = tasks[: config.eval_tasks or None]
                return await evaluate(runner, chosen, n, folder=output, answered_by=who)
            finally:
                await runner.close()

    return interrupt.run(lambda stop: work(), steps=False)


def summarise(episodes: Sequence[Episode], n: int, seed: int = 0) -> EvalResult:
    """The result of episodes that come as `n` rollouts of the first task, then `n` of the next, and so on."""
    assert len(episodes) in range(n, len(episodes) + 1, n), f"{len(episodes)} episodes are not {n} for each task"
    groups = [episodes[i : i + n] for i in range(0, len(episodes), n)]
    graded = [e for e in episodes if e.reward is not None]
    passed = [sum(e.is_correct and e.reward is not None for e in group) for group in groups]
    rewards = [[float(e.reward) for e in group if e.reward is not None] for group in groups]
    means = [sum(r) / len(r) for r in rewards if r]
    values = means if len(groups) > 1 else [x for r in rewards for x in r]
    without = [e for e in episodes if e.reward is None]
    return EvalResult(
        tasks=len(groups),
        rollouts=n,
        graded=len(graded),
        pass_at={k: sum(pass_at_k(n, c, k) for c in passed) / len(groups) for k in range(1, n + 1)},
        pass_at_1_interval=wilson([c / n for c in passed], n),
        reward_mean=sum(values) / len(values) if graded else None,
        reward_interval=normal(values) if graded else None,
        errors=_count(e for e in without if e.termination_reason in ERRORS),
        ungraded=_count(e for e in without if e.termination_reason not in ERRORS),
        reason=next((e.reason for e in without if e.reason), ""),
        signals=mean_signals(graded),
        seed=seed,
        episodes=list(episodes),
    )


def pass_at_k(n: int, c: int, k: int) -> float:
    """Chance that k of n rollouts, drawn without replacement, hold one of the c that passed (arXiv:2107.03374)."""
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def wilson(rates: Sequence[float], n: int) -> tuple[float, float]:
    """95 % interval of the mean of the tasks' pass rates, each from `n` rollouts; see the module's docstring."""
    tasks = len(rates)
    p = sum(rates) / tasks
    size = float(n if tasks == 1 else tasks)
    if tasks > 1 and 0.0 < p < 1.0:
        variance = sum((rate - p) ** 2 for rate in rates) / (tasks - 1) / tasks
        size = min(p * (1 - p) / variance, float(tasks * n)) if variance > 0 else float(tasks * n)
    centre = (p + Z * Z / (2 * size)) / (1 + Z * Z / size)
    half = Z / (1 + Z * Z / size) * math.sqrt(p * (1 - p) / size + Z * Z / (4 * size * size))
    return max(0.0, centre - half), min(1.0, centre + half)


def normal(values: Sequence[float]) -> tuple[float, float]:
    """95 % interval of the mean; the point itself when there is a single value."""
    mean = sum(values) / len(values)
    if len(values) < 2:
        return mean, mean
    half = Z * math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1) / len(values))
    return mean - half, mean + half


def write(folder: Path, result: EvalResult) -> None:
    """``items.jsonl``, ``summary.json`` and, whole, ``episodes/`` in `folder`. Raises UserError when they cannot be
    written."""
    lines = (json.dumps(item(episode), default=str) + "\n" for episode in result.episodes)
    write_whole(folder / "items.jsonl", "".join(lines))
    write_whole(folder / "summary.json", json.dumps(result.to_dict(), indent=1) + "\n")
    store = EpisodeStore(folder / "episodes")
    store.drop(0)  # of an evaluation before this one
    for episode in result.episodes:
        store.append(0, episode)


def item(episode: Episode) -> dict[str, Any]:
    """One line of ``items.jsonl``: enough to find, repeat and judge the rollout."""
    return {
        "task_id": episode.task_id,
        "rollout_idx": episode.rollout_idx,
        "attempt": episode.attempt,
        "seed": episode.metadata.get("seed"),
        "reward": episode.reward,
        "is_correct": episode.is_correct,
        "termination_reason": episode.termination_reason.value,
        "reason": episode.reason,
        "answer": episode.answer,
        "signals": episode.signals,
        "metrics": episode.metrics,
        "session_id": episode.session_id,
    }


def _count(episodes: Any) -> dict[str, int]:
    return dict(sorted(Counter(episode.termination_reason.value for episode in episodes).items()))
