"""Control groups of a local sandbox: what all its commands may use together, and who belongs to one command.

Owns: `Cgroup`, for the layouts v1 (a tree for each controller) and v2 (one tree). Does not know: sandboxes.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

from minirllm.errors import SandboxError

MOUNT = Path("/sys/fs/cgroup")
CONTROLLERS = ("memory", "pids", "cpu")
PERIOD = 100_000  # microseconds
LAST = 5.0  # seconds that killed processes may take to go
JOIN = 'for d in $1; do echo 0 > "$d/cgroup.procs" || exit 125; done; shift; exec "$@"'


class Cgroup:
    """The group called `name`. Needs root."""

    def __init__(self, name: str):
        self.unified = (MOUNT / "cgroup.controllers").exists()
        self.folders = {
            controller: (MOUNT if self.unified else MOUNT / controller) / "minirllm" / name
            for controller in CONTROLLERS
        }
        self._commands = 0

    def make(self, memory: int, processes: int, cpus: float) -> None:
        """Create it with these limits: bytes, processes, CPUs. Raises SandboxError when the machine refuses."""
        try:
            for folder in set(self.folders.values()):
                folder.mkdir(parents=True, exist_ok=True)
            if self.unified:
                for above in (MOUNT, MOUNT / "minirllm"):
                    (above / "cgroup.subtree_control").write_text(" ".join(f"+{name}" for name in CONTROLLERS))
                rows: list[tuple[str, str, object]] = [("memory", "memory.max", memory)]
                rows += [("memory", "memory.swap.max", 0), ("cpu", "cpu.max", f"{int(cpus * PERIOD)} {PERIOD}")]
            else:
                rows = [("memory", "memory.limit_in_bytes", memory), ("memory", "memory.memsw.limit_in_bytes", memory)]
                rows += [("cpu", "cpu.cfs_period_us", PERIOD), ("cpu", "cpu.cfs_quota_us", int(cpus * PERIOD))]
            for controller, file, value in [*rows, ("pids", "pids.max", processes)]:
                place = self.folders[controller] / file
                if place.exists() or "swap" not in file:  # a kernel without swap accounting has no such file
                    place.write_text(str(value))
        except OSError as error:
            raise SandboxError(f"Control groups cannot be used here: {error}.") from None

    def command(self) -> Path:
        """A group below for the processes of one command."""
        self._commands += 1
        folder = self.folders["pids"] / f"command-{self._commands}"
        folder.mkdir()
        return folder

    def enter(self, command: Path) -> list[str]:
        """The beginning of a command line whose rest then runs in the group."""
        others = [] if self.unified else [str(self.folders[name]) for name in ("memory", "cpu")]
        return ["/bin/sh", "-c", JOIN, "_", " ".join([str(command), *others])]

    def oom_kills(self) -> int:
        """How many processes the kernel has ended for want of memory so far."""
        return oom_kills(self.folders["memory"])

    def remove(self) -> None:
        """Kill whatever is in the group, and delete it. It need not be there."""
        for folder in sorted(set(self.folders.values())):
            below = sorted(folder.glob("command-*")) if folder.exists() else []
            for place in [*below, folder]:
                end(place)


def oom_kills(folder: Path) -> int:
    """How many processes of the memory group in `folder` the kernel has ended so far, in either layout."""
    file = folder / "memory.oom_control"
    lines = (file if file.exists() else folder / "memory.events").read_text().splitlines()
    return int(dict(line.split() for line in lines).get("oom_kill", 0))


def end(folder: Path) -> None:
    """Kill whatever is in a group, wait until nothing is, and delete it. It need not be there."""
    until = time.monotonic() + LAST
    with contextlib.suppress(OSError):
        while time.monotonic() < until and (pids := (folder / "cgroup.procs").read_text().split()):
            for pid in map(int, pids):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.002)
        folder.rmdir()
