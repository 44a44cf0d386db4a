"""``minirllm train`` that tells where it is, for who wants to kill it in a certain place.

Owns: the phases. ``PHASES_FILE`` names a file with one byte for each phase: how often the process is in it now; it
survives the process. ``PHASES_MOMENT`` (as in ``optimizer:3``) is the entry at which ``PHASES_PIPE`` (a descriptor)
gets a byte. ``PHASES_TIMES`` names a file that a run which ends by itself leaves: the seconds of each phase's entries.
"""

from __future__ import annotations

import atexit
import functools
import inspect
import json
import mmap
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# The first that a process is in is where it is: the last ones go on beside the others.
PHASES = ("episode_write", "forward_backward", "optimizer", "log_write", "checkpoint_write", "grading", "rollouts")


def now_in(marks: bytes) -> str:
    """The phase that the bytes of ``PHASES_FILE`` speak of."""
    return next((name for name, count in zip(PHASES, marks, strict=True) if count), "between")


class Marks:
    """Counts entries, and keeps the file up to date."""

    def __init__(self, path: Path, moment: str, pipe: int):
        path.write_bytes(bytes(len(PHASES)))
        with path.open("r+b") as file:
            self.bytes = mmap.mmap(file.fileno(), len(PHASES))
        name, _, number = moment.partition(":")
        self.moment, self.pipe = (name, int(number or 0)), pipe
        self.seconds: dict[str, list[float]] = {name: [] for name in PHASES}
        self.entries = dict.fromkeys(PHASES, 0)

    @contextmanager
    def inside(self, name: str) -> Iterator[None]:
        began, at = time.perf_counter(), PHASES.index(name)
        self.entries[name] += 1
        self.bytes[at] += 1
        try:
            if (name, self.entries[name]) == self.moment:
                os.write(self.pipe, b"!")
            yield
        finally:
            self.bytes[at] -= 1
            self.seconds[name].append(time.perf_counter() - began)

    def wrap(self, owner: Any, attribute: str, name: str) -> None:
        """Calls of the function count as this phase."""
        function = getattr(owner, attribute)

        @functools.wraps(function)
        def call(*args: Any, **options: Any) -> Any:
            with self.inside(name):
                return function(*args, **options)

        @functools.wraps(function)
        async def acall(*args: Any, **options: Any) -> Any:
            with self.inside(name):
                return await function(*args, **options)

        setattr(owner, attribute, acall if inspect.iscoroutinefunction(function) else call)


def main() -> None:
    from minirllm import checkpoint, cli
    from minirllm.log import RunLog
    from minirllm.rollouts import Runner
    from minirllm.store import EpisodeStore
    from minirllm.trainer import Trainer

    given = os.environ
    marks = Marks(Path(given["PHASES_FILE"]), given.get("PHASES_MOMENT", ""), int(given.get("PHASES_PIPE", "-1")))
    for owner, attribute, name in (
        (Runner, "_grade", "grading"),
        (EpisodeStore, "append", "episode_write"),
        (Trainer, "_accumulate", "forward_backward"),
        (Trainer, "_apply", "optimizer"),
        (RunLog, "step", "log_write"),
        (checkpoint, "save", "checkpoint_write"),
        (Runner, "run_many", "rollouts"),
    ):
        marks.wrap(owner, attribute, name)
    if "PHASES_TIMES" in given:
        atexit.register(lambda: Path(given["PHASES_TIMES"]).write_text(json.dumps(marks.seconds)))
    sys.argv.insert(1, "train")
    cli.main()


if __name__ == "__main__":
    main()
