"""Harbor task directories as tasks: an instruction, an environment, and tests that leave a reward.

Owns: `load`, by which `minirllm eval path/to/dir` finds them, and who acts in them. Does not know: how a trial goes
(trial.py), how a task is written (task.py), models.

A path is one task directory, or a folder of them; or a folder with two such folders, ``train`` and ``held_out``. Else
the same tasks are trained on and evaluated. A trial grades itself in its sandbox; the evaluator reads that off.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from minirllm import harness
from minirllm.config import Config
from minirllm.errors import TaskError
from minirllm.flow import AgentFlow, Evaluator, TaskModule, names
from minirllm.harbor import trial
from minirllm.harbor.agents import BUILTIN, program
from minirllm.harbor.spec import check
from minirllm.harbor.task import HarborTask, digest, read
from minirllm.sandboxes import pool
from minirllm.sandboxes.kept import Recipe
from minirllm.types import AgentConfig, Episode, EvalOutput, Signal, Task

logger = logging.getLogger(__name__)

SPLITS = ("train", "held_out")


def load(path: Path) -> TaskModule:
    """The tasks in a folder. Raises TaskError when there are none, or one is not what it must be."""
    path = path.resolve()
    if all((path / name).is_dir() for name in SPLITS) and not (path / "task.toml").exists():
        train, held_out = (_tasks(path / name) for name in SPLITS)
    else:
        train = held_out = _tasks(path)
    every = list({task.folder: task for task in (*train, *held_out)}.values())
    sandbox = "docker" if any(task.environment.made_of for task in every) else "local"
    return TaskModule(
        name=path.name,
        flow=None,
        evaluator=Evaluator(verdict, "harbor"),
        make_train=lambda _: [_task(task) for task in train],
        make_held_out=lambda _: [_task(task) for task in held_out],
        defaults={"sandbox": sandbox, "episode_timeout": max(task.seconds for task in every)},
        data_revision=digest(every),
        own_agents=tuple(BUILTIN),
        host=lambda config: _flow(every, config),
    )


async def verdict(task: Task, episode: Episode) -> EvalOutput:
    """What the trial found."""
    found = episode.artifacts["harbor"]
    reward, signals = found["reward"], [Signal(name, value) for name, value in found["rewards"].items()]
    return EvalOutput(reward, reward is not None and reward >= 1.0, signals, {}, found["reason"])


def _tasks(path: Path) -> list[HarborTask]:
    folders = [path] if (path / "task.toml").exists() else sorted(file.parent for file in path.glob("*/task.toml"))
    if not folders:
        raise TaskError(f"{path} is no task: neither it nor a folder in it has a task.toml.")
    return [read(folder) for folder in folders]


def _task(task: HarborTask) -> Task:
    text = "\n\n".join(step.instruction for step in task.steps)
    return Task(task.name, text, dataset_dir=task.folder.parent, sub_dir=Path(task.folder.name))


def _equipped(task: HarborTask, one: harness.Harness) -> None:
    """Raises TaskError when a program cannot be given what the task has for it."""
    where = f"Task {task.name} ({task.folder})"
    for name, server in task.environment.servers.items():
        if (kind := server["type"]) not in one.servers:
            able = _able(lambda other, kind=kind: kind in other.servers)
            raise TaskError(f"{where} has the MCP server {name} ({kind}), which {one.name} cannot be given: {able}.")
    if task.environment.skills and not one.skills:
        able = _able(lambda other: bool(other.skills))
        raise TaskError(f"{where} has skills_dir, which {one.name} cannot be given: {able}.")


def _able(can: Callable[..., bool]) -> str:
    """What to take instead."""
    known = [harness.find(name.replace("_", "-")) for name in names("harnesses")]
    return f"take {' or '.join(other.name for other in known if can(other))}"


def _flow(tasks: list[HarborTask], config: Config) -> AgentFlow:
    """Who acts, checked against what the tasks need. Raises UserError."""
    if not config.harness:
        raise TaskError("A Harbor task has no agent of its own: choose one, as in --harness oracle or --harness bash.")
    one = None if config.harness in BUILTIN else harness.find(config.harness)
    if one is not None:
        harness.check_installed(one, config.sandbox)
    agent = BUILTIN[config.harness] if one is None else program(one, config.harness_full)
    for task in tasks:
        check(task, config.sandbox)
        if one is not None:
            _equipped(task, one)
        if config.harness == "oracle" and not all(step.solution for step in task.steps):
            raise TaskError(f"Task {task.name} ({task.folder}) has no solution/solve.sh, so the oracle knows nothing.")
    asked = [place.network for task in tasks for place in task.environments if place.asks_network]
    if "public" in (*asked, *(mode for task in tasks for step in task.steps for mode in step.networks)):
        logger.warning("some of these tasks ask for a network; there is none in a sandbox")
    by_name = {task.name: task for task in tasks}
    boxes = pool.of(config)
    assert boxes is not None, "a Harbor task has a sandbox by default"
    installed = () if one is None else harness.installed(one)

    def recipes(tasks: Sequence[Task], url: str) -> list[Recipe]:
        needs = trial.NOTHING if one is None else harness.needs(one, url, config.harness_full)
        return [trial.recipe(by_name[task.id], boxes, needs, installed) for task in tasks]

    async def run(task: Task, model: AgentConfig) -> Episode:
        (start,) = await asyncio.to_thread(recipes, [task], model.base_url.removesuffix("/v1"))
        return await trial.run(by_name[task.id], agent, boxes, start, model)

    made = AgentFlow(run, config.harness if one is None else one.name, one.auxiliary if one else None)
    made.silent = one is None
    made.recipes, made.ahead = recipes, lambda tasks, url: boxes.ahead(lambda: recipes(tasks, url))
    made.facts = {"harness": f"{one.name} {one.version}" if one else config.harness, "sandbox": config.sandbox}
    return made
