"""A shell as an agent program: scripts, and what must come of them in a sandbox and without one."""

from __future__ import annotations

from collections.abc import Callable

from minirllm.harness import TAIL, Context, Launch
from minirllm.types import Episode, Task, TerminationReason
from tests.test_reaper import alive

FILES = {"a/b.txt": "given\n", "run.sh": "#!/bin/sh\necho ran\n"}
LEAVING = r"""cat a/b.txt; rm a/b.txt; ./run.sh; echo new > c.txt; mkdir -p d/e; echo deep > d/e/x
printf '\xff' > bad; head -c 70000 /dev/zero > big; ln -s /etc/passwd l; mkfifo f; printf '\xfe' > $'n\xff'
mkdir shut; echo in > shut/in; chmod 0 shut
"""
PRINTING = "seq 400000; seq 500000 >&2; exit 9"
SLEEPING = "setsid sleep {0} & sleep {0} & echo last words >&2; wait; sleep {0}"


def with_files() -> Task:
    """A task whose files `LEAVING` works on."""
    return Task("t", "do it", {"files": FILES})


def check_left(episode: Episode) -> None:
    """After `LEAVING`. Whoever may read everything reads what was shut, too."""
    files = {name: text for name, text in episode.artifacts["files"].items() if name != "shut/in"}
    assert files == {"c.txt": "new\n", "d/e/x": "deep\n", "run.sh": FILES["run.sh"]}
    assert episode.artifacts["files_left_out"] == ["bad", "big", "f", "l", "n\udcff"]


def reading_its_home(call: str) -> Callable[[Context], Launch]:
    """Prints a file of its HOME, which holds "set", then calls."""

    def launch(context: Context) -> Launch:
        return Launch(("bash", "-c", f"cat $HOME/.own/config;{call}"), context.variables, {".own/config": "set\n"})

    return launch


def check_printed(episode: Episode) -> None:
    """After `PRINTING`. Exit codes say nothing about the task."""
    kept = episode.artifacts
    assert kept["exit_code"] == 9
    assert kept["stdout"].endswith("399999\n400000\n")
    assert len(kept["stdout"]) == len(kept["stderr"]) == TAIL
    assert kept["ended"] == "own ended with exit code 9, saying '500000'"
    assert episode.reward == 1.0


def check_ended(episode: Episode, seconds: str) -> None:
    """After one call and `SLEEPING` for so long, beyond the deadline."""
    assert (episode.termination_reason, episode.reward) == (TerminationReason.TIMEOUT, None)
    assert episode.reason.startswith("agent did not end within ")
    assert (episode.artifacts["stdout"], episode.artifacts["stderr"]) == ("hello\n", "last words\n")
    assert len(episode.trajectories[0].steps) == 1
    assert alive(seconds) == []
