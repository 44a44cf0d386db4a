"""A trial: one agent at one Harbor task in one sandbox, from its start to its grading.

Owns: `run`, the order of things (start, health, agent, artifacts, tests), time limits, what a sandbox is refused for.
Does not know: what agents do, how rewards are read, how sandboxes isolate.

An agent that runs out of its time, or fails, has ended, and is graded. A sandbox or a health check that fails is no
attempt: SandboxError, and the episode is run again.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from minirllm import sandboxes
from minirllm.errors import SandboxError, TaskError
from minirllm.harbor.grading import Graded, combined, grade, missed, scalar, script
from minirllm.harbor.task import Artifact, HarborTask, Health, Step, resolved
from minirllm.place import read_files
from minirllm.sandboxes import MIB, Limits, Sandbox, Spec
from minirllm.sandboxes.kept import Recipe
from minirllm.sandboxes.pool import Pool
from minirllm.types import AgentConfig, Episode, Trajectory
from minirllm.watchdog import Deadline

NOTHING = Spec()
FOLDERS = 'mkdir -p -m 777 /logs/agent /logs/verifier /logs/artifacts && mkdir -p "$1"'


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


def check(task: HarborTask, kind: str) -> None:
    """Raises TaskError when sandbox `kind` cannot run the task, or a variable that it names is missing."""
    where, environment = f"Task {task.name} ({task.folder})", task.environment
    if environment.other:
        raise TaskError(f"{where} needs {environment.other}, which no sandbox here has.")
    if environment.made_of and not sandboxes.kind(kind).images:
        raise TaskError(f"{where} needs {environment.made_of}, and the sandbox {kind} has no images: take docker.")
    if environment.network == "allowlist":
        raise TaskError(f"{where} needs hosts on the network (network_mode), and sandboxes here have none.")
    for step in task.steps:
        if step.separate:
            raise TaskError(f"{where} has a verifier with an environment of its own, which the sandbox {kind} lacks.")
        if user := step.agent_user or step.verifier_user:
            raise TaskError(f"{where} names the user {user}, and the sandbox {kind} has one user only.")
        resolved(step.verifier_env, f"{where}, [verifier.env]")
    resolved(environment.env, f"{where}, [environment.env]")


def spec(task: HarborTask) -> Spec:
    """The sandbox that the task asks for."""
    environment, usual = task.environment, Limits()
    limits = Limits(
        memory=int((environment.memory_mb or 0) * MIB) or usual.memory,
        disk=int((environment.storage_mb or 0) * MIB) or usual.disk,
        cpus=environment.cpus or usual.cpus,
    )
    return Spec(
        image=environment.image,
        build=task.folder / "environment" if environment.dockerfile else None,
        build_seconds=environment.build_seconds,
        limits=limits,
        env=resolved(environment.env, f"{task.name}: [environment.env]"),
    )


def recipe(task: HarborTask, boxes: Pool, needs: Spec = NOTHING, installed: tuple[str, ...] = ()) -> Recipe:
    """Of a sandbox in which a trial can begin. The agent sees the folders and the ports that it `needs`."""
    environment = task.environment

    async def prepare(box: Sandbox) -> None:
        cwd = environment.workdir or box.work
        await script(box, FOLDERS, cwd)
        if environment.files is not None:
            await box.upload(environment.files, cwd)

    files: tuple[Path, ...] = (environment.files,) if environment.files else ()
    own = replace(spec(task), binds=needs.binds, forward=needs.forward)
    return boxes.recipe(own, prepare, (FOLDERS, environment.workdir, *files, *installed), f"task {task.name}")


async def run(task: HarborTask, agent: Agent, boxes: Pool, start: Recipe, model: AgentConfig) -> Episode:
    """One trial, graded, in a sandbox that `start` makes; tests have no ports. Raises SandboxError when there was
    none."""
    deadline = Deadline(model.metadata.get("timeout", 600.0) - 1.0)
    async with boxes.take(start) as box:
        return await _Trial(task, agent, model, box, deadline).run()


class _Trial:
    def __init__(self, task: HarborTask, agent: Agent, model: AgentConfig, box: Sandbox, deadline: Deadline):
        self.task, self.agent, self.model, self.box, self.deadline = task, agent, model, box, deadline
        self.cwd = task.environment.workdir or box.work
        self.artifacts: dict[str, Any] = {}

    async def run(self) -> Episode:
        """All steps, until one misses its least reward."""
        await self._healthy(self.task.health)
        graded: list[Graded] = []
        for step in self.task.steps:
            graded.append(await self._step(step))
            rewards = graded[-1].rewards
            if rewards is None or missed(step, rewards):
                break
        whole = combined(graded, self.task.final)
        reward, reason = scalar(whole)
        self.artifacts["harbor"] = {
            "reward": reward,
            "reason": reason,
            "rewards": dict(whole.rewards or {}),
            "steps": [dict(each.rewards or {}) for each in graded],
            "tests": "\n".join(each.printed for each in graded),
        }
        return Episode(trajectories=[Trajectory()], artifacts=self.artifacts)

    async def _step(self, step: Step) -> Graded:
        if step.workdir is not None:
            await self.box.upload(step.workdir, self.cwd)
            await script(self.box, 'cd "$1" && if test -f setup.sh; then bash setup.sh; fi', self.cwd, timeout=600.0)
        await self._healthy(step.health)
        left = self.deadline.remaining()
        kept_back = min(step.verifier_seconds, left / 2)  # so that the agent's work can be graded
        seconds = min(step.agent_seconds or left, left - kept_back)
        outcome = await self.agent(Order(self.task, step, self.box, self.cwd, seconds, self.model))
        prefix = f"{step.name}: " if step.name else ""
        self.artifacts["ended"] = "; ".join(filter(None, (self.artifacts.get("ended"), f"{prefix}{outcome.how}")))
        self.artifacts |= {f"{prefix}{name}": value for name, value in outcome.artifacts.items()}
        files = self.artifacts.setdefault("files", {})
        for artifact in (Artifact("/logs/artifacts"), *step.artifacts):
            files |= {f"{prefix}{path}": text for path, text in (await self._kept(artifact)).items()}
        seconds = min(step.verifier_seconds, self.deadline.remaining())
        return await grade(self.box, self.task, step, self.cwd, seconds)

    async def _healthy(self, health: Health | None) -> None:
        """Wait until the check succeeds. Raises SandboxError when it fails too often."""
        if health is None:
            return
        start, failures = Deadline(health.start_period), 0
        while True:
            done = await self.box.run(health.command, timeout=health.timeout, cwd=self.cwd)
            if done.exit_code == 0:
                return
            starting = start.remaining() > 0
            failures += not starting
            if failures >= max(1, health.retries):
                raise SandboxError(f"Task {self.task.name}: its health check failed: {done.stderr.strip()[-200:]}.")
            await asyncio.sleep(health.start_interval if starting else health.interval)

    async def _kept(self, artifact: Artifact) -> dict[str, str]:
        """The text files of an artifact, by their paths in the sandbox; none when it is not there."""
        source = artifact.source if artifact.source.startswith("/") else f"{self.cwd}/{artifact.source}"
        folder = Path(await asyncio.to_thread(tempfile.mkdtemp, prefix="minirllm-artifacts-"))
        try:
            if (await self.box.run('test -d "$P"', timeout=60.0, env={"P": source})).exit_code:
                name = Path(source).name
                await asyncio.to_thread((folder / name).write_bytes, await self.box.read(source))
                source = str(Path(source).parent)
            else:
                await self.box.download(source, folder)
            found, _ = await asyncio.to_thread(read_files, folder)
        except SandboxError:
            return {}
        finally:
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
        return {
            f"{source}/{name}": text
            for name, text in found.items()
            if not any(fnmatch(part, pattern) for pattern in artifact.exclude for part in (name, *Path(name).parts))
        }
