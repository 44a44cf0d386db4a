"""What a Harbor task runs in, as ``[environment]`` and ``[verifier.environment]`` say it.

Owns: `Environment`, `Health`, `Server`, their reading, and values that are variables of this process. Does not know:
sandboxes, steps, how anything is run.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from minirllm.errors import TaskError
from minirllm.harbor.toml import MOST, Table

UNITS = {"K": 1 / 1024, "M": 1.0, "G": 1024.0}  # in MiB
TEMPLATE = re.compile(r"\$\{(\w+)(?::-(.*?))?\}", re.DOTALL)
COMPOSE = ("docker-compose.yaml", "docker-compose.yml")
NETWORKS = ("public", "no-network", "allowlist")
TRANSPORTS = {"stdio": "stdio", "sse": "sse", "streamable-http": "http", "http": "http"}
BUILD_SECONDS = 600.0


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
class Environment:
    """See the module. None: the sandbox's own default."""

    image: str = ""
    build: Path | None = None  # a folder with a Dockerfile
    compose: Path | None = None  # a Compose file: the environment is its service `main`
    files: Path | None = None  # where there is neither: they are laid into the working folder
    workdir: str = ""
    cpus: float | None = None
    memory_mb: float | None = None
    storage_mb: float | None = None
    network: str = "public"  # or another of NETWORKS
    asks_network: bool = False  # it says so itself
    env: Mapping[str, str] = field(default_factory=dict)
    build_seconds: float = BUILD_SECONDS
    servers: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # of MCP, as in an ``mcpServers`` of JSON
    skills: str = ""  # a folder inside
    other: str = ""  # what else it needs, which nothing here has

    @property
    def made_of(self) -> str:
        """What only sandboxes with images can start from; empty when any will do."""
        if self.compose is not None:
            return f"{self.compose.parent.name}/{self.compose.name}"
        if self.image:
            return f"the image {self.image}"
        return f"{self.build.name}/Dockerfile" if self.build else ""


def defines(place: Path) -> bool:
    """Is an environment of its own described in this folder?"""
    return any((place / name).is_file() for name in ("Dockerfile", *COMPOSE))


def environment(table: Table, place: Path, image: str) -> Environment:
    """What `table` says, with this image, or else what lies in `place`. Raises TaskError."""
    allowed = table.flag("allow_internet")
    mode = network(table) or ("" if allowed is None else "public" if allowed else "no-network")
    other = [key for key in ("gpus", "tpu") if table.values.get(key)]
    if table.text("os", "linux") != "linux":
        other.append(f"os = {table.text('os')}")
    build = place if not image and (place / "Dockerfile").is_file() else None
    workdir = table.text("workdir")
    if workdir and not workdir.startswith("/"):
        raise table.wrong("workdir", "an absolute path")
    compose = next((place / name for name in COMPOSE if (place / name).is_file()), None)
    return Environment(
        image=image,
        build=build,
        compose=compose,
        files=place if not (image or build or compose) and place.is_dir() else None,
        workdir=workdir,
        cpus=table.number("cpus"),
        memory_mb=_size(table, "memory"),
        storage_mb=_size(table, "storage"),
        network=mode or "public",
        asks_network=bool(mode),
        env=table.strings("env"),
        build_seconds=table.number("build_timeout_sec") or BUILD_SECONDS,
        servers=dict(_server(row) for row in table.tables("mcp_servers")),
        skills=table.text("skills_dir"),
        other=", ".join(other),
    )


def network(table: Table) -> str:
    """The network that an environment or a phase asks for; empty where it says nothing."""
    mode = table.text("network_mode")
    if mode not in ("", *NETWORKS):
        raise table.wrong("network_mode", "public, no-network or allowlist")
    if table.texts("allowed_hosts") and mode != "allowlist":
        raise table.wrong("allowed_hosts", 'given with network_mode = "allowlist" only')
    return mode


def health(table: Table) -> Health | None:
    """The check that a table describes, if any."""
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


def resolved(env: Mapping[str, str], where: str) -> dict[str, str]:
    """Values that are ``${NAME}`` or ``${NAME:-default}`` are this process's variable. Raises TaskError without one."""
    return {key: _given(value, f"{where}: {key}") if TEMPLATE.fullmatch(value) else value for key, value in env.items()}


def connected(servers: Mapping[str, Mapping[str, Any]], where: str) -> dict[str, dict[str, Any]]:
    """MCP servers whose headers may name variables of this process, ``Bearer ${TOKEN}`` say. Raises TaskError."""
    found = {name: dict(server) for name, server in servers.items()}
    for name, server in found.items():
        if headers := server.get("headers"):
            server["headers"] = {key: _given(value, f"{where}: {name}, {key}") for key, value in headers.items()}
    return found


def _given(text: str, where: str) -> str:
    def value(match: re.Match[str]) -> str:
        given = os.environ.get(match[1], match[2])
        if given is None:
            raise TaskError(f"{where} is {text}, and there is no environment variable {match[1]}.")
        return given

    return TEMPLATE.sub(value, text)


def _server(row: Table) -> tuple[str, dict[str, Any]]:
    name, transport = row.text("name"), row.text("transport", "sse")
    if not name:
        raise row.wrong("name", "a name")
    if transport not in TRANSPORTS:
        raise row.wrong("transport", "sse, streamable-http or stdio")
    key = "command" if transport == "stdio" else "url"
    if not row.text(key):
        raise row.wrong(key, f"given for the transport {transport}")
    server: dict[str, Any] = {"type": TRANSPORTS[transport], key: row.text(key)}
    more = {"args": list(row.texts("args"))} if transport == "stdio" else {"headers": row.strings("headers")}
    return name, server | {key: value for key, value in more.items() if value}


def _size(table: Table, key: str) -> float | None:
    """In MiB: of ``key_mb``, or of ``key``, its older name, as in ``"2G"``. Where both are there they must agree."""
    given = table.number(f"{key}_mb")
    if key not in table:
        return given
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)([KMG])\s*", table.text(key), re.IGNORECASE)
    if match is None:
        raise table.wrong(key, 'a size such as "2G", "512M" or "4096K"')
    size = float(match[1]) * UNITS[match[2].upper()]
    if size > MOST:
        raise table.wrong(key, f"at most {MOST:g} MiB")
    size = float(int(size))
    if given not in (None, size):
        raise table.wrong(key, f"the same as {key}_mb, {given:g}")
    return size
