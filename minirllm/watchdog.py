"""User code against a clock: what does not end is named and ended, or left behind where nothing waits for it.

Owns: deadlines, the threads and tasks that agents and evaluators run in, how the event loop and the program end.
Does not know: episodes, sessions, HTTP.

A task past its deadline is cancelled, then its coroutine is closed. A thread gets a SystemExit at its next line of
Python; one that waits in C gets it when the wait is over. A line that blocks the event loop is named after `PATIENCE`
and gets a TimeoutError after the limit, by a signal, which also interrupts a blocking system call. What outlives all
that (it swallows BaseException, or spins outside of Python) holds no slot, and the program ends without it.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import ctypes
import functools
import inspect
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

Result = TypeVar("Result")

logger = logging.getLogger(__name__)

PATIENCE = 5.0  # seconds that user code may block the event loop before it is named
GRACE = 1.0  # seconds that what was cancelled has to clean up before it is left behind
LEAVING = 60.0  # seconds that threads have to end after the program's last line


class Deadline:
    """A moment on the monotonic clock, `seconds` from now."""

    def __init__(self, seconds: float):
        self.seconds, self.at = seconds, time.monotonic() + seconds

    def remaining(self) -> float:
        """Seconds left, never negative."""
        return max(0.0, self.at - time.monotonic())


class Overdue(TimeoutError):
    """Work did not end in time; the message is where it was and what it waited for, as far as that is known."""


def source(fn: Callable[..., Any]) -> str | None:
    """The file that `fn` is written in."""
    code = getattr(inspect.unwrap(fn), "__code__", None)
    return code.co_filename if code is not None else None


# ---- work with a deadline ----

_threads: WeakKeyDictionary[Any, threading.Thread] = WeakKeyDictionary()  # of the tasks that wait for one


async def within(
    work: Coroutine[Any, Any, Result], seconds: float, file: str | None = None, waiting: Callable[[], str] = str
) -> Result:
    """The result of `work`. Raises Overdue after `seconds`, even if it ignores being cancelled; that names the line of
    `file` that `work` had come to, and what `waiting` said then."""
    task = asyncio.ensure_future(work)
    found = ""
    try:
        done, _ = await asyncio.wait({task}, timeout=seconds)
        if done:
            return task.result()
        found = "; ".join(filter(None, (_place(task, file), waiting())))
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait({task}, timeout=GRACE)
            if not task.done():
                _leave_behind(task)
    raise Overdue(f" ({found})" if found else "")


async def call(fn: Any, is_async: bool, *args: Any) -> Any:
    """What the user's function returns, wherever it runs. A CancelledError of its own making is an error like any."""
    try:
        result = fn(*args) if is_async else await _in_thread(fn, *args)
        return await result if inspect.isawaitable(result) else result
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():  # ours: the deadline, or the end of the run
            raise
        raise RuntimeError(f"CancelledError: {error}").with_traceback(error.__traceback__) from None


def _settle(future: Future[Any], fn: Callable[[], Any]) -> Future[Any]:
    """Call `fn`, and hand what comes of it to whoever waits for `future`, where an error is raised again."""
    try:
        future.set_result(fn())
    except BaseException as error:  # user code: all that it raises is for whoever waits
        carried: BaseException = error
        if isinstance(error, StopIteration) or not isinstance(error, Exception | SystemExit):
            # a task could not hold it, or it would end the loop
            carried = RuntimeError(f"{type(error).__name__}: {error}").with_traceback(error.__traceback__)
        future.set_exception(carried)
    return future


class _Threads(ThreadPoolExecutor):
    """A thread for every call, which ends with the process: calls that hang keep neither others nor the end waiting."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        return self.start("call", functools.partial(fn, *args, **kwargs))[1]

    def start(self, name: str, fn: Callable[[], Any]) -> tuple[threading.Thread, Future[Any]]:
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()
        thread = threading.Thread(target=_settle, args=(future, fn), name=name, daemon=True)
        thread.start()
        return thread, future


async def _in_thread(fn: Callable[..., Any], *args: Any) -> Any:
    """Call `fn` in a thread of its own, not a pool's: one that hangs must hold no slot and not stop the exit."""
    ours = functools.partial(contextvars.copy_context().run, fn, *args)
    # settled twice: asyncio makes a TimeoutError anew, which then says nothing of where it was raised
    thread, future = _Threads().start("agent", functools.partial(_settle, Future(), ours))
    _threads[asyncio.current_task()] = thread
    waiting = asyncio.wrap_future(future)
    try:
        return (await waiting).result()
    finally:
        if waiting.cancelled() and thread.ident is not None:  # at its next line of Python
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit))


