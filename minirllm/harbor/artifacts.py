"""What is kept of an agent's work: files out of its sandbox and of the services beside it, and into a verifier's.

Owns: `collect` (hooks, then files, below a folder out here at their own paths), the manifest, `put_back`. Does not
know: agents, rewards.

``/logs/artifacts`` is always among them. What cannot be had is no failure of the trial: the manifest says so. Of two
that would lie in one place the first is kept. Services come last, when nothing of the agent's runs any more.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import Any

from minirllm.errors import SandboxError
from minirllm.harbor.grading import script
from minirllm.harbor.task import MAIN, Artifact, Hook, Step
from minirllm.sandboxes import BASH, Sandbox
from minirllm.sandboxes.place import read_files

logger = logging.getLogger(__name__)

ALWAYS = "/logs/artifacts"
PROBE = 'if test -d "$1"; then echo d; else test -f "$1" && stat -L -c %a -- "$1"; fi'
EMPTY = 'if test -d "$1"; then find "$1" -mindepth 1 -delete; else rm -f -- "$1"; mkdir -p -- "$1"; fi; chmod 777 "$1"'


async def collect(box: Sandbox, step: Step, cwd: str, folder: Path, over: bool) -> list[dict[str, Any]]:
    """Run the step's hooks and copy its artifacts to `folder`. Returns the manifest. With `over` nothing will be run in
    the agent's sandbox after that."""
    wanted = [replace(each, source=str(PurePosixPath(cwd) / each.source)) for each in step.artifacts]
    if not any(each.source == ALWAYS and each.service == MAIN for each in wanted):
        wanted.insert(0, Artifact(ALWAYS))
    manifest: list[dict[str, Any]] = []
    named = [*(hook.service for hook in step.collect), *(artifact.service for artifact in wanted)]
    for service in dict.fromkeys([MAIN, *named]):
        if service != MAIN and over:
            await box.halt()
        place = box
        try:
            place = place if service == MAIN else await box.service(service)
        except SandboxError as error:
            logger.warning("nothing is kept of the service %s: %s", service, error)
        else:
            await _run([hook for hook in step.collect if hook.service == service], place)
        for artifact in wanted:
            if artifact.service == service:
                manifest.append(await _copied(place, artifact, folder, manifest))
    return manifest


async def _run(hooks: Sequence[Hook], place: Sandbox) -> None:
    for hook in hooks:
        try:
            done = await place.run(hook.command, timeout=hook.timeout, user=hook.user)
            failure = f"exit code {done.exit_code}: {done.stderr.strip()[-200:]}" if done.exit_code else ""
        except SandboxError as error:
            failure = str(error)
        if failure:
            logger.warning("the collect hook %.80r failed: %s", hook.command, failure[:300])


async def _copied(
    place: Sandbox, artifact: Artifact, folder: Path, before: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Copy one, and say in the words of the manifest how that went."""
    relative = artifact.destination or artifact.source.lstrip("/") or "."
    entry: dict[str, Any] = {
        "source": artifact.source, "destination": PurePosixPath("artifacts", relative).as_posix(), "type": "directory",
        "status": "ok", "service": None if artifact.service == MAIN else artifact.service,
        "exclude": list(artifact.exclude),
    }  # fmt: skip
    own = PurePosixPath(entry["destination"])
    for other in (PurePosixPath(each["destination"]) for each in before if each["status"] == "ok"):
        if own.is_relative_to(other) or other.is_relative_to(own):
            return entry | {"status": "skipped"}
    target = folder / relative
    try:
        mode = await _said(place, PROBE, artifact.source)
        await asyncio.to_thread(target.parent.mkdir, parents=True, exist_ok=True)
        if mode == "d":
            await place.download(artifact.source, target)
            await asyncio.to_thread(_exclude, target, artifact.exclude)
            return entry | {"status": "ok" if await asyncio.to_thread(_full, target) else "empty"}
        data = await place.read(artifact.source)
        await asyncio.to_thread(_write, target, data, int(mode, 8) & 0o777)
        return entry | {"type": "file", "exclude": []}
    except (SandboxError, OSError, ValueError) as error:  # ValueError: an agent may have another stat in its place
        logger.debug("the artifact %s cannot be kept: %s", artifact.source, error)
        return entry | {"status": "failed"}


async def _said(box: Sandbox, text: str, path: str) -> str:
    """What a line of bash prints, of which $1 is `path`. Raises SandboxError when it fails."""
    done = await box.execute((BASH, "-c", text, "_", path), timeout=60.0, cwd="/", user=box.superuser)
    if done.exit_code:
        raise SandboxError(f"there is no {path}")
    return done.stdout.strip()


def _write(target: Path, data: bytes, mode: int) -> None:
    target.write_bytes(data)
    target.chmod(mode | 0o600)


def _full(folder: Path) -> bool:
    return any(folder.iterdir())


def _exclude(folder: Path, patterns: Sequence[str]) -> None:
    """Remove what matches, by its path or by one of its names."""
    for path in sorted(folder.rglob("*")) if patterns else ():
        name = path.relative_to(folder)
        if any(fnmatch(part, pattern) for pattern in patterns for part in (name.as_posix(), path.name)):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


def texts(folder: Path, manifest: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """The text files that were kept, by their paths in the sandbox, or where their artifact has its destination."""
    moved = [
        PurePosixPath(each["destination"]).relative_to("artifacts")
        for each in manifest
        if each["destination"] != f"artifacts{each['source']}"
    ]
    found, _ = read_files(folder)
    return {
        name if any(PurePosixPath(name).is_relative_to(place) for place in moved) else f"/{name}": text
        for name, text in found.items()
    }


async def put_back(box: Sandbox, folder: Path, manifest: Sequence[Mapping[str, Any]]) -> None:
    """Copy what was kept into another sandbox, each to the path that it had. Raises SandboxError."""
    for entry in manifest:
        if entry["status"] not in ("ok", "empty"):
            continue
        kept = folder / PurePosixPath(entry["destination"]).relative_to("artifacts")
        if entry["type"] == "directory":
            await script(box, EMPTY, entry["source"])
            await box.upload(kept, entry["source"])
        else:
            mode = (await asyncio.to_thread(kept.stat)).st_mode & 0o777
            await box.write(entry["source"], await asyncio.to_thread(kept.read_bytes), mode)
