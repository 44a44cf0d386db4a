"""The page: tasks, rollouts, advantages, update, log, evaluate, save. Read it from top to bottom.

Owns: the order of things in a run. Every noun is a module of its own: rollouts run agents against the endpoint, batch
turns graded episodes into token forests, the trainer makes one optimizer step of them. This page speaks episodes,
forests and metrics; it knows no tensors and no HTTP.

    minirllm train tasks/first_letter.py          python -m minirllm.train tasks/first_letter.py
"""

from __future__ import annotations

import asyncio
import contextlib
import runpy
import sys
import time
from collections.abc import Callable
from typing import Any

from minirllm import ahead, evaluate, filters, grouping, harness, interrupt, penalty
from minirllm.ahead import Ahead, History
from minirllm.algorithms import objective, roles
from minirllm.batch import Batch
from minirllm.collect import Plan, collect, tokens
from minirllm.config import Config
from minirllm.errors import UserError
from minirllm.files import sha256
from minirllm.flow import TaskModule
from minirllm.log import RunLog
from minirllm.rollouts import Job, Runner
from minirllm.saving import Saving, unlearned
from minirllm.stack import Stack
from minirllm.store import EpisodeStore
from minirllm.teachers.teacher import serving
from minirllm.trainer import Trainer
from minirllm.types import Episode, Task

Stop = Callable[[], bool]  # shall the run end?


async def train(
    task: TaskModule, config: Config, *, resume: bool = False, quiet: bool = False, stop: Stop = lambda: False
) -> dict[str, Any]:
    """Train, writing ``runs_dir/run``; returns the last metrics row. Once `stop` says so, it ends after the step in
    hand, which is saved. Raises UserError for what the user can mend."""
    config = config.trainable()
    algorithm = roles.of(config)
    algorithm.validate(config)
    grouping.validate(config, algorithm)
    ahead.validate(config)
    tasks = await asyncio.to_thread(task.train, config)  # may read files, or the network
    filters.validate(config, len(tasks))
    held_out = (await asyncio.to_thread(task.held_out, config))[: config.eval_tasks] if config.eval_tasks else []
    folder = config.run_folder(task.name)
    with await asyncio.to_thread(RunLog, folder, config, resume=resume, quiet=quiet) as log:
        agent = await asyncio.to_thread(harness.agent, task, config)
        async with serving(config, say=log.say, training=True) as stack:
            facts = {"task": task.name, "task_file": str(task.path or ""), "seed": config.seed, **agent.facts}
            facts["task_sha256"] = await asyncio.to_thread(sha256, task.path) if task.path else ""
            await asyncio.to_thread(log.manifest, **stack.facts, **facts, data_revision=task.data_revision)
            runner = Runner(stack.sessions, stack.base_url, agent, task.evaluator, config)
            trainer = Trainer(stack.policy, config, algorithm, folder / "skipped")
            run = _Run(config, log, stack, runner, trainer, stop, tasks)
            try:
                return await run.loop(held_out, resume)
            finally:
                await run.ahead.close()
                await runner.close()


