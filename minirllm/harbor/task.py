"""A Harbor task directory, read: schema 1.0 to 1.4.

Owns: `HarborTask` and what it is made of, `read`. Does not know: sandboxes, agents, how a task is run.

Files of an older schema mean what the newest says of them (as in Harbor itself); keys that had other names are read.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from minirllm.errors import TaskError
from minirllm.harbor.environment import Environment, Health, defines, environment, health, network
from minirllm.harbor.toml import Table

SCHEMAS = ("1.0", "1.1", "1.2", "1.3", "1.4")
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
MAIN = "main"  # the service that is the sandbox itself
CANARY = re.compile(r"<!--.*canary.*-->|#.*canary.*", re.IGNORECASE)  # by which copies in training data are told
VERIFIER_SECONDS, HOOK_SECONDS = 600.0, 60.0


@dataclass(frozen=True)
class Artifact:
    """A file or folder of the sandbox, or of a service beside it, that is kept; `exclude` are patterns of names."""

    source: str
    destination: str = ""  # where it is kept, if not at its own path
    exclude: tuple[str, ...] = ()
    service: str = MAIN


@dataclass(frozen=True)
class Hook:
    """A command that is run when the agent has ended, so that what it leaves can be kept."""

    command: str
    service: str
    timeout: float
    user: str | None


@dataclass(frozen=True)
class Step:
    """An instruction and its grading. A task in one step has one, without a name."""

    name: str
    instruction: str
    workdir: Path | None  # files for the working folder
    tests: tuple[Path, ...]  # folders laid over each other
    solution: Path | None  # a folder with a solve.sh
    agent_seconds: float | None
    agent_user: str | None
    verifier_seconds: float
    verifier_user: str | None
    verifier_env: Mapping[str, str]
    verifier: Environment | None  # which the tests have for themselves; None: they run where the agent did
    tests_inside: bool  # that one has them already
    collect: tuple[Hook, ...]
    networks: tuple[str, ...]  # that agent and verifier ask for, where they do
    min_reward: Mapping[str, float]
    health: Health | None
    artifacts: tuple[Artifact, ...]


@dataclass(frozen=True)
class HarborTask:
    """See the module."""

    folder: Path
    name: str
    steps: tuple[Step, ...]
    environment: Environment
    health: Health | None
    solution_env: Mapping[str, str]
    final: bool  # of several steps the last one's reward counts, not the mean

    @property
    def seconds(self) -> float:
        """What all its phases may take together; an agent without a limit gets as long as a verifier."""
        each = (step.verifier_seconds + (step.agent_seconds or VERIFIER_SECONDS) for step in self.steps)
        built = (place.build_seconds for place in self.environments if place.made_of)
        hooks = sum(hook.timeout for step in self.steps for hook in step.collect)
        return sum(each) + 60.0 + sum(built) + hooks

    @property
    def environments(self) -> tuple[Environment, ...]:
        """The agent's and those of the verifiers."""
        return (self.environment, *(step.verifier for step in self.steps if step.verifier is not None))


def read(folder: Path) -> HarborTask:
    """The task in `folder`. Raises TaskError saying what is wrong with it, and where."""
    try:
        top = Table(tomllib.loads((folder / "task.toml").read_text(encoding="utf-8")), str(folder / "task.toml"))
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise TaskError(f"{folder / 'task.toml'} cannot be read: {error}.") from None
    version = top.values.get("schema_version", top.values.get("version", SCHEMAS[-1]))
    if str(version) not in SCHEMAS:
        raise TaskError(f"{top.where}: schema {version!r} is not one of {', '.join(SCHEMAS)}.")
    _links(folder)
    name = top.table("task").text("name") or folder.resolve().name
    strategy = top.text("multi_step_reward_strategy", "mean")
    if strategy not in ("mean", "final"):
        raise top.wrong("multi_step_reward_strategy", "mean or final")
    table = top.table("environment")
    place = environment(table, folder / "environment", table.text("docker_image"))
    env, steps = top.table("solution").strings("env"), _steps(top, folder)
    return HarborTask(folder, name, steps, place, health(table), env, strategy == "final")


def digest(tasks: list[HarborTask]) -> str:
    """One hash of all their files."""
    state = sha256()
    for task in tasks:
        for path in sorted(task.folder.rglob("*")):
            if path.is_file():
                state.update(f"{task.name}/{path.relative_to(task.folder).as_posix()}".encode())
                state.update(sha256(path.read_bytes()).digest())
    return state.hexdigest()


def _folder(path: Path) -> Path | None:
    return path if path.is_dir() else None


def _links(folder: Path) -> None:
    root = folder.resolve()
    for path in folder.rglob("*"):
        if path.is_symlink() and not path.resolve().is_relative_to(root):
            raise TaskError(f"{path} is a link that leads out of the task.")


