"""Sandboxes: where untrusted commands run. Pick one by name, or as ``module:attr``.

Owns: the protocol, the limits, what all sandboxes share (files and trees travel through commands run inside, so that no
link leads out of the sandbox and no backend needs a second way). Does not know: agents, tasks, how a backend isolates.

A sandbox is a file system and a way to run commands in it. Each command is a fresh set of processes that ends with it;
what stays is files. `snapshot` keeps files only: no process, no memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any, Self, TypeVar

from minirllm.config import find
from minirllm.errors import ConfigError, SandboxError
from minirllm.sandboxes.pipes import Input, Kept, Sink
from minirllm.sandboxes.trees import Packed, unpacking

T = TypeVar("T")
MIB = 2**20
BASH = "/usr/bin/bash"  # not /bin/bash, nor from PATH: an agent may have put another one there
WORK = "/work"  # where commands run unless told otherwise
MAX_ARGUMENT = 128 * 1024  # bytes: Linux's own limit, see execve(2)
FILE_SECONDS = 120.0  # for one transfer


@dataclass(frozen=True)
class Limits:
    """Of one sandbox; those marked (command) hold for each command by itself."""

    memory: int = 1024 * MIB  # bytes of all processes
    processes: int = 256  # at once
    cpus: float = 1.0
    disk: int = 1024 * MIB  # bytes of all files written, snapshots included
    files: int = 65_536
    output: int = MIB  # bytes kept of each of stdout and stderr (command); one that writes more is ended

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value > 0:  # to the system below, 0 may mean: no limit
                raise SandboxError(f"The limit {name} of a sandbox must be above 0, got {value}.")


@dataclass(frozen=True)
class Spec:
    """What to start. `snapshot` is an id that the same backend gave; None: an empty work folder on the base system, or
    on an image, where the backend has images."""

    snapshot: str | None = None
    image: str = ""
    build: Path | None = None  # a folder with a Dockerfile, of which the image is built
    build_seconds: float = 600.0  # for having the image, built or fetched
    compose: Path | None = None  # a Compose file: the sandbox is its service `main`, the others run beside it
    lifetime: float = 3600.0  # seconds after which a provider removes it, where it runs elsewhere
    limits: Limits = field(default_factory=Limits)
    env: Mapping[str, str] = field(default_factory=dict)  # of every command
    forward: Mapping[int, tuple[str, int]] = field(default_factory=dict)  # a port inside -> (host, port) out here
    binds: Mapping[str, str] = field(default_factory=dict)  # a file or folder out here -> its place inside, read-only
    root: bool = False  # where users are inside, root may do what it likes with their files and processes


@dataclass(frozen=True)
class Result:
    """How a command ended. `stdout` and `stderr` are cut at `Limits.output`; bytes that are no UTF-8 are replaced."""

    raw_stdout: bytes
    raw_stderr: bytes
    exit_code: int  # 128 + n when signal n ended it
    timed_out: bool = False
    oom: bool = False  # the kernel ended a process of it for want of memory
    flooded: bool = False  # it wrote more than `Limits.output`

    @property
    def stdout(self) -> str:
        return self.raw_stdout.decode(errors="replace")

    @property
    def stderr(self) -> str:
        return self.raw_stderr.decode(errors="replace")


@dataclass(frozen=True)
class Command:
    """One program to run. `env` is all that it sees; without a `cwd` it begins where commands do; of each stream
    `output` bytes are kept, the last ones with `tail`; of stdout so many go to the `sink`, if there is one. Without a
    `user` it is run as the sandbox's own."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    cwd: str | None
    stdin: Input
    timeout: float  # seconds
    output: int
    tail: bool
    user: str | None = None
    sink: Sink | None = None

    def outputs(self) -> tuple[Kept, Kept]:
        """What is to be kept of stdout and stderr."""
        return Kept(self.output, self.tail, self.sink), Kept(self.output, self.tail)


