"""Run agents: one session, one deadline and one verdict per rollout; whatever goes wrong becomes data.

Owns: the life of an episode (open a session, run the agent, join its steps to the captured calls, grade, retry),
bounded concurrency. Does not know: HTTP, tokens, torch, what rewards are used for.

One deadline covers an episode: all attempts, agent and grader. An attempt that failed in the agent (it raised, returned
a wrong type, never called the model) is retried under a fresh session, key and seed; one that ran out of time or could
not be graded is not. One that the endpoint stopped (context full, calls used up) is over, and graded. An episode
without a reward always says why in `reason`.

Sync agents run in a thread each. A thread cannot be stopped: at the deadline it is left behind, its session is closed
and its further calls are refused. Sync evaluators run in killable processes when they can be imported there (see
`rewards.process`), else in a thread; async ones on the loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import hashlib
import inspect
import logging
import re
import sys
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from minirllm.config import Config
from minirllm.errors import EngineError, GradingError, GradingTimeout, UserError
from minirllm.flow import AgentFlow, Evaluator, one_line
from minirllm.returns import as_episode, trajectory_rewards, verdict
from minirllm.rewards.process import Graders, reference
from minirllm.session import Session, Sessions
from minirllm.types import AgentConfig, Episode, EvalOutput, SamplingParams, Step, Task, TerminationReason, Trajectory

logger = logging.getLogger(__name__)

RETRIED = frozenset({TerminationReason.ERROR, TerminationReason.NO_CALLS})
FAILED = frozenset({TerminationReason.ERROR, TerminationReason.TIMEOUT})  # the agent's work cannot be graded
REFUSED = {  # codes of the errors by which the endpoint stops an agent: it has ended, and is graded
    "context_length_exceeded": TerminationReason.MAX_PROMPT_LENGTH_EXCEEDED,
    "insufficient_quota": TerminationReason.MAX_TURNS_EXCEEDED,
}
OnEpisode = Callable[[Episode], None]
PATIENCE = 5.0  # seconds that user code may block the event loop before it is named
GRACE = 1.0  # seconds a cancelled agent has to clean up before it is left behind


class Job(NamedTuple):
    """One rollout to run."""

    task: Task
    rollout_idx: int = 0
    step: int = 0
    validation: bool = False
    attempt: int = 0  # the first one to make: those before it have failed
    dropped: int = 0  # tokens that failed attempts had sampled

    def after(self, failed: Episode) -> Job:
        """The same with the next attempt."""
        tokens = int(failed.metrics["retried_tokens"]) + failed.tree.num_sampled
        return self._replace(attempt=failed.attempt + 1, dropped=tokens)


class Deadline:
    """A moment on the monotonic clock, `seconds` from now."""

    def __init__(self, seconds: float):
        self.seconds, self.at = seconds, time.monotonic() + seconds

    def remaining(self) -> float:
        """Seconds left, never negative."""
        return max(0.0, self.at - time.monotonic())


class Runner:
    """Runs one agent against one endpoint. `close` ends its grader processes."""

    def __init__(self, sessions: Sessions, base_url: str, flow: AgentFlow, evaluator: Evaluator, config: Config):
        self.sessions, self.base_url, self.config = sessions, base_url.rstrip("/").removesuffix("/v1"), config
        self.flow, self.evaluator = flow, evaluator
        where = None if evaluator.is_async else reference(evaluator)
        self.graders = Graders(where) if where else None
        self.slots = asyncio.Semaphore(config.concurrency)
        self.in_flight = 0

    async def close(self) -> None:
        """End the grader processes."""
        if self.graders is not None:
            await self.graders.close()

    async def run_many(
        self, jobs: Sequence[Job], on_done: OnEpisode = lambda _: None, on_retry: OnEpisode = lambda _: None
    ) -> list[Episode]:
        """The episodes in the order of `jobs`; `on_done` is called as each ends, `on_retry` with each failed attempt
        that another one follows. An error they raise ends the rest."""

        async def one(job: Job) -> Episode:
            async with self.slots:
                episode = await self.run(job, on_retry)
            on_done(episode)
            return episode

        tasks = [asyncio.ensure_future(one(job)) for job in jobs]
        files = {_file(self.flow.fn), _file(self.evaluator.fn)}
        watch = asyncio.create_task(_watch({file for file in files if file}))
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            watch.cancel()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def run(self, job: Job, on_retry: OnEpisode = lambda _: None) -> Episode:
        """One graded episode: what fails is in `termination_reason` and `reason`. An engine that fails is nothing which
        the agent did: the same attempt is made again, with the same seeds. Raises EngineError when it keeps failing."""
        deadline, failures = Deadline(self.config.episode_timeout), 0
        self.in_flight += 1
        try:
            while True:
                session = self._open(job, failures)
                try:
                    episode = await self._attempt(job, session, deadline)
                except EngineError:
                    failures += 1
                    if failures > self.config.retries or not deadline.remaining():
                        raise
                    job = job._replace(dropped=job.dropped + session.tree.num_sampled)
                    continue
                episode.metrics["retried_tokens"] = float(job.dropped)
                over = job.attempt >= self.config.retries or not deadline.remaining()
                if over or episode.termination_reason not in RETRIED:
                    return episode
                episode.retried = True
                on_retry(episode)
                job = job.after(episode)
        finally:
            self.in_flight -= 1

    async def _attempt(self, job: Job, session: Session, deadline: Deadline) -> Episode:
        began = time.monotonic()
        try:
            episode = await self._agent(job.task, self._agent_config(job, session, deadline), deadline)
        finally:
            self.sessions.close(session.id)  # late calls, of a thread left behind say, are refused
        if session.failure is not None:
            raise session.failure
        _identify(episode, job, session)
        if episode.termination_reason in FAILED or not session.steps:
            episode.trajectories[0].steps = list(session.steps)  # what it had done can be read
        elif problem := _join(episode, session):
            episode.termination_reason, episode.reason = TerminationReason.ERROR, problem
        if not session.steps and episode.termination_reason is TerminationReason.ENV_DONE:
            episode.termination_reason = TerminationReason.NO_CALLS
            episode.reason = "the agent never called the model at config.base_url, so there is nothing to learn from"
        episode.tree = session.tree
        if session.steps and episode.termination_reason not in FAILED:
            await self._grade(job.task, episode, deadline)
        _measure(episode, session, time.monotonic() - began)
        return episode

    def _open(self, job: Job, failures: int) -> Session:
        """A session whose seed depends on the run, the task, the rollout and the attempt; in training also on the step:
        evaluations before and after an update share their noise, so that their difference is not noise. Its id is new
        (`failures` of the engine came before in this attempt), so that late calls to another are refused."""
        split, config = "eval" if job.validation else "train", self.config
        which, step = f"{job.attempt}.{failures}" if failures else str(job.attempt), 0 if job.validation else job.step
        return self.sessions.create(
            f"{split}{job.step}:{_slug(job.task.id)}:{job.rollout_idx}:{which}",
            seed_parts=(config.seed, split, step, job.task.id, job.rollout_idx, job.attempt),
            enforced=None if job.validation else SamplingParams(temperature=config.temperature),
            default_temperature=config.eval_temperature,
        )

    def _agent_config(self, job: Job, session: Session, deadline: Deadline) -> AgentConfig:
        temperature = self.config.eval_temperature if job.validation else self.config.temperature
        return AgentConfig(
            base_url=f"{self.base_url}/sessions/{quote(session.id, safe='')}/v1",
            model=session.model,
            api_key=session.key,
            session_uid=session.id,
            metadata={"timeout": deadline.remaining(), "rollout_idx": job.rollout_idx, "step": job.step},
            is_validation=job.validation,
            sampling_params={"temperature": temperature},
        )

    async def _agent(self, task: Task, config: AgentConfig, deadline: Deadline) -> Episode:
        """What the agent returned, or why it did not. Here an agent's failure becomes data."""

        async def work() -> Episode:
            try:
                return as_episode(await _call(self.flow, task, config))
            except (Exception, SystemExit) as error:
                why = next((reason for code, reason in REFUSED.items() if code in str(error)), TerminationReason.ERROR)
                return _failed(why, "agent failed: " + one_line(error, _file(self.flow.fn)))

        try:
            return await _within(work(), deadline.remaining())
        except TimeoutError:
            return _failed(TerminationReason.TIMEOUT, f"agent did not end within {deadline.seconds:.3g} s")

    async def _grade(self, task: Task, episode: Episode, deadline: Deadline) -> None:
        """Fills in the verdict, or why there is none."""
        try:
            output = await self._verdict(task, episode, deadline)
            rewards = trajectory_rewards(episode)  # the evaluator may have set them
        except GradingError as error:
            kind = "GRADING_TIMEOUT" if isinstance(error, GradingTimeout) else "GRADING_ERROR"
            episode.termination_reason, episode.reason = TerminationReason[kind], str(error)
            return
        episode.reward, episode.is_correct = output.reward, output.is_correct and output.reward is not None
        episode.signals |= {signal.name: signal.value for signal in output.signals}
        episode.metadata |= {"evaluator": output.metadata} if output.metadata else {}
        if output.reward is None:
            episode.termination_reason, episode.reason = TerminationReason.GRADING_ERROR, output.reason
            return
        for trajectory, reward in zip(episode.trajectories, rewards, strict=True):
            trajectory.reward = output.reward if reward is None else reward

    async def _verdict(self, task: Task, episode: Episode, deadline: Deadline) -> EvalOutput:
        limit = self.evaluator.timeout or self.config.grading_timeout
        if self.graders is not None:
            return await self.graders.grade(task, episode, deadline.remaining(), limit)
        limit = min(deadline.remaining(), limit)
        grader = self.evaluator

        async def work() -> EvalOutput:
            try:
                return verdict(await _call(grader, task, episode))
            except GradingError:
                raise
            except (Exception, SystemExit) as error:
                raise GradingError("evaluator failed: " + one_line(error, _file(grader.fn))) from error

        try:
            return await _within(work(), limit)
        except TimeoutError:
            raise GradingTimeout(f"evaluator did not end within {limit:.3g} s") from None


