"""A trial: one agent at one Harbor task in one sandbox, from its start to its grading.

Owns: `run`, the order of things (start, health, agent, artifacts, tests), time limits. Does not
know: what agents do, how rewards are read, how sandboxes isolate, what one must be able to do.

An agent that runs out of its time, or fails, has ended, and is graded. A sandbox or a health check that fails is no
attempt: SandboxError, and the episode is run again.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from minirllm.errors import SandboxError
from minirllm.harbor.artifacts import collect, texts
from minirllm.harbor.environment import Health
from minirllm.harbor.grading import Graded, combined, grade, missed, scalar, script
from minirllm.harbor.spec import FOLDERS, spec
from minirllm.harbor.task import HarborTask, Step
from minirllm.harbor.verifier import graded
from minirllm.sandboxes import Sandbox, Spec
from minirllm.sandboxes.kept import Recipe
from minirllm.sandboxes.pool import Pool
from minirllm.types import AgentConfig, Episode, Trajectory
from minirllm.watchdog import Deadline

NOTHING = Spec()
SETUP_SECONDS = 600.0


@dataclass(frozen=True)
class Order:
    """What an agent is given: an instruction, a place, a time, and the model that it may call."""

    task: HarborTask
    step: Step
    box: Sandbox
    cwd: str
    seconds: float
    model: AgentConfig


@dataclass(frozen=True)
class Outcome:
    """How an agent's work ended; `artifacts` are kept with the episode."""

    how: str
    artifacts: Mapping[str, Any] = field(default_factory=dict)


Agent = Callable[[Order], Awaitable[Outcome]]


def recipe(task: HarborTask, boxes: Pool, needs: Spec = NOTHING, installed: tuple[str, ...] = ()) -> Recipe:
    """Of a sandbox in which a trial can begin. The agent sees the folders and the ports that it `needs`."""
    environment = task.environment

    async def prepare(box: Sandbox) -> None:
        cwd = environment.workdir or box.work
        await script(box, FOLDERS, cwd)
        if environment.files is not None:
            await box.upload(environment.files, cwd)

    files: tuple[Path, ...] = (environment.files,) if environment.files else ()
    own = spec(environment, f"{task.name}: [environment.env]", task.seconds)
    own = replace(own, binds=needs.binds, forward=needs.forward)
    return boxes.recipe(own, prepare, (FOLDERS, environment.workdir, *files, *installed), f"task {task.name}")


async def run(task: HarborTask, agent: Agent, boxes: Pool, start: Recipe, model: AgentConfig) -> Episode:
    """One trial, graded, in a sandbox that `start` makes; tests have no ports. Raises SandboxError when there was
    none."""
    deadline = Deadline(model.metadata.get("timeout", 600.0) - 1.0)
    async with boxes.take(start) as box:
        return await _Trial(task, agent, model, box, boxes.kind, deadline).run()


class _Trial:
    def __init__(self, task: HarborTask, agent: Agent, model: AgentConfig, box: Sandbox, kind: str, deadline: Deadline):
        self.task, self.agent, self.model, self.box, self.kind, self.deadline = task, agent, model, box, kind, deadline
        self.cwd = task.environment.workdir or box.work
        self.artifacts: dict[str, Any] = {}

    async def run(self) -> Episode:
        """All steps, until one misses its least reward."""
        await self._healthy(self.task.health, None)
        found: list[Graded] = []
        for step in self.task.steps:
            found.append(await self._step(step))
            rewards = found[-1].rewards
            if rewards is None or missed(step, rewards):
                break
        whole = combined(found, self.task.final)
        reward, reason = scalar(whole)
        self.artifacts["harbor"] = {
            "reward": reward,
            "reason": reason,
            "rewards": dict(whole.rewards or {}),
            "steps": [dict(each.rewards or {}) for each in found],
            "tests": "\n".join(each.printed for each in found),
        }
        return Episode(trajectories=[Trajectory()], artifacts=self.artifacts)

    async def _step(self, step: Step) -> Graded:
        if step.workdir is not None:
            await self.box.upload(step.workdir, self.cwd)
            setup = "if test -f setup.sh; then bash setup.sh; fi"
            done = await self.box.run(setup, timeout=SETUP_SECONDS, cwd=self.cwd, user=step.agent_user)
            if done.exit_code:
                raise SandboxError(f"Task {self.task.name}: setup.sh of {step.name} failed: {done.stderr[-300:]}")
        await self._healthy(step.health, step.agent_user)
        left = self.deadline.remaining()
        verifying = step.verifier_seconds + (step.verifier.build_seconds if step.verifier else 0.0)
        kept_back = min(verifying, left / 2)  # so that the agent's work can be graded
        seconds = min(step.agent_seconds or left, left - kept_back)
        outcome = await self.agent(Order(self.task, step, self.box, self.cwd, seconds, self.model))
        prefix = f"{step.name}: " if step.name else ""
        self.artifacts["ended"] = "; ".join(filter(None, (self.artifacts.get("ended"), f"{prefix}{outcome.how}")))
        self.artifacts |= {f"{prefix}{name}": value for name, value in outcome.artifacts.items()}
        folder = Path(await asyncio.to_thread(tempfile.mkdtemp, prefix="minirllm-artifacts-"))
        try:
            return await self._graded(step, folder, prefix)
        finally:
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)

    async def _graded(self, step: Step, folder: Path, prefix: str) -> Graded:
        """Keep the step's artifacts, and run its tests: where the agent was, or in a place of their own. Nothing that
        it left in the way of these reaches the endpoint."""
        opened, self.box.spec = self.box.spec, replace(self.box.spec, forward={})
        over = step.verifier is not None and step is self.task.steps[-1]  # nobody needs the agent's sandbox any more
        manifest = await collect(self.box, step, self.cwd, folder, over)
        files = await asyncio.to_thread(texts, folder, manifest)
        self.artifacts.setdefault("files", {}).update({f"{prefix}{path}": text for path, text in files.items()})
        self.artifacts.setdefault("manifest", []).extend(manifest)
        if over:
            await self.box.close()
        if step.verifier is not None:
            found = await graded(self.task, step, self.kind, folder, manifest, self.deadline)
        else:
            seconds = min(step.verifier_seconds, self.deadline.remaining())
            found = await grade(self.box, self.task, step, self.cwd, seconds)
        self.box.spec = opened
        return found

    async def _healthy(self, health: Health | None, user: str | None) -> None:
        """Wait until the check succeeds. Raises SandboxError when it fails too often."""
        if health is None:
            return
        start, failures = Deadline(health.start_period), 0
        while True:
            done = await self.box.run(health.command, timeout=health.timeout, cwd=self.cwd, user=user)
            if done.exit_code == 0:
                return
            starting = start.remaining() > 0
            failures += not starting
            if failures >= max(1, health.retries):
                raise SandboxError(f"Task {self.task.name}: its health check failed: {done.stderr.strip()[-200:]}.")
            await asyncio.sleep(health.start_interval if starting else health.interval)