def _place(task: asyncio.Task[Any], file: str | None) -> str:
    """``file line N``: the innermost line of `file` where the task is, or the thread that it waits for."""
    thread, frames = _threads.get(task), list[FrameType]()
    if thread is not None:
        running = sys._current_frames().get(thread.ident or 0)
        frames = [frame for frame, _ in traceback.walk_stack(running)][::-1]
    inner: Any = task.get_coro()
    while inner is not None and thread is None:
        frames += [frame for frame in (getattr(inner, "cr_frame", None), getattr(inner, "gi_frame", None)) if frame]
        inner = getattr(inner, "cr_await", None) or getattr(inner, "gi_yieldfrom", None)
    lines = [frame.f_lineno for frame in frames if frame.f_code.co_filename == file]
    return f"{Path(file or '').name} line {lines[-1]}" if lines else ""


def _leave_behind(task: asyncio.Task[Any]) -> None:
    """It ignores being cancelled: its coroutine is closed, and nobody waits for it when the loop ends."""
    coroutine = task.get_coro()
    if _settle(Future(), coroutine.close).exception():  # that, too; it is never collected, as that closes it again
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(coroutine))
    task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
    task.cancel()  # wakes one whose coroutine is closed, so that it ends
    asyncio._unregister_task(task)
    task._log_destroy_pending = False  # type: ignore[attr-defined]


# ---- the event loop ----


def run(main: Coroutine[Any, Any, Result]) -> Result:
    """As asyncio.run; but no thread is waited for at the end, and tasks only for a moment."""

    async def whole() -> Result:
        asyncio.get_running_loop().set_default_executor(_Threads())
        try:
            return await main
        finally:
            rest = asyncio.all_tasks() - {asyncio.current_task()}
            for task in rest:
                task.cancel()
            if rest:
                _, rest = await asyncio.wait(rest, timeout=GRACE)
            for task in rest:
                _leave_behind(task)

    return asyncio.run(whole())


def leave(code: int) -> None:
    """The program's last line: if threads still keep it from ending after `LEAVING` seconds, it says so and ends."""

    def end() -> None:
        time.sleep(LEAVING)
        stuck = [thread.name for thread in threading.enumerate() if thread is not main and not thread.daemon]
        if stuck:  # else: something that is registered for the exit takes its time
            logger.warning("Ended without waiting for threads that an agent left: %s.", ", ".join(stuck))
            os._exit(code)

    main = threading.main_thread()
    threading.Thread(target=end, name="leave", daemon=True).start()


@contextlib.asynccontextmanager
async def watched(files: Iterable[str | None], limit: float) -> Any:
    """Inside, a line of `files` that blocks the event loop is named after `PATIENCE`, and gets a TimeoutError after
    `limit` seconds, by a signal that is ignored by default (where the loop runs in the main thread)."""
    names, loop_thread, over = {file for file in files if file}, threading.get_ident(), threading.Event()
    beats = [time.monotonic()]

    def blocking(frame: FrameType | None) -> list[tuple[FrameType, int]]:
        return [line for line in traceback.walk_stack(frame) if line[0].f_code.co_filename in names]

    def end(number: int, frame: FrameType | None) -> None:
        if not over.is_set() and time.monotonic() - beats[-1] > limit and frame is not None and blocking(frame):
            raise TimeoutError(f"it blocked the event loop for {limit:.3g} s")

    def look() -> None:
        said = 0.0  # the last beat before what was said
        while not over.wait(min(PATIENCE, limit) / 4):
            lines, silent = blocking(sys._current_frames().get(loop_thread)), time.monotonic() - beats[-1]
            if lines and beats[-1] != said and silent > PATIENCE:
                said = beats[-1]
                logger.warning(
                    "%s line %d has blocked everything for %.3g s: an async agent or evaluator must not make blocking "
                    "calls; use an async client, or a plain def, which runs in a thread.",
                    Path(lines[0][0].f_code.co_filename).name, lines[0][1], PATIENCE,
                )  # fmt: skip
            if lines and silent > limit and main:
                signal.pthread_kill(loop_thread, signal.SIGURG)

    async def beat() -> None:
        while True:
            beats[-1] = time.monotonic()
            await asyncio.sleep(min(PATIENCE, limit) / 4)

    main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGURG, end) if main else None
    threading.Thread(target=look, name="watch", daemon=True).start()
    pulse = asyncio.create_task(beat())
    try:
        yield
    finally:
        over.set()
        pulse.cancel()
        if main and signal.getsignal(signal.SIGURG) is end:  # else another one began meanwhile, and goes on
            signal.signal(signal.SIGURG, before)