def _slug(task_id: str) -> str:
    """The id itself where it can stand in any URL, else its harmless part and a hash of the whole."""
    safe = re.sub(r"[^A-Za-z0-9._-]+", "_", task_id)[:48]
    return safe if safe == task_id else f"{safe}~{hashlib.sha256(task_id.encode()).hexdigest()[:12]}"


def _file(fn: Callable[..., Any]) -> str | None:
    code = getattr(inspect.unwrap(fn), "__code__", None)
    return code.co_filename if code is not None else None


async def _watch(files: set[str]) -> None:
    """Until cancelled: say so when a line of `files` blocks the event loop, which no deadline can end."""
    beats, loop_thread, over = [time.monotonic()], threading.get_ident(), threading.Event()

    def look() -> None:
        said = 0.0  # the last beat before what was said
        while not over.wait(PATIENCE / 4):
            frame = sys._current_frames().get(loop_thread)
            lines = [line for line in traceback.walk_stack(frame) if line[0].f_code.co_filename in files]
            if lines and beats[-1] != said and time.monotonic() - beats[-1] > PATIENCE:
                said = beats[-1]
                logger.warning(
                    "%s line %d has blocked everything for %.3g s: an async agent or evaluator must not make blocking "
                    "calls; use an async client, or a plain def, which runs in a thread.",
                    Path(lines[0][0].f_code.co_filename).name, lines[0][1], PATIENCE,
                )  # fmt: skip

    threading.Thread(target=look, name="watch", daemon=True).start()
    try:
        while True:
            beats[-1] = time.monotonic()
            await asyncio.sleep(PATIENCE / 4)
    finally:
        over.set()