class Sandbox(ABC):
    """An ``async with`` block: entered it is running, left it is gone with all that ran in it."""

    work = WORK  # where relative paths and commands begin
    images = False  # it can be made of an image
    contained = True  # all that is written in it is in its snapshots
    doors = True  # ports and files of this machine can be shown in it: what agent programs need
    streams = False  # `carry_out` takes input and gives output piece by piece; else it gets and gives them whole

    def __init__(self, spec: Spec):
        self.spec = spec

    @abstractmethod
    async def start(self) -> None:
        """Make it. Raises SandboxError when this machine cannot, or the snapshot is not there."""

    @abstractmethod
    async def close(self) -> None:
        """End everything in it and remove it. May be called twice."""

    @property
    @abstractmethod
    def running(self) -> bool:
        """Is it there, between `start` and `close`?"""

    @classmethod
    def users(cls) -> tuple[str, ...] | None:
        """Whom a command can be run as, by names and numbers; None: whoever the system inside knows."""
        return ()

    @property
    def superuser(self) -> str | None:
        """Who can do everything with the files inside, see `Spec.root`; None: there is the sandbox's own user only."""
        return None

    @property
    def variables(self) -> Mapping[str, str]:
        """Of every command, below those of the spec."""
        return {}

    @abstractmethod
    async def carry_out(self, command: Command) -> Result:
        """What `execute` promises of a command that a system could start."""

    @abstractmethod
    async def snapshot(self) -> str:
        """Keep the files as they are now, and say under which id. Running processes are not in it."""

    async def service(self, name: str) -> Sandbox:
        """One that runs beside this one, see `Spec.compose`; it ends with this one. Raises SandboxError without it."""
        raise SandboxError(f"No service {name} runs beside this sandbox.")

    async def halt(self) -> None:
        """End what still runs in it. Nothing can be run in it any more; services beside it go on."""
        return None

    @classmethod
    def check(cls) -> None:
        """Raises SandboxError when nothing is there to start one with: no engine, program or account. May block."""
        return None

    @classmethod
    def place(cls) -> str:
        """Who keeps the snapshots, where that is not this machine: an engine, an account."""
        return ""

    @classmethod
    async def weigh(cls, id: str) -> int:
        """Bytes that a snapshot takes, 0 where that is not known."""
        return 0

    @classmethod
    async def forget(cls, id: str) -> None:
        """Remove a snapshot; it need not be there. Raises SandboxError when that cannot be done."""
        raise SandboxError(f"Snapshots of {cls.__name__} are removed where they are kept.")

    async def __aenter__(self) -> Self:
        async with contextlib.AsyncExitStack() as undo:
            undo.push_async_callback(self.close)
            await self.start()
            undo.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # ---- what every sandbox does in the same way ----

    async def execute(
        self,
        argv: Sequence[str],
        *,
        timeout: float,
        stdin: bytes = b"",
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        output: int | None = None,
        tail: bool = False,
        user: str | None = None,
    ) -> Result:
        """Run one program to its end, or for `timeout` seconds; nothing that it started outlives it. `env` is added to
        the sandbox's own, never this process's; `output` overrides the limit, and with `tail` so many of the last bytes
        are kept, however many there were. `user` is a name or a number of one inside. Raises SandboxError when the
        sandbox itself fails, `cwd` is no folder or there is no such user, never for what programs do: where one has
        removed the folder that commands begin in unless told otherwise, the next has exit code 125."""
        limit = output or self.spec.limits.output
        return await self._carry(Command(tuple(argv), env or {}, cwd, stdin, timeout, limit, tail, user))

    async def _carry(self, command: Command) -> Result:
        """`carry_out`, of what can be started, with all variables, and whole where the sandbox does not stream."""
        if not self.running:
            raise SandboxError("The sandbox is closed.")
        command = replace(command, env={**self.variables, **self.spec.env, **command.env})
        _check(command.argv, command.env, command.cwd or "")
        check_user(type(self), command.user)
        if self.streams:
            return await self.carry_out(command)
        stdin, sink = command.stdin, command.sink
        given = stdin if isinstance(stdin, bytes) else b"".join([piece async for piece in stdin])
        done = await self.carry_out(replace(command, stdin=given, sink=None))
        if sink is not None:
            await sink(done.raw_stdout)
        return done

    async def run(
        self,
        command: str,
        *,
        timeout: float,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        stdin: bytes = b"",
        user: str | None = None,
    ) -> Result:
        """Run a line of bash."""
        return await self.execute((BASH, "-c", command), timeout=timeout, env=env, cwd=cwd, stdin=stdin, user=user)

    # files go in and come out as the superuser, where there is one, else as the sandbox's own user

    async def read(self, path: str) -> bytes:
        """The content of a file. Raises SandboxError when it cannot be read."""
        return await self._script('cat -- "$1"', path, output=self.spec.limits.disk)

    async def write(self, path: str, data: bytes, mode: int = 0o644) -> None:
        """Make or replace a file and the folders above it. Raises SandboxError when it cannot be written."""
        script = f'mkdir -p -- "${{1%/*}}/" && cat > "$1" && chmod {mode:o} -- "$1"'
        await self._script(script, path, stdin=data)

    async def upload(self, local: Path, path: str) -> None:
        """Copy the tree under `local` to `path`, made if need be; links are copied as links."""
        if not await asyncio.to_thread(local.is_dir):
            raise SandboxError(f"{local} is no folder: there is nothing to upload.")
        packed = Packed(local)
        try:
            await self._script('mkdir -p -- "$1" && tar -x -f - -C "$1" --no-same-owner', path, stdin=packed)
        except SandboxError as error:
            raise SandboxError(f"{local} cannot be uploaded: {packed.problem}.") if packed.problem else error from None

    async def download(self, path: str, local: Path) -> None:
        """Copy the tree under `path` to `local`. Nothing is written outside `local`, whatever links and names the tree
        has; what would lead out is left out, as are devices and sockets. Raises SandboxError when it cannot be copied
        whole: what had come is then there."""
        limits = self.spec.limits
        async with unpacking(local, limits.files) as sink:
            await self._script('tar -c -f - -C "$1" .', path, output=limits.disk + 10 * MIB, sink=sink)

    def _absolute(self, path: str) -> PurePosixPath:
        if not path or "\0" in path:
            raise SandboxError(f"A path in the sandbox has at least one character and no NUL, got {path!r}.")
        return PurePosixPath(self.work) / path

    async def _script(
        self, script: str, path: str, stdin: Input = b"", output: int | None = None, sink: Sink | None = None
    ) -> bytes:
        """The output of a script of which $1 is `path`."""
        argv = (BASH, "-c", script, "_", str(self._absolute(path)))
        limit = output or self.spec.limits.output
        done = await self._carry(Command(argv, {}, "/", stdin, FILE_SECONDS, limit, False, self.superuser, sink))
        if done.exit_code or done.timed_out or done.flooded:
            why = done.stderr.strip() or ("it is too large" if done.flooded else f"exit code {done.exit_code}")
            raise SandboxError(f"{path} in the sandbox: {why}.")
        return done.raw_stdout


