"""reaper.py: whatever a program starts is ended with it, also what hides; its exit code is a shell's."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from minirllm.sandboxes import reaper

HIDING = [  # ways in which a process leaves its group, its parent and its environment
    "sleep {0} &",
    "setsid sleep {0} &",
    "(setsid sleep {0} &)",
    "(env -i setsid setsid sh -c 'trap \"\" TERM HUP INT; sleep {0}' &)",
    "(nohup sleep {0} >/dev/null 2>&1 &)",
]
UP = "while ! pgrep -x -f 'sleep {0}' >/dev/null; do sleep 0.02; done; echo up"


def start(*argv: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-I", "-S", reaper.__file__, *argv],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip


@contextmanager
def hidden(way: int, seconds: str, then: str = ":") -> Iterator[subprocess.Popen[str]]:
    """A program that has hidden a process that sleeps for so long, and goes on with `then`."""
    with start("bash", "-c", f"{HIDING[way]}\n{UP}; {then}".format(seconds)) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        yield process


def alive(seconds: str) -> list[str]:
    """Processes whose command line sleeps for so long: no other test's do."""
    lines = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_text().split("\0")
        except OSError:
            continue
        if words[:2] == ["sleep", seconds]:
            lines.append(folder.name)
    return lines


@pytest.mark.parametrize(("code", "script"), [(0, "true"), (3, "exit 3"), (137, "kill -9 $$"), (143, "kill $$")])
def test_exit_codes(code: int, script: str) -> None:
    with start("bash", "-c", script) as process:
        assert process.wait(timeout=20) == code


def test_a_program_that_is_not_there() -> None:
    with start("/nothing/here") as process:
        assert process.stderr is not None
        assert process.stderr.read() == "/nothing/here: No such file or directory\n"
        assert process.wait(timeout=20) == 127


def test_the_program_reads_nothing_and_its_output_passes() -> None:
    with start("bash", "-c", "cat; echo out; echo err >&2") as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert (process.stdout.read(), process.stderr.read(), process.wait(timeout=20)) == ("out\n", "err\n", 0)


@pytest.mark.parametrize("way", range(len(HIDING)))
def test_what_a_program_leaves_behind_is_ended_with_it(way: int) -> None:
    seconds = f"{90_000 + way}"
    with hidden(way, seconds) as process:
        assert process.wait(timeout=20) == 0
    assert alive(seconds) == []


@pytest.mark.parametrize("way", range(len(HIDING)))
def test_all_is_ended_once_its_owner_closes_the_pipe_or_dies(way: int) -> None:
    seconds = f"{91_000 + way}"
    with hidden(way, seconds, "trap '' TERM; wait; sleep 92000") as process:
        assert len(alive(seconds)) == 1
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(timeout=20) == 137
    assert alive(seconds) == []


def test_orphans_are_reaped_as_they_die() -> None:
    """No zombies pile up while the program runs."""
    script = "for i in $(seq 100); do (true &) ; done; sleep 0.5; ps -o stat= --ppid $PPID | grep -c Z; echo done"
    with start("bash", "-c", script) as process:
        assert process.stdout is not None
        assert process.stdout.read() == "0\ndone\n"
        assert process.wait(timeout=20) == 0
