"""What SIGINT (Ctrl-C) and SIGTERM do to a run.

Owns: the handlers of both signals, for the time of one run. Does not know: what a step is, or what is saved.

The first SIGINT asks for an end after the step in hand; the second, and SIGTERM, end the run at once. Who sends SIGTERM
(a scheduler, a container that is stopped) kills some seconds later, and a step may take longer. An end at once loses
what was not finished: finished episodes are on disk. One more signal raises KeyboardInterrupt wherever the program is.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeVar

from minirllm import watchdog

Result = TypeVar("Result")

logger = logging.getLogger(__name__)


class Terminated(SystemExit):
    """SIGTERM ended the run. The exit status is the one that shells give a program which died of it."""

    def __init__(self) -> None:
        super().__init__(128 + signal.SIGTERM)


class Interrupt:
    """What was asked of the current task by signals."""

    def __init__(self, steps: bool) -> None:
        self.steps, self.asked = steps, not steps  # for an end after the step in hand
        self.ended_by: int | None = None  # the signal that ended it at once
        self._task, self._loop = asyncio.current_task(), asyncio.get_running_loop()

    def heard(self, number: int, frame: Any) -> None:
        """The handler: it runs in the main thread, between any two instructions."""
        assert self._task is not None, "made inside a task"
        if number == signal.SIGINT and not self.asked:
            self.asked = True
            self._say("Stopping once this step is done and saved. Ctrl-C again stops at once.")
        elif self.ended_by is None:
            self.ended_by = number
            kept = " Finished episodes are kept, and the run can be resumed." if self.steps else ""
            self._say(f"Stopping at once.{kept}")
            self._loop.call_soon_threadsafe(self._task.cancel)
        else:
            raise KeyboardInterrupt

    def _say(self, sentence: str) -> None:
        self._loop.call_soon_threadsafe(logger.warning, sentence)


@contextlib.contextmanager
def interruptible(steps: bool = True) -> Iterator[Interrupt]:
    """Inside, signals are heard: in the main thread, and unless the program was started with them ignored. Without
    `steps` the first SIGINT ends it at once.

    Raises KeyboardInterrupt or Terminated where they ended the current task.
    """
    interrupt = Interrupt(steps)
    here = threading.current_thread() is threading.main_thread()
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM) if here}
    before = {number: handler for number, handler in before.items() if handler is not signal.SIG_IGN}
    for number in before:
        signal.signal(number, interrupt.heard)
    try:
        yield interrupt
    except asyncio.CancelledError:
        if interrupt.ended_by is None:
            raise
        raise (Terminated if interrupt.ended_by == signal.SIGTERM else KeyboardInterrupt) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run(work: Callable[[Callable[[], bool]], Coroutine[Any, Any, Result]], steps: bool = True) -> Result:
    """What `work` returns, in an event loop of its own, where signals are heard. It is given a function: shall it end
    after the step in hand?"""

    async def heard() -> Result:
        with interruptible(steps) as interrupt:
            return await work(lambda: interrupt.asked)

    return watchdog.run(heard())