class NoSnapshot(SandboxError):
    """No snapshot has this id."""


SANDBOXES: dict[str, str] = {
    "daytona": "minirllm.sandboxes.daytona:Daytona",
    "docker": "minirllm.sandboxes.docker:Docker",
    "local": "minirllm.sandboxes.local:Local",
    "local-unsafe": "minirllm.sandboxes.unsafe:Unsafe",
    "modal": "minirllm.sandboxes.modal:Modal",
}
EXTRAS = ("daytona", "docker", "modal")  # packages of the same name


def kind(name: str) -> type[Sandbox]:
    """The class of this name. Raises ConfigError when there is none."""
    if name in EXTRAS and importlib.util.find_spec(name) is None:
        raise ConfigError(f"The sandbox {name} needs a package that is not installed: pip install 'minirllm[{name}]'.")
    found: type[Sandbox] = find("sandbox", name, SANDBOXES)
    return found


def create(name: str, spec: Spec | None = None) -> Sandbox:
    """A sandbox of this kind, not started yet. Raises ConfigError when there is no such kind, or it has no images."""
    made = kind(name)(spec or Spec())
    if not made.images and (made.spec.image or made.spec.build or made.spec.compose):
        raise ConfigError(f"The sandbox {name} has no images: take docker.")
    return made


def check_user(kind: type[Sandbox], user: str | None) -> None:
    """Raises SandboxError when this kind of sandbox can run nothing as `user`."""
    known = kind.users()
    if user is not None and known is not None and user not in known:
        name = next((name for name, place in SANDBOXES.items() if place.endswith(f":{kind.__name__}")), kind.__name__)
        only = " or ".join(known) or "its own user"
        raise SandboxError(f"The sandbox {name} runs commands as {only} only, not as {user!r}: take docker.")


def _check(argv: Sequence[str], env: Mapping[str, str], cwd: str) -> None:
    """Raises SandboxError when no system could start a program with these."""
    if not argv or not argv[0] or "=" in argv[0]:
        raise SandboxError(f"A command begins with the name of a program, without =, got {list(argv)[:1]}.")
    if wrong := [name for name in env if not name or "=" in name]:
        raise SandboxError(f"The name of a variable has at least one character and no =, got {wrong[0]!r}.")
    if any("\0" in text or not _encodes(text) for text in (*argv, *env, *env.values(), cwd)):
        raise SandboxError("A command, its folder and its variables have no NUL and no half of a character.")
    if any(len(text.encode()) >= MAX_ARGUMENT for text in argv):
        raise SandboxError(f"An argument of a command has less than {MAX_ARGUMENT} bytes: give more by its input.")


def _encodes(text: str) -> bool:
    try:
        return bool(text.encode()) or not text
    except UnicodeEncodeError:  # half of a surrogate pair: what a model writes as "\\ud800"
        return False


async def to_end(function: Callable[..., T], *arguments: Any) -> T:
    """In a thread, and to its end even when the caller is cancelled meanwhile: what it makes must not be left, and what
    it removes not be half there. The caller is cancelled after that."""
    running = asyncio.ensure_future(asyncio.to_thread(function, *arguments))
    try:
        return await asyncio.shield(running)
    finally:
        while not running.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([running])
        running.exception()  # has been seen
