"""The episodes of one training step: those that a killed run had finished, from disk, and the rest, run now.

Owns: the rounds of a step, what of the disk still counts, that every episode is on disk once it has ended.
Does not know: how an episode is run, what is learned from it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import replace

from minirllm import batch
from minirllm.algorithms import Algorithm
from minirllm.config import Config
from minirllm.filters import PLACE
from minirllm.rollouts import Job, Runner
from minirllm.standing import Standing, choose, within
from minirllm.store import EpisodeStore
from minirllm.types import Episode, Task

Key = tuple[str, int]  # task id and rollout
Digest = Callable[[int, Episode], Awaitable[str]]  # of the weights that sampled an episode of a step
WEIGHTS = "weights_sha256"  # in the metadata of an episode: their digest


class Plan:
    """What a step runs: its own tasks, then, round by round, others in place of those without a signal. A function of
    the step's tasks and episodes, so a killed step goes on with the same."""

    def __init__(self, tasks: Sequence[Task], job: Job, config: Config, algorithm: Algorithm, standing: Standing):
        """`job`: what all of them have in common."""
        self.job, self.config, self.algorithm, self.standing = job, config, algorithm, standing
        self.scheduled = choose(tasks, config, job.step, standing)
        self.passed = len(tasks) - len(within(tasks, config, standing))
        self.own = min(config.batch_size + config.spare_tasks, len(self.scheduled))
        self.place = {task.id: place for place, task in enumerate(self.scheduled)}
        self.begun = self.rounds = 0  # tasks, and rounds of them after the first

    def more(self, episodes: Sequence[Episode]) -> list[Job]:
        """The next rollouts, when the step has these `episodes`; none: it has all."""
        count = self.own
        if self.begun:
            count = self._missing(episodes) if self.rounds < self.config.refill else 0
        tasks = self.scheduled[self.begun : self.begun + max(0, count)]
        self.rounds += bool(self.begun and tasks)
        self.begun += len(tasks)
        return [job for task in tasks for job in self._jobs(task)]

    def possible(self) -> set[Key]:
        """The rollouts that the step may come to run."""
        return {job.key for task in self.scheduled for job in self._jobs(task)}

    def metrics(self) -> dict[str, float]:
        """How often more tasks were begun, and how many; how many were passed over for their solve rate."""
        more = {"refill_rounds": float(self.rounds), "refill_tasks": float(self.begun - self.own)}
        return (more if self.config.refill else {}) | ({"tasks_passed_over": float(self.passed)} if self.passed else {})

    def _missing(self, episodes: Sequence[Episode]) -> int:
        """How many tasks with a signal these lack, by their rewards alone: the KL that an update takes from them comes
        later, and is on disk of a step that is run again."""
        plain = replace(self.config, kl_beta=0.0)
        found = batch.select(episodes, plain, self.algorithm, self.standing)
        return self.config.batch_size - len(found.signal)

    def _jobs(self, task: Task) -> list[Job]:
        count = self.config.group_size + self.config.spare_rollouts
        return [self.job._replace(task=task, rollout_idx=i) for i in range(count)]


async def collect(
    runner: Runner, store: EpisodeStore, plan: Plan, weights: Digest, tick: Callable[[int, int, float], None]
) -> tuple[list[Episode], float]:
    """The episodes of one step, in the order of its plan, and how many tokens those have that were on disk.

    What is on disk counts, failed attempts included, unless other weights than these sampled it, or the options asked
    for other rollouts. `tick` hears how many episodes there are, of how many, and how many tokens were sampled now.
    """
    step, jobs = plan.job.step, list[Job]()
    attempts = await asyncio.to_thread(store.attempts, step)
    others = [e for e in attempts.values() if e.metadata.get(WEIGHTS) != await weights(step, e)]
    if others or not plan.possible() >= attempts.keys():
        await asyncio.to_thread(store.drop, step)
        attempts = {}
    finished, kept = dict[Key, Episode](), 0.0
    writes, one_at_a_time = [], asyncio.Lock()

    async def write(episode: Episode) -> None:
        async with one_at_a_time:
            episode.metadata[WEIGHTS] = await weights(step, episode)
            await asyncio.to_thread(store.append, step, episode)

    def save(episode: Episode) -> None:
        episode.metadata[PLACE] = plan.place[episode.task_id]
        writes.append(asyncio.ensure_future(write(episode)))

    def done(episode: Episode) -> None:
        finished[episode.task_id, episode.rollout_idx] = episode
        save(episode)
        tick(len(finished), len(jobs), tokens(finished.values()) - kept)

    while more := plan.more([finished[job.key] for job in jobs]):
        jobs += more
        there = {job.key: attempts.pop(job.key) for job in more if job.key in attempts}
        finished |= {key: episode for key, episode in there.items() if not episode.retried}
        kept += tokens(episode for episode in there.values() if not episode.retried)
        tick(len(finished), len(jobs), tokens(finished.values()) - kept)
        missing = [job.after(there[job.key]) if job.key in there else job for job in more if job.key not in finished]
        try:
            await runner.run_many(missing, done, on_retry=save)
        finally:  # also when interrupted: what is finished is kept
            await asyncio.gather(*writes)
    if attempts:  # rounds that other options had asked for
        await asyncio.to_thread(store.keep, step, list(finished.values()))
    return [finished[job.key] for job in jobs], kept


def tokens(episodes: Iterable[Episode]) -> float:
    """How many they sampled in all."""
    return sum(episode.metrics.get("response_tokens", 0.0) for episode in episodes)
