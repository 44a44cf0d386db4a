"""A sandbox in a container of any engine that speaks Docker's API (podman, too).

Owns: `Docker`. Does not know: what runs in it, how an engine isolates.

The container has no network, no capabilities, no new privileges, and limits of memory, processes and CPU; of disk for
each file only, as most engines' storage has no quota. Its first process only waits; each command is an exec of its own.
On an engine of this machine, and as root, a command's processes are a control group below the container's: all of them
end with it, whatever they did. Elsewhere they are told by a variable in their environment, which a program can hide: it
lives until the container is removed. Ports are forwarded in the first case only.

A process that is killed leaves its containers behind; the next one on this machine removes them, by their label.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from docker.errors import APIError, DockerException

from minirllm.errors import SandboxError
from minirllm.sandboxes import BASH, MIB, WORK, Command, Result, Sandbox, Spec, engine, to_end
from minirllm.sandboxes.cgroup import LAST, MOUNT, end, oom_kills
from minirllm.sandboxes.compose import Project
from minirllm.sandboxes.netns import Forward
from minirllm.sandboxes.owner import OWNER, owner
from minirllm.sandboxes.pipes import feed

IMAGE = "python:3.12-slim"  # where none is asked for
MARK = "MINIRLLM_COMMAND"
# it waits until it is where its limits are, and until nobody can have missed its first output
BEGIN = 'read -r _ || exit 125; exec "$@"'
HUNT = """
for round in {1..100}; do
    found=
    for place in /proc/[0-9]*; do
        if grep -qzxF "$1" "$place/environ" 2> /dev/null; then kill -9 "${place#/proc/}"; found=1; fi
    done
    [ "$found" ] || exit 0
