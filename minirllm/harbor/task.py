"""A Harbor task directory, read: schema 1.0 to 1.4.

Owns: `HarborTask` and what it is made of, `read`. Does not know: sandboxes, agents, how a task is run.

Files of an older schema mean what the newest says of them (as in Harbor itself); keys that had other names are read.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

from minirllm.errors import TaskError
from minirllm.harbor.toml import Table

SCHEMAS = ("1.0", "1.1", "1.2", "1.3", "1.4")
MIB = 2**20
UNITS = {"": 1 / MIB, "K": 1 / 1024, "M": 1.0, "G": 1024.0, "T": 1024.0**2}  # in MiB
TEMPLATE = re.compile(r"\$\{(\w+)(?::-(.*))?\}", re.DOTALL)
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
COMPOSE = ("docker-compose.yaml", "docker-compose.yml")
VERIFIER_SECONDS, BUILD_SECONDS = 600.0, 600.0


@dataclass(frozen=True)
class Health:
    """A command that must succeed before the agent begins."""

    command: str
    interval: float
    timeout: float
    start_period: float
    start_interval: float
    retries: int


@dataclass(frozen=True)
class Artifact:
    """A file or folder of the sandbox that is kept; `exclude` are patterns of names."""

    source: str
    exclude: tuple[str, ...] = ()


@dataclass(frozen=True)
class Environment:
    """What the task runs in. None: the sandbox's own default."""

    image: str = ""
    dockerfile: bool = False  # environment/Dockerfile
    files: Path | None = None  # environment/, where there is no image: it is laid into the working folder
    workdir: str = ""
    cpus: float | None = None
    memory_mb: float | None = None
    storage_mb: float | None = None
    network: str = "public"  # public, no-network, allowlist
    asks_network: bool = False  # it says so itself
    env: Mapping[str, str] = field(default_factory=dict)
    build_seconds: float = BUILD_SECONDS
    other: str = ""  # what else it needs, which nothing here has

    @property
    def made_of(self) -> str:
        """What only sandboxes with images can start from; empty when any will do."""
        return f"the image {self.image}" if self.image else "environment/Dockerfile" if self.dockerfile else ""


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
    separate: bool  # the verifier has an environment of its own
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
        return sum(each) + 60.0 + (self.environment.build_seconds if self.environment.made_of else 0.0)


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
    environment, health = _environment(top.table("environment"), folder), _health(top.table("environment"))
    env = top.table("solution").strings("env")
    return HarborTask(folder, name, _steps(top, folder), environment, health, env, strategy == "final")


def digest(tasks: list[HarborTask]) -> str:
    """One hash of all their files."""
    state = sha256()
    for task in tasks:
        for path in sorted(task.folder.rglob("*")):
            if path.is_file():
                state.update(f"{task.name}/{path.relative_to(task.folder).as_posix()}".encode())
                state.update(sha256(path.read_bytes()).digest())
    return state.hexdigest()


def resolved(env: Mapping[str, str], where: str) -> dict[str, str]:
    """Values that are ``${NAME}`` or ``${NAME:-default}`` are this process's variable. Raises TaskError without one."""
    found = {}
    for key, value in env.items():
        if match := TEMPLATE.fullmatch(value):
            given = os.environ.get(match[1], match[2])
            if given is None:
                raise TaskError(f"{where}: {key} is {value}, and there is no environment variable {match[1]}.")
            value = given
        found[key] = value
    return found


def _folder(path: Path) -> Path | None:
    return path if path.is_dir() else None


def _links(folder: Path) -> None:
    root = folder.resolve()
    for path in folder.rglob("*"):
        if path.is_symlink() and not path.resolve().is_relative_to(root):
            raise TaskError(f"{path} is a link that leads out of the task.")


def _environment(table: Table, folder: Path) -> Environment:
    place = folder / "environment"
    network, allowed = table.text("network_mode"), table.flag("allow_internet")
    if network not in ("", "public", "no-network", "allowlist"):
        raise table.wrong("network_mode", "public, no-network or allowlist")
    other = [key for key in ("gpus", "tpu", "mcp_servers", "skills_dir") if table.values.get(key)]
    other += [f"environment/{name}" for name in COMPOSE if (place / name).is_file()]
    if table.text("os", "linux") != "linux":
        other.append(f"os = {table.text('os')}")
    image = table.text("docker_image")
    dockerfile = not image and (place / "Dockerfile").is_file()
    return Environment(
        image=image,
        dockerfile=dockerfile,
        files=None if image or dockerfile else _folder(place),
        workdir=table.text("workdir"),
        cpus=table.number("cpus"),
        memory_mb=table.number("memory_mb") if "memory_mb" in table else _size(table, "memory"),
        storage_mb=table.number("storage_mb") if "storage_mb" in table else _size(table, "storage"),
        network=network or ("no-network" if allowed is False else "public"),
        asks_network=bool(network or allowed),
        env=table.strings("env"),
        build_seconds=table.number("build_timeout_sec") or BUILD_SECONDS,
        other=", ".join(other),
    )


def _size(table: Table, key: str) -> float | None:
    """``"2G"`` in MiB."""
    if key not in table:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)i?B?", table.text(key), re.IGNORECASE)
    if match is None:
        raise table.wrong(key, 'a size such as "2G"')
    return float(match[1]) * UNITS[match[2].upper()]


def _health(table: Table) -> Health | None:
    if "healthcheck" not in table:
        return None
    check = table.table("healthcheck")
    if not check.text("command"):
        raise check.wrong("command", "a command")

    def seconds(key: str, default: float) -> float:
        value = check.number(key)
        return default if value is None else value

    return Health(
        check.text("command"), seconds("interval_sec", 5), seconds("timeout_sec", 30), seconds("start_period_sec", 0),
        seconds("start_interval_sec", 5), int(seconds("retries", 3)),
    )  # fmt: skip


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
        if entry.text("service", "main") == "main":
            found.append(Artifact(source, entry.texts("exclude")))
    return tuple(found)


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
    if not any((path / "test.sh").is_file() for path in tests):
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
        separate=any(t.text("environment_mode") == "separate" or "environment" in t for t in (verifier, step_verifier)),
        min_reward={key: bounds.number(key) or 0.0 for key in bounds.values},
        health=_health(own),
        artifacts=_artifacts(top) + _artifacts(own),
    )


def _instruction(path: Path) -> str:
    """Its text without the comments at its top by which copies in training data are told."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    except (OSError, UnicodeDecodeError) as error:
        raise TaskError(f"{path} cannot be read: {error}.") from None
    while lines and (not lines[0].strip() or ("canary" in lines[0].lower() and lines[0].startswith(("#", "<!--")))):
        lines.pop(0)
    return "".join(lines)