async def _within(work: Any, seconds: float) -> Any:
    """The result of the coroutine `work`. Raises TimeoutError after `seconds`, even if it ignores being cancelled."""
    task = asyncio.ensure_future(work)
    try:
        done, _ = await asyncio.wait({task}, timeout=seconds)
        if done:
            return task.result()
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait({task}, timeout=GRACE)
    raise TimeoutError


async def _call(fn: AgentFlow | Evaluator, *args: Any) -> Any:
    """What the user's function returns, wherever it runs. A CancelledError of its own making is an error like any."""
    try:
        result = fn(*args) if fn.is_async else await _in_thread(fn, *args)
        return await result if inspect.isawaitable(result) else result
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():  # ours: the deadline, or the end of the run
            raise
        raise RuntimeError(f"CancelledError: {error}").with_traceback(error.__traceback__) from None


def _in_thread(fn: Callable[..., Any], *args: Any) -> Awaitable[Any]:
    """Call `fn` in a thread of its own, not a pool's: one that hangs must hold no slot and not stop the exit."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def settle(result: Any, error: BaseException | None) -> None:
        if future.done():  # cancelled at the deadline
            return
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)

    def work() -> None:
        result: Any = None
        failure: BaseException | None = None
        try:
            result = fn(*args)
        except BaseException as error:  # carried to the loop, where it is raised again
            failure = error
            if isinstance(error, StopIteration) or not isinstance(error, Exception | SystemExit):
                # the future could not hold it, or it would end the loop
                failure = RuntimeError(f"{type(error).__name__}: {error}").with_traceback(error.__traceback__)
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(settle, result, failure)

    threading.Thread(target=contextvars.copy_context().run, args=(work,), name="agent", daemon=True).start()
    return future


def _failed(why: TerminationReason, reason: str) -> Episode:
    return Episode(trajectories=[Trajectory()], termination_reason=why, reason=reason)


def _identify(episode: Episode, job: Job, session: Session) -> None:
    episode.id, episode.task, episode.task_id = f"{job.task.id}:{job.rollout_idx}", job.task, job.task.id
    episode.rollout_idx, episode.attempt, episode.session_id = job.rollout_idx, job.attempt, session.id
    episode.reward, episode.is_correct = None, False  # an evaluator's to say
    episode.metadata |= {"step": job.step, "validation": job.validation, "seed": list(session.seed_parts)}


def _join(episode: Episode, session: Session) -> str:
    """Fill the agent's steps from the captured calls, by call id. Returns what is wrong, or nothing.

    A single trajectory without step ids has all calls; its own steps, if any, lend them their labels (action, reward)
    in call order. Which tokens are trained on never depends on this order.
    """
    first, captured = episode.trajectories[0], session.steps
    if len(episode.trajectories) == 1 and not any(step.id for step in first.steps):
        if first.steps and len(first.steps) != len(captured):
            counts = f"{len(first.steps)} steps without ids for {len(captured)} model calls"
            return f"the agent returned {counts}: give each Step(id=response.id), or no steps"
        first.steps = [_fill(*pair) for pair in zip(first.steps or [Step() for _ in captured], captured, strict=True)]
        return ""
    owner: dict[str, str] = {}
    for trajectory in episode.trajectories:
        if not trajectory.steps:
            return (
                f"trajectory {trajectory.name!r} has no steps: of several, each needs its own, as Step(id=response.id)"
            )
        try:
            calls = session.claim(step.id for step in trajectory.steps)
        except UserError as error:
            return f"trajectory {trajectory.name!r}: {error}"
        for call in calls:
            if call.id in owner:
                return f"call {call.id} is claimed by trajectory {owner[call.id]!r} and again by {trajectory.name!r}"
            owner[call.id] = trajectory.name
        trajectory.steps = [_fill(*pair) for pair in zip(trajectory.steps, calls, strict=True)]
    episode.metrics["unclaimed_calls"] = float(len(captured) - len(owner))
    return ""


def _fill(label: Step, call: Step) -> Step:
    """The captured call with what the agent said about it."""
    return replace(
        call, input=label.input, output=label.output, action=label.action,
        reward=label.reward, done=label.done, metadata={**call.metadata, **label.metadata},
    )  # fmt: skip


def _measure(episode: Episode, session: Session, seconds: float) -> None:
    episode.metrics |= {
        "turns": float(len(session.steps)),
        "prompt_tokens": float(sum(step.prompt_length for step in session.steps)),
        "response_tokens": float(sum(step.response_length for step in session.steps)),
        "seconds": seconds,
        **{name: float(count) for name, count in session.counters.items()},
    }
