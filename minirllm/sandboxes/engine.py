"""Talking to a Docker engine: its client, an exec's raw connection, images, and whose containers are left behind.

Owns: those. Does not know: sandboxes, commands.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import socket
import struct
import threading
from collections import defaultdict
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from types import MappingProxyType
from typing import Any

import docker
from docker.errors import APIError, DockerException, NotFound

from minirllm.errors import SandboxError
from minirllm.sandboxes import NoSnapshot
from minirllm.sandboxes.owner import OWNER, orphaned
from minirllm.sandboxes.pipes import Kept
from minirllm.sandboxes.trees import digest

SNAPSHOT = "minirllm.snapshot"  # a label
_building: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)
_cleared: set[str] = set()  # engines whose orphans are gone


async def attach(host: str, id: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Start an exec, and become its input and outputs: the connection is no HTTP any more."""
    try:
        if host.startswith("unix://"):
            reader, writer = await asyncio.open_unix_connection(host.removeprefix("unix://"))
        elif (match := re.fullmatch(r"(?:tcp|http)://(.+):(\d+)/?", host)) and not os.environ.get("DOCKER_TLS_VERIFY"):
            reader, writer = await asyncio.open_connection(match[1], int(match[2]))
        else:
            raise SandboxError(f"The engine at {host} cannot be used: only unix:// and plain tcp:// sockets.")
        body = json.dumps({"Detach": False, "Tty": False})
        writer.write(
            f"POST /exec/{id}/start HTTP/1.1\r\nHost: docker\r\nConnection: Upgrade\r\nUpgrade: tcp\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()
        )
        head = (await reader.readuntil(b"\r\n\r\n")).decode(errors="replace")
    except (OSError, asyncio.IncompleteReadError) as error:
        raise SandboxError(f"The engine does not answer: {error}.") from None
    if " 101 " not in head.splitlines()[0] and " 200 " not in head.splitlines()[0]:
        said = (await reader.read(2000)).decode(errors="replace")
        writer.close()
        raise SandboxError(f"The command cannot be started: {said.strip()[-300:]}.")
    return reader, writer


async def collect(reader: asyncio.StreamReader, outputs: tuple[Kept, Kept]) -> bool:
    """Read both outputs until they end, or one is over its limit: True."""
    with contextlib.suppress(asyncio.IncompleteReadError, OSError):
        while True:
            stream, size = struct.unpack(">BxxxL", await reader.readexactly(8))
            while size > 0:
                piece = await reader.readexactly(min(size, 2**16))
                size -= len(piece)
                if not await outputs[stream == 2].take(piece):
                    return True
    return False


class told(contextlib.AbstractContextManager[None]):
    """What the engine says of a failure becomes a SandboxError."""

    def __init__(self, what: str):
        self.what = what

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, DockerException | OSError):
            said = getattr(error, "explanation", None) or str(error)
            raise SandboxError(f"{self.what}: {' '.join(str(said).split())[-500:]}.") from None


def client(host: str) -> Any:
    try:
        if host.startswith("unix://"):
            with socket.socket(socket.AF_UNIX) as tried:  # the package leaves one open where nobody answers
                tried.connect(host.removeprefix("unix://"))
        return docker.from_env(version="auto", timeout=120).api
    except (DockerException, OSError) as error:
        said = " ".join(str(error).split())[:200]
        raise SandboxError(f"No Docker engine answers at {host}: start one, or set DOCKER_HOST ({said}).") from None


def image(api: Any, snapshot: str | None, build: Path | None, name: str) -> str:
    """The image of a snapshot, else built of a folder, else of this name, fetched if need be."""
    with told("The image cannot be had"):
        if snapshot is not None:
            with contextlib.suppress(APIError, ValueError):
                if snapshot and (api.inspect_image(snapshot)["Config"].get("Labels") or {}).get(SNAPSHOT):
                    return snapshot
            raise NoSnapshot(f"There is no docker snapshot {snapshot!r}.")
        if build is not None:
            return built(api, build)
        try:
            api.inspect_image(name)
        except NotFound:
            api.pull(*(name.rsplit(":", 1) if ":" in name.rpartition("/")[2] else (name, "latest")))
        return name


def folder(api: Any, image: str) -> str:
    """Where an image's commands begin; empty where it does not say."""
    with told("The image cannot be had"):
        return str(api.inspect_image(image)["Config"].get("WorkingDir") or "")


def built(
    api: Any,
    context: Path,
    dockerfile: str = "Dockerfile",
    args: Mapping[str, str] = MappingProxyType({}),
    target: str | None = None,
) -> str:
    """The image of a folder with a Dockerfile, by a name that only these files have. Built once."""
    if not context.is_dir():
        raise SandboxError(f"{context} is no folder: no image can be built of it.")
    state = sha256(json.dumps([dockerfile, dict(args), target, digest(context)]).encode())
    name = f"minirllm/build:{state.hexdigest()[:24]}"
    with _building[name]:
        with contextlib.suppress(NotFound):
            api.inspect_image(name)
            return name
        said = ""
        for line in api.build(
            path=str(context), dockerfile=dockerfile, buildargs=dict(args), target=target or "", tag=name, rm=True,
            forcerm=True, decode=True,
        ):  # fmt: skip
            if "error" in line:
                why = f"{line['error'].strip()}. {said.strip()[-300:]}"
                raise SandboxError(f"{context}/{dockerfile} cannot be built: {why}")
            said += line.get("stream", "")
    return name


def clear(api: Any, host: str) -> None:
    """Remove the containers of processes of this machine that are no more. Once for each engine."""
    if host in _cleared:
        return
    _cleared.add(host)
    with told("What is left on the engine cannot be listed"):
        filters = {"label": OWNER}
        networks, volumes = api.networks(filters=filters), api.volumes(filters=filters)["Volumes"] or []
        owners = {found["Labels"][OWNER] for found in (*api.containers(all=True, filters=filters), *networks, *volumes)}
    for owner in owners:
        if orphaned(owner):
            remove_all(api, [f"{OWNER}={owner}"])


def remove(api: Any, container: str) -> None:
    with told("The container cannot be removed"), contextlib.suppress(NotFound):
        api.remove_container(container, force=True, v=True)


def remove_all(api: Any, labels: list[str]) -> None:
    """All containers, networks and volumes with these labels."""
    filters = {"label": labels}
    with told("What is left on the engine cannot be removed"):
        for found in api.containers(all=True, filters=filters):
            remove(api, found["Id"])
        for found in api.networks(filters=filters):
            with contextlib.suppress(NotFound):
                api.remove_network(found["Id"])
        for found in api.volumes(filters=filters)["Volumes"] or []:
            with contextlib.suppress(NotFound):
                api.remove_volume(found["Name"], force=True)


def weigh(host: str, id: str) -> int:
    """Bytes of a snapshot's own layer."""
    with contextlib.closing(client(host)) as api, told("The snapshot cannot be weighed"):
        return int(api.history(id)[0]["Size"])


def forget(host: str, id: str) -> None:
    """Remove a snapshot's image, unless it is gone."""
    with contextlib.closing(client(host)) as api, told("The snapshot cannot be removed"), contextlib.suppress(NotFound):
        api.remove_image(id)