done
"""
ROOT = ["CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "SETGID", "SETUID"]  # capabilities, see `Spec.root`
POLL = 0.25  # seconds between questions whether a command that keeps its outputs open has ended
HEARD = 1.0  # seconds within which the engine has heard that a container's first process has ended
BUILDERS = ThreadPoolExecutor(4, "image")


class Docker(Sandbox):
    """See the module. `Spec.image` and `Spec.build` say of what it is made."""

    images = streams = True

    def __init__(self, spec: Spec):
        super().__init__(spec)
        self.api: Any = None
        self.host = self.place()
        self.container = ""
        self.project: Project | None = None  # what runs beside it
        self.pid = 0  # of its first process, as this machine sees it; 0 on another machine, or without root
        self._forward = Forward({})

    async def start(self) -> None:
        """See `Sandbox.start`."""
        self.api = await asyncio.to_thread(engine.client, self.host)
        await asyncio.to_thread(engine.clear, self.api, self.host)
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self.spec.build_seconds):
                image = await loop.run_in_executor(BUILDERS, self._image)
        except TimeoutError:
            raise SandboxError(f"The image was not there within {self.spec.build_seconds:.3g} s.") from None
        await to_end(self._make if self.spec.compose is None else self._compose, image)
        if self.spec.forward and not self.pid:
            raise SandboxError("Ports are forwarded only by root into containers of an engine on this machine.")

    def _image(self) -> str:
        if self.spec.compose and self.spec.snapshot is None and not (self.spec.build or self.spec.image):
            return ""  # the file says which
        return engine.image(self.api, self.spec.snapshot, self.spec.build, self.spec.image or IMAGE)

    def _compose(self, image: str) -> None:
        self.project = Project(self.api, self.host, self.spec)
        self.container = self.project.up(image, ROOT)
        self._run()

    def _make(self, image: str) -> None:
        limits = self.spec.limits
        with engine.told("The container cannot be started"):
            self.work = engine.folder(self.api, image) or WORK
            host = self.api.create_host_config(
                init=True, network_mode="none", cap_drop=["ALL"], cap_add=ROOT if self.spec.root else [],
                security_opt=["no-new-privileges"], mem_limit=limits.memory, memswap_limit=limits.memory,
                pids_limit=limits.processes + 1, nano_cpus=int(limits.cpus * 1e9), shm_size=64 * MIB,
                binds={source: {"bind": place, "mode": "ro"} for source, place in self.spec.binds.items()},
                ulimits=[{"Name": name, "Soft": n, "Hard": n} for name, n in (("fsize", limits.disk), ("core", 0))],
            )  # fmt: skip
            self.container = self.api.create_container(
                image, entrypoint=[BASH, "-c", "exec sleep infinity"], command=[], host_config=host,
                working_dir=self.work, labels={OWNER: owner()}, hostname="sandbox",
            )["Id"]  # fmt: skip
        self._run()

    def _run(self) -> None:
        """Start the container, or start it again: a program can end all others in it."""
        with engine.told("The container cannot be started"):
            self.api.start(self.container)
        self._found()

    def _found(self) -> None:
        with engine.told("The container cannot be started"):
            state = self.api.inspect_container(self.container)
        self.work = state["Config"].get("WorkingDir") or "/"
        pid = state["State"]["Pid"]
        self.pid = pid if os.geteuid() == 0 and self._group(pid) else 0

    async def close(self) -> None:
        """See `Sandbox.close`."""
        try:
            await self._forward.close()
        finally:
            container, self.container = self.container, ""
            if self.api is not None:
                await to_end(self._remove, self.api, container)

    def _remove(self, api: Any, container: str) -> None:
        try:
            if self.project is not None:
                self.project.down()
            elif container:
                engine.remove(api, container)
        finally:
            api.close()
            self.api = None

    async def snapshot(self) -> str:
        """See `Sandbox.snapshot`. Its image has the label minirllm.snapshot."""

        def commit() -> str:
            with engine.told("The snapshot cannot be kept"):
                kept: str = self.api.commit(self.container, changes=[f"LABEL {engine.SNAPSHOT}=1"])["Id"]
                return kept

        return await asyncio.to_thread(commit)

    async def service(self, name: str) -> Sandbox:
        """See `Sandbox.service`."""
        if self.project is None:
            return await super().service(name)
        beside = Docker(replace(self.spec, compose=None, forward={}, env={}))
        beside.api = self.api
        beside.container = await asyncio.to_thread(self.project.container, name)
        await asyncio.to_thread(beside._found)
        return beside

    async def halt(self) -> None:
        """See `Sandbox.halt`."""

        def kill() -> None:
            with contextlib.suppress(APIError):  # it has ended
                self.api.kill(self.container)

        await asyncio.to_thread(kill)

    @classmethod
    def check(cls) -> None:
        """See `Sandbox.check`."""
        engine.client(cls.place()).close()

    @classmethod
    def place(cls) -> str:
        """See `Sandbox.place`."""
        return os.environ.get("DOCKER_HOST") or "unix:///var/run/docker.sock"

    @classmethod
    async def weigh(cls, id: str) -> int:
        """See `Sandbox.weigh`: what it adds to its image."""
        return await asyncio.to_thread(engine.weigh, cls.place(), id)

    @classmethod
    async def forget(cls, id: str) -> None:
        """See `Sandbox.forget`."""
        await asyncio.to_thread(engine.forget, cls.place(), id)

    @property
    def running(self) -> bool:
        """See `Sandbox.running`."""
        return bool(self.container)

    @classmethod
    def users(cls) -> None:
        """See `Sandbox.users`."""
        return None

    @property
    def superuser(self) -> str | None:
        """See `Sandbox.superuser`."""
        return "0" if self.spec.root else None

    async def carry_out(self, command: Command) -> Result:
        """See `Sandbox.carry_out`."""
        call = _Call(self, command, uuid.uuid4().hex)
        try:
            return await self._call(call)
        except SandboxError:
            if call.begun or not await asyncio.to_thread(self._ends):
                raise
        return await self._call(_Call(self, command, uuid.uuid4().hex))

    async def _call(self, call: _Call) -> Result:
        await asyncio.to_thread(self._revive)
        if self._forward.ports != self.spec.forward:
            await self._forward.close()
            self._forward = Forward(self.spec.forward)
            await self._forward.open(self.pid)
        try:
            await asyncio.to_thread(call.create)
            return await call.run()
        finally:
            await asyncio.shield(asyncio.to_thread(call.end))
            call.close()

    def _revive(self) -> None:
        """Files outlive the container's first process, which any program in it can end."""
        with engine.told("The container is gone"):
            alive = self.api.inspect_container(self.container)["State"]["Running"]
        if not alive:
            self._forward.ports = {}  # they were in a network that is no more
            self._run()

    def _ends(self) -> bool:
        """Is its first process just ending? The command before may have ended all that runs in it."""
        until = time.monotonic() + HEARD
        while running := self.api.inspect_container(self.container)["State"]["Running"]:
            if time.monotonic() > until:
                break
            time.sleep(0.02)
        return not running

    def _group(self, pid: int, controller: str = "pids") -> Path | None:
        """The control group of a process of the container; None where it is not on this machine."""
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
                _, names, path = line.split(":", 2)
                if self.container in path and (controller in names.split(",") or not names):
                    place = MOUNT / (controller if names else "") / path.lstrip("/")
                    return place if place.exists() else None
        return None

    def _oom_kills(self) -> int:
        """How often the kernel has ended a process for want of memory, as far as that is known."""
        if group := self._group(self.pid, "memory") if self.pid else None:
            return oom_kills(group)
        return int(self.api.inspect_container(self.container)["State"]["OOMKilled"])


