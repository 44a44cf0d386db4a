"""Run a program, and end everything that it started: ``python -I -S reaper.py PROGRAM ARGUMENT...``

Owns: the processes below this one. It becomes the parent of those that leave their group or lose their parent, and
kills them all once the program ends, or once standard input is closed: by its owner, or by the owner's death.
Does not know: what is run, and for whom. Needs nothing but the standard library.
NOT covered: a program that kills this process first; other systems than Linux, where only its process group is ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys
import time
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36  # <linux/prctl.h>
ROUNDS = 1000  # of killing, 5 ms apart: what has not gone then cannot be killed by this user
CANNOT_RUN = 127  # a shell's exit code for a program that cannot be started


def main(argv: list[str]) -> int:
    """The program's exit code, as a shell tells it: 128 + the signal that ended it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    ended, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # a Ctrl-C is for the owner, who closes the pipe
    program = _start(argv)
    code: int | None = None
    while code is None:
        ready, _, _ = select.select([0, ended], [], [])
        if 0 in ready and not os.read(0, 1):
            break
        if ended in ready:
            os.read(ended, 4096)
        for process, status in _ended():
            code = status if process == program else code
    _end_all(program)
    return 128 + signal.SIGKILL if code is None else code


def _start(argv: list[str]) -> int:
    process = os.fork()
    if process:
        return process
    os.setsid()
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    try:
        os.execvp(argv[0], argv)
    except OSError as error:
        os.write(2, f"{argv[0]}: {error.strerror}\n".encode())
    os._exit(CANNOT_RUN)


def _ended() -> list[tuple[int, int]]:
    """(process, exit code) of every child that has ended."""
    found = []
    with contextlib.suppress(ChildProcessError):
        while (pair := os.waitpid(-1, os.WNOHANG))[0]:
            code = os.waitstatus_to_exitcode(pair[1])
            found.append((pair[0], code if code >= 0 else 128 - code))
    return found


def _end_all(program: int) -> None:
    """Kill, until none is left; those that are being born meanwhile are found in the next round."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(program, signal.SIGKILL)
    for _ in range(ROUNDS):
        below = _below(os.getpid())
        if not below:
            return
        for process in below:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL)
        _ended()
        time.sleep(0.005)


def _below(top: int) -> list[int]:
    """All processes that descend from `top`."""
    parents: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parent = int((folder / "stat").read_text(errors="replace").rpartition(")")[2].split()[1])
            parents.setdefault(parent, []).append(int(folder.name))
    found: list[int] = []
    queue = [top]
    while queue:
        children = parents.get(queue.pop(), [])
        found += children
        queue += children
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
