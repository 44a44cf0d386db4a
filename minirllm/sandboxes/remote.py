"""A sandbox on a machine of a provider: all that is needed is to make it, run a line of bash, move a file, remove it.

Owns: `Remote`: how commands are carried out there, what is asked again when the provider is busy, what such a sandbox
cannot do. Does not know: any provider.

The machine has no network. It lives for `Spec.lifetime` at most, so that the provider removes what this process loses;
what a killed process left is removed by the next one on this machine, by its label.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from minirllm.errors import SandboxError
from minirllm.sandboxes import BASH, WORK, Command, Result, Sandbox, Spec, supervisor
from minirllm.sandboxes.owner import OWNER, orphaned, owner

logger = logging.getLogger(__name__)

T = TypeVar("T")
REFUSED = {
    "forward": "no port of this machine is seen there; give agent programs --sandbox docker, or local",
    "binds": "no file of this machine is seen there; give agent programs --sandbox docker, or local",
    "compose": "there are no services beside it; take docker",
}
IMAGE = "python:3.12-slim"  # where none is asked for
MACHINE = "minirllm.machine"  # the label by which a machine is found whose making was not heard of
PAUSES = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0)  # seconds between the tries of one call
STRANGE = 5  # answers in a row that say nothing of a command
GRACE = 30.0  # seconds by which the end of a command may come late
WORKDIR = f'[ "$PWD" = / ] && mkdir -p {WORK} 2> /dev/null && cd {WORK}; [ "$PWD" = / ] && cd; echo "at $PWD"'
_cleared: set[str] = set()  # kinds whose orphans are gone


class Remote(Sandbox):
    """What is left to a provider: its calls, and which of its errors pass."""

    images = True
    doors = False
    name: str  # in SANDBOXES
    patience: float  # seconds that one call may take while a command runs
    errors: tuple[type[Exception], ...]  # that its package raises

    def __init__(self, spec: Spec):
        super().__init__(spec)
        self.mark = uuid.uuid4().hex
        self.machine = ""  # its id; empty while it may be there and was not heard of
        self.labels = {MACHINE: self.mark}  # of the machine
        self._open = self._connected = False
        self._done: list[str] = []  # commands whose folders are to be removed

    @abstractmethod
    async def connect(self) -> None:
        """Be ready for calls. Raises SandboxError when there is no account."""

    @abstractmethod
    async def disconnect(self) -> None:
        """The opposite of `connect`."""

    @abstractmethod
    async def make(self) -> str:
        """Make the machine. Returns its id."""

    @abstractmethod
    async def bash(self, argv: list[str], seconds: float) -> str:
        """Run a command line, without single quotes in it, and say what it printed. It may end after `seconds`."""

    @abstractmethod
    async def put(self, path: str, data: bytes) -> None:
        """Write a file."""

    @abstractmethod
    async def take(self, path: str) -> bytes:
        """Read a file."""

    @abstractmethod
    async def keep(self) -> str:
        """Keep the files, and say under which id."""

    @abstractmethod
    async def drop(self, snapshot: str) -> None:
        """Remove a snapshot by its id, if it is still there."""

    @abstractmethod
    async def machines(self, label: str) -> list[tuple[str, str]]:
        """All machines that have this label: their ids, and the label's values."""

    @abstractmethod
    async def remove(self, machine: str) -> None:
        """Remove a machine by its id, if it is still there."""

    @abstractmethod
    def judged(self, error: Exception) -> tuple[str, float | None]:
        """What one of `errors` says, and the least seconds after which to ask again; None: it will not pass."""

    async def start(self) -> None:
        """See `Sandbox.start`."""
        for option, what in REFUSED.items():
            if getattr(self.spec, option):
                raise SandboxError(f"{self.name} runs elsewhere, so there is no Spec.{option}: {what}.")
        self.labels[OWNER] = await asyncio.to_thread(owner)
        await self.connect()
        self._connected = True
        await self._clear()
        self._open = True
        try:
            async with asyncio.timeout(self.spec.build_seconds):
                self.machine = await self.asked("The machine cannot be had", self.make)
        except TimeoutError:
            raise SandboxError(f"The machine was not there within {self.spec.build_seconds:.3g} s.") from None
        said = await self.asked("The machine runs nothing", self.bash, [BASH, "-c", WORKDIR], GRACE)
        self.work = said.partition("at ")[2].strip()
        if not self.work.startswith("/"):
            raise SandboxError(f"The image has no {BASH}, by which commands are run: {said.strip()[-300:]}.")

    async def _clear(self) -> None:
        """Remove what killed processes of this machine left there. Once for each provider."""
        if self.name not in _cleared:
            _cleared.add(self.name)
            for machine, label in await self.asked("The machines cannot be listed", self.machines, OWNER):
                if await asyncio.to_thread(orphaned, label):
                    await self.asked("A machine cannot be removed", self.remove, machine)

    async def close(self) -> None:
        """See `Sandbox.close`. What cannot be removed now, the provider removes by itself."""
        opened, self._open = self._open, False
        try:
            if opened and self.machine:
                await self.asked("The machine cannot be removed", self.remove, self.machine)
            elif opened:
                for machine, label in await self.asked("The machines cannot be listed", self.machines, MACHINE):
                    if label == self.mark:
                        await self.asked("The machine cannot be removed", self.remove, machine)
        except SandboxError as error:
            logger.warning("%s (it ends within %.3g s of its start)", error, self.spec.lifetime)
        finally:
            if self._connected:
                self._connected = False
                await self.disconnect()

    @property
    def running(self) -> bool:
        """See `Sandbox.running`."""
        return self._open

    async def snapshot(self) -> str:
        """See `Sandbox.snapshot`."""
        await self._said(supervisor.CLEAN, "0", 0.0, (), self._done)
        return await self.asked("The snapshot cannot be kept", self.keep)

    @classmethod
    async def forget(cls, id: str) -> None:
        """See `Sandbox.forget`."""
        one = cls(Spec())
        await one.connect()
        try:
            await one.asked("The snapshot cannot be removed", one.drop, id)
        finally:
            await one.disconnect()

    async def carry_out(self, command: Command) -> Result:
        """See `Sandbox.carry_out`."""
        id = uuid.uuid4().hex
        done, self._done = self._done, []
        try:
            report = await self._ended(id, command, done)
            outputs = report.outputs or [
                await self.asked("An output cannot be had", self.take, f"{supervisor.PLACE}{id}/out{stream}")
                for stream in (1, 2)
            ]
        except (SandboxError, asyncio.CancelledError):
            await asyncio.shield(self._end(id))
            raise
        finally:
            self._done.append(id)
        if report.code == supervisor.NO_FOLDER:
            if command.cwd is not None:
                raise SandboxError(f"The command cannot be started: {outputs[1].decode(errors='replace').strip()}.")
            return Result(b"", outputs[1], 125)
        out, err = (output[: command.output] for output in outputs)
        code = 137 if report.late or report.flooded else report.code
        return Result(out, err, code, report.late, report.oom, report.flooded and not report.late)

    async def _ended(self, id: str, command: Command, done: list[str]) -> supervisor.Report:
        """Begin the command, and wait for its end."""
        assert isinstance(command.stdin, bytes), "it does not stream"
        sent: tuple[bytes, ...] = (supervisor.job(command, self.work, self.spec.limits.disk), command.stdin)
        if sum(map(len, sent)) > supervisor.INLINE:
            for name, data in zip(("job", "in"), sent, strict=True):
                await self.asked("The input cannot be sent", self.put, f"{supervisor.PLACE}{id}.{name}", data)
            sent = ()
        mode, until, strange = supervisor.BEGIN, time.monotonic() + command.timeout + GRACE, 0
        said = ""
        while (left := until - time.monotonic()) > 0 and strange < STRANGE:
            said = await self._said(mode, id, min(self.patience, left), sent, done)
            if (report := supervisor.read(said, id)) is not None:
                return report
            if not supervisor.running(said, id):  # a program may have ended all others, the script's, too
                strange += 1
                await asyncio.sleep(1.0)
            mode, sent = supervisor.WAIT, ()
        raise SandboxError(f"{self.name} does not say how a command ended: {said.strip()[-300:]}.")

    async def _said(
        self, mode: str, id: str, patience: float, sent: tuple[bytes, ...] = (), done: Sequence[str] = ()
    ) -> str:
        line = supervisor.line(mode, id, patience, sent, done)
        return await self.asked("A command cannot be run", self.bash, line, patience + GRACE)

    async def _end(self, id: str) -> None:
        """Kill what the command has started, also if it has not begun yet."""
        with contextlib.suppress(SandboxError, TimeoutError):
            async with asyncio.timeout(GRACE):
                await self._said(supervisor.END, id, 0.0)

    async def called(self, call: Callable[..., Awaitable[T]], *arguments: Any) -> T:
        """The answer to a call; where a provider's package must be elsewhere than on this loop, there."""
        return await call(*arguments)

    async def asked(self, what: str, call: Callable[..., Awaitable[T]], *arguments: Any) -> T:
        """The answer to a call, asked for again while the provider is busy or out of reach. Raises SandboxError."""
        for pause in (*PAUSES, None):
            try:
                return await self.called(call, *arguments)
            except self.errors as error:
                said, least = self.judged(error)
                if least is None or pause is None:
                    raise SandboxError(f"{what} at {self.name}: {' '.join(said.split())[:500]}.") from None
                await asyncio.sleep(max(least, pause))
        raise AssertionError("the last try returns or raises")