class _Call:
    """One command: an exec, the connection to it, and the group of its processes. What is not async may block."""

    def __init__(self, box: Docker, command: Command, mark: str):
        self.box, self.api, self.command, self.mark = box, box.api, command, mark
        self.id = ""
        self.group: Path | None = None
        self.writer: asyncio.StreamWriter | None = None
        self.oom_kills, self.over = 0, False
        self.begun = False  # it runs, or has

    def create(self) -> None:
        """Prepare it."""
        variables = {**self.command.env, MARK: self.mark}
        with engine.told("The command cannot be started"):
            self.oom_kills = self.box._oom_kills()
            self.id = self.api.exec_create(
                self.box.container, [BASH, "-c", BEGIN, "_", *self.command.argv], stdin=True,
                environment=[f"{name}={value}" for name, value in variables.items()],
                workdir=self.command.cwd or self.box.work, user=self.command.user or "",
            )["Id"]  # fmt: skip

    async def run(self) -> Result:
        """Until it has ended, or must be."""
        reader, self.writer = await engine.attach(self.box.host, self.id)
        outputs = self.command.outputs()
        reading = asyncio.ensure_future(engine.collect(reader, outputs))
        if not await asyncio.to_thread(self._placed):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(reading, LAST)
            said = b"".join(map(bytes, outputs)).decode(errors="replace").strip()
            raise SandboxError(f"The command cannot be started: {said[-300:]}.")
        self.begun = True
        feeding = asyncio.ensure_future(self._feed(self.writer))
        watching = asyncio.ensure_future(self._watch(reading))
        timed_out = False
        try:
            async with asyncio.timeout(self.command.timeout):
                await asyncio.wait({watching, reading}, return_when=asyncio.FIRST_COMPLETED)
                if not (reading.done() and reading.result()):
                    await watching
        except TimeoutError:
            timed_out = True
        finally:
            feeding.cancel()
            watching.cancel()
            if reading.done():
                self.close()  # nobody reads the rest, which would keep the engine waiting
            await asyncio.shield(asyncio.to_thread(self.end))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(reading, LAST)
            await asyncio.gather(feeding, watching, reading, return_exceptions=True)
        flooded = reading.done() and not reading.cancelled() and reading.result()
        kept = [*map(bytes, outputs)]
        code, oom = await asyncio.to_thread(self._ended)
        return Result(kept[0], kept[1], 137 if timed_out or flooded else code, timed_out, oom, flooded)

    async def _feed(self, writer: asyncio.StreamWriter) -> None:
        writer.write(b"go\n")
        await feed(writer, self.command.stdin)

    def _placed(self) -> bool:
        """Once it has a process, put that where it can be ended with all its children. False: it has none."""
        with engine.told("The command cannot be started"):
            until = time.monotonic() + LAST
            while time.monotonic() < until:
                state = self.api.exec_inspect(self.id)
                if state["Running"] and state["Pid"]:
                    break
                if state["ExitCode"] is not None and not state["Running"]:
                    return False
                time.sleep(0.005)
            else:
                return False
            if self.box.pid and (above := self.box._group(state["Pid"])):
                self.group = above / f"command-{self.mark}"
                self.group.mkdir()
                (self.group / "cgroup.procs").write_text(str(state["Pid"]))
            return True

    async def _watch(self, reading: asyncio.Future[bool]) -> None:
        """Until its first process has ended; one that closes its outputs may go on."""
        while await asyncio.to_thread(lambda: self.api.exec_inspect(self.id)["Running"]):
            if reading.done():
                await asyncio.sleep(0.02)
            else:
                await asyncio.wait({reading}, timeout=POLL)

    def end(self) -> None:
        """Kill what the command started and wait until it is gone."""
        over, self.over = self.over, True
        if self.group is not None:
            end(self.group)
        elif self.id and not over:
            with contextlib.suppress(DockerException):
                argv = [BASH, "-c", HUNT, "_", f"{MARK}={self.mark}"]
                hunt = self.api.exec_create(self.box.container, argv, user=self.command.user or "")
                self.api.exec_start(hunt["Id"])

    def _ended(self) -> tuple[int, bool]:
        """Its exit code, and whether memory was short."""
        with engine.told("The command's end is not known"):
            until = time.monotonic() + LAST
            while (state := self.api.exec_inspect(self.id))["Running"] and time.monotonic() < until:
                time.sleep(0.01)
            code = state["ExitCode"]
            return 137 if code is None else code, self.box._oom_kills() > self.oom_kills

    def close(self) -> None:
        """Let go of the connection, and of what it still holds."""
        if self.writer is not None:
            self.writer.transport.abort()