class _Run:
    """The loop and what it carries from step to step."""

    def __init__(
        self, config: Config, log: RunLog, stack: Stack, runner: Runner, trainer: Trainer, stop: Stop, tasks: list[Task]
    ):
        self.config, self.log, self.stack, self.runner, self.trainer = config, log, stack, runner, trainer
        self.stop, self.tasks, self.store = stop, tasks, EpisodeStore(log.folder / "episodes")
        self.saving = Saving(config, log, stack.policy, trainer)
        self.history = History(stack.policy, config)  # which weights sample a step
        self.ahead = Ahead(self.rollouts, config)
        self.best: dict[str, Any] = {"step": None, "reward": float("-inf")}

    async def loop(self, held_out: list[Task], resume: bool) -> dict[str, Any]:
        """Steps ``done + 1`` to ``config.steps``. A step is a pure function of its number, of the weights before it and
        of those that sample it. Returns its last row; of a run that was stopped before it made one, the steps done."""
        config = self.config
        row: dict[str, Any] = {}
        done = await self.restore(resume)
        if done == 0 and held_out and not self.stop():
            row = {"step": 0, **await self.evaluate(held_out, 0)}
            await asyncio.to_thread(self.log.step, row)
        for step in range(done + 1, config.steps + 1):
            if self.stop():
                return row or {"step": done}
            began = time.perf_counter()

            # agents talk to the endpoint, calls are captured; with a lag, while earlier steps are trained
            (episodes, collected), seconds = await self.ahead.take(step)
            learned = await self.batch(step, episodes)  # advantages, weights, forests of tokens
            metrics = await self.trainer.update(learned)  # loss, backward, clip, optimizer step: in place
            weights = await self.history.add(step, learned.means)  # those after this step, for steps that they sample
            self.stack.engine.weights_changed()  # cached prefixes belong to the old ones

            row = {
                "step": step,
                **learned.metrics,
                **metrics,
                **seconds,
                **collected,
                "tokens_generated": tokens(episodes),
                "ungraded_reason": next((e.reason for e in episodes if e.reward is None), None),
                "weight_version": weights.version,
                "weights_sha256": weights.sha256,
            }
            last = step == config.steps
            if held_out and (last or (config.eval_every and step % config.eval_every == 0)):
                row |= await self.evaluate(held_out, step)
            row["seconds_step"] = time.perf_counter() - began
            await asyncio.to_thread(self.log.step, row)
            if self.trainer.problem:
                self.log.warn(self.trainer.problem)
            if last or step % config.save_every == 0 or step == self.best["step"] or self.stop():
                await self.save(step)
        return row

    async def rollouts(self, step: int) -> tuple[list[Episode], dict[str, float]]:
        """`group_size` episodes of each of the step's tasks, and metrics of how they came about."""
        job = Job(self.tasks[0], step=step, weights=self.history.pace(step))
        plan = Plan(self.tasks, job, self.config, self.trainer.algorithm, self.history.sampling(step).standing)

        def tick(done: int, total: int, sampled: float) -> None:
            if step == self.ahead.awaited:  # of those that run ahead nothing is shown
                self.progress(f"step {step}", done, total, sampled)

        episodes, tokens_kept = await collect(self.runner, self.store, plan, self.history.sha256, tick)
        return episodes, {"tokens_kept": tokens_kept, **plan.metrics()}

    async def batch(self, step: int, episodes: list[Episode]) -> Batch:
        """What to learn from. A token that cannot be traced or scored, or a function of the user's that fails, ends the
        run; what it learned before is saved."""
        try:
            taught = await self.stack.teach(episodes)
            learned = await penalty.build(step, episodes, self.trainer, self.history)
            learned.metrics |= taught
            if objective.in_reward(self.config):
                await asyncio.to_thread(self.store.keep, step, episodes)  # with what the KL took, for `show --tokens`
            return learned
        except UserError as error:
            if step > 1:
                await self.save(step - 1)
            raise unlearned(error, step, self.store.folder) from error

    async def evaluate(self, held_out: list[Task], step: int) -> dict[str, float | str | None]:
        """One rollout of every held-out task, under the same noise each time."""
        began, done = time.perf_counter(), list[Episode]()

        def tick(episode: Episode) -> None:
            done.append(episode)
            self.progress("held-out", len(done), len(held_out), tokens(done))

        result = await evaluate.evaluate(self.runner, held_out, step=step, on_done=tick)
        if result.reward_mean is not None and result.reward_mean > self.best["reward"]:
            self.best = {"step": step, "reward": result.reward_mean}
        return {**result.metrics(), "seconds_eval": time.perf_counter() - began}

    def progress(self, phase: str, done: int, total: int, sampled: float) -> None:
        self.log.progress(phase, done, total, in_flight=self.runner.in_flight, tokens=int(sampled))

    async def save(self, step: int) -> None:
        await self.saving.save(step, {"best": self.best, "sampling": self.history.state()}, self.best["step"])

    async def restore(self, resume: bool) -> int:
        """How many steps are done already."""
        done, extra = await self.saving.restore() if resume else (0, {})
        self.best = extra.get("best", self.best)
        await self.history.restore(done, extra.get("sampling", {}))
        return done


def run(task: TaskModule, config: Config, *, resume: bool = False, quiet: bool = False) -> dict[str, Any]:
    """`train` for callers without an event loop; signals end it as `interrupt` says. Raises UserError where a loop
    runs, as in a notebook, KeyboardInterrupt or Terminated when it was ended at once."""
    with contextlib.suppress(RuntimeError):
        asyncio.get_running_loop()
        raise UserError("An event loop is running here: `await minirllm.train.train(task, config)` instead.")
    return interrupt.run(lambda stop: train(task, config, resume=resume, quiet=quiet, stop=stop))


if __name__ == "__main__":  # the command line with its options, without importing the row below this one
    sys.argv.insert(1, "train")
    runpy.run_module("minirllm.cli", run_name="__main__")