def _artifacts(table: Table) -> tuple[Artifact, ...]:
    found = []
    items = table.values.get("artifacts", [])
    if not isinstance(items, list) or not all(isinstance(item, str | dict) for item in items):
        raise table.wrong("artifacts", "a list of paths and tables")
    for item in items:
        entry = Table({"source": item} if isinstance(item, str) else item, f"{table.where}, artifacts")
        source = entry.text("source")
        if not source or ".." in Path(source).parts:
            raise entry.wrong("source", "a path without ..")
        service, destination = entry.text("service", MAIN) or MAIN, entry.text("destination")
        if ".." in Path(destination).parts or destination.startswith("/"):
            raise entry.wrong("destination", "a relative path without ..")
        if service != MAIN and not source.startswith("/"):
            raise entry.wrong("source", "an absolute path, as it is one of a service")
        found.append(Artifact(source, destination, entry.texts("exclude"), service))
    return tuple(found)


def _hooks(verifier: Table) -> tuple[Hook, ...]:
    found = []
    for row in verifier.tables("collect"):
        if not row.text("command"):
            raise row.wrong("command", "a command")
        seconds = row.number("timeout_sec") or HOOK_SECONDS
        found.append(Hook(row.text("command"), row.text("service", MAIN) or MAIN, seconds, row.user()))
    return tuple(found)


def _verifier(top: Table, own: Table, folder: Path, name: str) -> tuple[Environment | None, bool]:
    """(what the tests have for themselves, whether they are in it already), of the task or of its step `name`."""
    tables = [own.table("verifier"), top.table("verifier")]
    for table in tables:
        mode = table.text("environment_mode")
        if mode not in ("", "shared", "separate"):
            raise table.wrong("environment_mode", "shared or separate")
        if mode or "environment" in table:
            if mode == "shared" and "environment" in table:
                raise table.wrong(
                    "environment_mode", "separate, or left out, where there is an [environment] beside it"
                )
            if mode == "shared":
                return None, False
            break
    else:
        return None, False
    given = next((table.table("environment") for table in tables if "environment" in table), top.table("environment"))
    for table, place in zip(tables, (folder / "steps" / name / "tests", folder / "tests"), strict=True):
        image = table.table("environment").text("docker_image")
        if image or (defines(place) and (name or table is tables[1])):
            return environment(given, place, image), True
    return environment(given, folder / "environment", top.table("environment").text("docker_image")), False


def _steps(top: Table, folder: Path) -> tuple[Step, ...]:
    rows = top.tables("steps")
    if not rows:
        return (_step(top, Table({}, top.where), folder, ""),)
    names = [row.text("name") for row in rows]
    for name, row in zip(names, rows, strict=True):
        if not NAME.fullmatch(name) or [other.lower() for other in names].count(name.lower()) > 1:
            raise row.wrong("name", "a name of letters, digits, dots and dashes that no other step has")
    return tuple(_step(top, row, folder, name) for name, row in zip(names, rows, strict=True))


def _step(top: Table, own: Table, folder: Path, name: str) -> Step:
    """Of the whole task, or of its step `name`, whose table falls back on the task's."""
    place = folder / "steps" / name if name else folder
    agent, verifier = top.table("agent"), top.table("verifier")
    step_agent, step_verifier = own.table("agent"), own.table("verifier")
    tests = tuple(path for path in dict.fromkeys((folder / "tests", place / "tests")) if path.is_dir())
    own_environment, inside = _verifier(top, own, folder, name)
    if not inside and not any((path / "test.sh").is_file() for path in tests):
        raise TaskError(f"{place} has no tests/test.sh: nothing could be graded.")
    least = own.values.get("min_reward", {})
    bounds = Table(least if isinstance(least, dict) else {"reward": least}, f"{own.where}, min_reward")
    solutions = (path for path in (place / "solution", folder / "solution") if (path / "solve.sh").is_file())
    seconds = step_verifier.number("timeout_sec") or verifier.number("timeout_sec") or VERIFIER_SECONDS
    return Step(
        name=name,
        instruction=_instruction(place / "instruction.md"),
        workdir=_folder(place / "workdir"),
        tests=tests,
        solution=next(solutions, None),
        agent_seconds=step_agent.number("timeout_sec") or agent.number("timeout_sec"),
        agent_user=step_agent.user() or agent.user(),
        verifier_seconds=seconds,
        verifier_user=step_verifier.user() or verifier.user(),
        verifier_env=verifier.strings("env") | step_verifier.strings("env"),
        verifier=own_environment,
        tests_inside=inside,
        collect=_hooks(verifier) + _hooks(step_verifier),
        networks=tuple(
            filter(None, (network(step_agent) or network(agent), network(step_verifier) or network(verifier)))
        ),
        min_reward={key: bounds.number(key) or 0.0 for key in bounds.values},
        health=health(own),
        artifacts=_artifacts(top) + _artifacts(own),
    )


def _instruction(path: Path) -> str:
    """Its text without the comments, and the empty lines, at its top."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    except (OSError, UnicodeDecodeError) as error:
        raise TaskError(f"{path} cannot be read: {error}.") from None
    while lines and CANARY.fullmatch(lines[0].strip()):
        lines.pop(0)
    while lines and not lines[0].strip():
        lines.pop(0)
    return "".join(lines)
