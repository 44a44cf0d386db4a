"""Graders in child processes: an evaluator that hangs, eats memory or crashes is killed and costs one verdict.

Owns: the pool of workers, the pipe between them, their limits. Does not know: what is graded, sessions, rollouts.
A worker imports the evaluator by reference (module or file, attribute) and never imports torch by itself. Requests are
pickled over a pipe that only this process writes; replies are JSON, so a worker cannot run code here.
NOT covered: a worker has the rights of this user. Running untrusted programs is a sandbox's job.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import dataclasses
import functools
import importlib
import json
import os
import pickle
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from minirllm.errors import GradingError, GradingTimeout, TaskError, one_line
from minirllm.flow import TASK_PREFIX, Evaluator, evaluator, import_path
from minirllm.returns import step_values, trajectory_rewards, verdict
from minirllm.types import Episode, EvalOutput, Signal, Task

HEADER = 8  # bytes: the length of the frame that follows, big-endian
MAX_MEMORY = 4 << 30  # bytes of private memory one worker may hold
PR_SET_PDEATHSIG = 1  # <linux/prctl.h>: die with the parent, even when it was killed
START = """import json, sys
sys.path[:] = json.loads(sys.argv[1])
from minirllm.rewards import process
process.serve(*sys.argv[2:])"""


class Reference(NamedTuple):
    """How another process finds an evaluator: a module to import, or a file to run, and the name in it."""

    module: str
    path: str  # empty: import by name
    attribute: str


def reference(target: Evaluator) -> Reference | None:
    """None when it cannot be imported elsewhere: defined in ``__main__``, in a function, or deleted from its module."""
    module = sys.modules.get(target.home)
    if module is None or target.home == "__main__":
        return None
    path = str(module.__file__) if target.home.startswith(TASK_PREFIX) else ""
    for name, value in vars(module).items():
        if value is target or value is target.fn:
            return Reference(target.home, path, name)
    return None


class Graders:
    """Up to `size` worker processes for one evaluator, started when first needed and reused."""

    def __init__(self, where: Reference, size: int = 0):
        self.where = where
        self.slots = asyncio.Semaphore(size or min(4, os.cpu_count() or 1))
        self.idle: list[_Worker] = []
        self.reaping: set[asyncio.Task[int]] = set()

    async def grade(self, task: Task, episode: Episode, deadline: float, timeout: float | None = None) -> EvalOutput:
        """The verdict on `episode` (sent without its token tree), whose trajectories and steps get what it gave them.

        `deadline` (seconds from now) covers everything, `timeout` only the evaluator itself, once a worker is ready.
        Raises GradingTimeout, or GradingError with the reason. When cancelled, the worker is killed.
        """
        try:
            request = pickle.dumps((task, dataclasses.replace(episode, tree=None)))
        except (pickle.PicklingError, TypeError, AttributeError, RecursionError) as error:
            raise GradingError(f"the task or episode cannot be sent to the grader process: {error}") from error
        try:
            async with asyncio.timeout(max(0.0, deadline)), self.slots:
                reply = await self._ask(request, timeout)
        except TimeoutError:
            raise GradingTimeout(f"evaluator was stopped at the episode's deadline, after {deadline:.3g} s") from None
        if "error" in reply:
            raise GradingError(reply["error"])
        for trajectory, reward in zip(episode.trajectories, reply.pop("trajectory_rewards"), strict=False):
            trajectory.reward = reward
        for step, values in zip(episode.steps, reply.pop("step_values"), strict=False):
            step.reward, step.advantage = values
        return EvalOutput(**{**reply, "signals": [Signal(**signal) for signal in reply["signals"]]})

    async def _ask(self, request: bytes, timeout: float | None) -> dict[str, Any]:
        self.idle = [worker for worker in self.idle if worker.process.returncode is None]
        worker = self.idle.pop() if self.idle else _Worker(await self._spawn())
        done = False
        try:
            await worker.started()
            async with asyncio.timeout(timeout):
                reply = await worker.ask(request)
            done = True
        except TimeoutError:  # only this one: the outer deadline cancels
            raise GradingTimeout(f"evaluator took longer than its {timeout:.3g} s") from None
        finally:
            if done:
                self.idle.append(worker)
            else:
                self._kill(worker)
        return reply

    async def _spawn(self) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            sys.executable, "-c", START, json.dumps(sys.path), *self.where,
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, start_new_session=True,
            env={**os.environ, "PYTHONHASHSEED": "0"},  # the order of sets must not differ between workers
        )  # fmt: skip

    def _kill(self, worker: _Worker) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(worker.process.pid, signal.SIGKILL)
        worker.requests.close()
        task = asyncio.ensure_future(worker.process.wait())
        self.reaping.add(task)
        task.add_done_callback(self.reaping.discard)

    async def close(self) -> None:
        """End all workers."""
        for worker in self.idle:
            self._kill(worker)
        self.idle.clear()
        await asyncio.gather(*self.reaping)


class _Worker:
    """This side of one child process."""

    def __init__(self, process: asyncio.subprocess.Process):
        assert process.stdin is not None, "the worker was started with pipes"
        assert process.stdout is not None, "the worker was started with pipes"
        self.process, self.requests, self.replies = process, process.stdin, process.stdout
        self.ready = False

    async def started(self) -> None:
        """Wait until the child has imported the evaluator; GradingError when that failed."""
        if not self.ready:
            reply = await self._reply()
            if "error" in reply:
                raise GradingError(reply["error"])
            self.ready = True

    async def ask(self, request: bytes) -> dict[str, Any]:
        self.requests.write(len(request).to_bytes(HEADER, "big") + request)
        with contextlib.suppress(ConnectionError):  # the child died: the reply says so
            await self.requests.drain()
        return await self._reply()

    async def _reply(self) -> dict[str, Any]:
        try:
            length = int.from_bytes(await self.replies.readexactly(HEADER), "big")
            return json.loads(await self.replies.readexactly(length))
        except (asyncio.IncompleteReadError, ConnectionError):
            status = await self.process.wait()
            raise GradingError(f"the grader process died (exit status {status})") from None


# The rest runs in the child.


def serve(module: str, path: str, attribute: str) -> None:
    """Answer requests until the pipe closes. What the evaluator prints goes to standard error."""
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    _limit()
    found: list[Evaluator] = []

    def load() -> dict[str, Any]:
        found.append(_load(Reference(module, path, attribute)))
        return {}

    _write(replies, _guarded(load, path, "evaluator cannot be imported"))
    while header := requests.read(HEADER):
        request = requests.read(int.from_bytes(header, "big"))
        _write(replies, _guarded(functools.partial(_verdict, found[0], request), path, "evaluator failed"))


def _limit() -> None:
    """Die with the parent; hold at most MAX_MEMORY."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    with contextlib.suppress(ValueError, OSError):  # a system whose own limit is lower, or that has none
        resource.setrlimit(resource.RLIMIT_DATA, (MAX_MEMORY, MAX_MEMORY))


def _load(where: Reference) -> Evaluator:
    module = import_path(Path(where.path)) if where.path else importlib.import_module(where.module)
    return evaluator(getattr(module, where.attribute))


def _verdict(grade: Evaluator, request: bytes) -> dict[str, Any]:
    task, episode = pickle.loads(request)
    output = verdict(grade(task, episode))
    rewards = {"trajectory_rewards": trajectory_rewards(episode), "step_values": step_values(episode)}
    return {**dataclasses.asdict(output), **rewards}


def _guarded(work: Callable[[], dict[str, Any]], path: str, what: str) -> dict[str, Any]:
    """What `work` returns, or why it failed: here an evaluator's failure becomes data."""
    try:
        return work()
    except (TaskError, GradingError) as error:
        return {"error": str(error)}
    except Exception as error:
        return {"error": f"{what}: {one_line(error, path)}"}


def _write(replies: BinaryIO, reply: dict[str, Any]) -> None:
    body = json.dumps(reply, default=str).encode()
    replies.write(len(body).to_bytes(HEADER, "big") + body)
    replies.flush()
