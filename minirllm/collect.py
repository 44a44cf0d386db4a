"""The episodes of one training step: those that a killed run had finished, from disk, and the rest, run now.

Owns: which tasks are a step's, what of the disk still counts, that every episode is on disk once it has ended.
Does not know: how an episode is run, what is learned from it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import numpy as np

from minirllm.config import Config
from minirllm.rollouts import Job, Runner
from minirllm.store import EpisodeStore
from minirllm.types import Episode

T = TypeVar("T")
WEIGHTS = "weights_sha256"  # in the metadata of an episode: of those that sampled it


def schedule(tasks: Sequence[T], config: Config, step: int) -> list[T]:
    """The tasks, or whatever they are, of step 1, 2, ...: each epoch is a new permutation drawn from (seed, epoch); a
    step repeats none."""
    size = min(config.batch_size, len(tasks))
    epoch, place = divmod(step - 1, len(tasks) // size)
    order = np.random.default_rng([config.seed, epoch]).permutation(len(tasks))
    return [tasks[i] for i in order[place * size : (place + 1) * size]]


async def collect(
    runner: Runner, store: EpisodeStore, jobs: list[Job], weights: str, tick: Callable[[int, float], None]
) -> tuple[list[Episode], float]:
    """The episodes of all `jobs` of one step, in their order, and how many tokens those have that were on disk.

    What is on disk counts, failed attempts included, unless other weights than these sampled it, or the options asked
    for other rollouts. `tick` hears how many episodes there are, and how many tokens were sampled now.
    """
    step, keys = jobs[0].step, {(job.task.id, job.rollout_idx) for job in jobs}
    attempts = await asyncio.to_thread(store.attempts, step)
    if any(e.metadata.get(WEIGHTS) != weights for e in attempts.values()) or not keys >= attempts.keys():
        await asyncio.to_thread(store.drop, step)
        attempts = {}
    finished = {key: episode for key, episode in attempts.items() if not episode.retried}
    missing = [
        job.after(attempts[key]) if key in attempts else job
        for job in jobs
        if (key := (job.task.id, job.rollout_idx)) not in finished
    ]
    kept = tokens(finished.values())
    writes, one_at_a_time = [], asyncio.Lock()

    async def write(episode: Episode) -> None:
        async with one_at_a_time:
            await asyncio.to_thread(store.append, step, episode)

    def save(episode: Episode) -> None:
        episode.metadata[WEIGHTS] = weights
        writes.append(asyncio.ensure_future(write(episode)))

    def done(episode: Episode) -> None:
        finished[episode.task_id, episode.rollout_idx] = episode
        save(episode)
        tick(len(finished), tokens(finished.values()) - kept)

    tick(len(finished), 0)
    try:
        await runner.run_many(missing, done, on_retry=save)
    finally:  # also when interrupted: what is finished is kept
        await asyncio.gather(*writes)
    return [finished[job.task.id, job.rollout_idx] for job in jobs], kept


def tokens(episodes: Iterable[Episode]) -> float:
    """How many they sampled in all."""
    return sum(episode.metrics.get("response_tokens", 0.0) for episode in episodes)
