"""Run agents: one session, one deadline and one verdict per rollout; whatever goes wrong becomes data.

Owns: the life of an episode (open a session, run the agent, join its steps to the captured calls, grade, retry),
bounded concurrency. Does not know: HTTP, tokens, torch, what rewards are used for.

One deadline covers an episode: all attempts, agent and grader. An attempt that failed in the agent (it raised, returned
a wrong type, never called the model) is retried under a fresh session, key and seed; one that ran out of time or could
not be graded is not. One that the endpoint stopped (context full, calls used up) is over, and graded. An episode
without a reward always says why in `reason`.

Sync agents run in a thread each, async ones on the loop; how both are ended is the watchdog's. At the deadline the
session is closed: whoever outlives it has its further calls refused. Sync evaluators run in killable processes when
they can be imported there (see `rewards.process`), else in a thread; async ones on the loop.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import NamedTuple
from urllib.parse import quote

from minirllm import watchdog
from minirllm.ahead import Pace
from minirllm.config import Config
from minirllm.errors import EngineError, GradingError, GradingTimeout, UserError, message_of, one_line
from minirllm.flow import AgentFlow, Evaluator
from minirllm.recorded import AnySession
from minirllm.returns import as_episode, step_values, trajectory_rewards, verdict
from minirllm.rewards.process import Graders, reference
from minirllm.sessions import Sessions
from minirllm.types import AgentConfig, Episode, EvalOutput, SamplingParams, Step, Task, TerminationReason, Trajectory
from minirllm.watchdog import Deadline, Overdue, source, watched, within

logger = logging.getLogger(__name__)

RETRIED = frozenset({TerminationReason.ERROR, TerminationReason.NO_CALLS})
FAILED = frozenset({TerminationReason.ERROR, TerminationReason.TIMEOUT})  # the agent's work cannot be graded
OVERDUE = frozenset({TerminationReason.TIMEOUT, TerminationReason.GRADING_TIMEOUT})
REFUSED = {  # codes of the errors by which the endpoint stops an agent: it has ended, and is graded
    "context_length_exceeded": TerminationReason.MAX_PROMPT_LENGTH_EXCEEDED,
    "insufficient_quota": TerminationReason.MAX_TURNS_EXCEEDED,
}
OnEpisode = Callable[[Episode], None]


class Job(NamedTuple):
    """One rollout to run."""

    task: Task
    rollout_idx: int = 0
    step: int = 0
    validation: bool = False
    attempt: int = 0  # the first one to make: those before it have failed
    dropped: int = 0  # tokens that failed attempts had sampled
    weights: Pace | None = None  # which of them answer; None: the policy's own

    @property
    def key(self) -> tuple[str, int]:
        """Which one of its step: task id and rollout."""
        return self.task.id, self.rollout_idx

    def after(self, failed: Episode) -> Job:
        """The same with the next attempt."""
        tokens = int(failed.metrics["retried_tokens"]) + failed.tree.num_sampled
        return self._replace(attempt=failed.attempt + 1, dropped=tokens)


class _Slot:
    """A rollout's place among those in flight. One that waits for weights gives it away meanwhile: those that wait
    must not keep out the rollouts that they wait for."""

    def __init__(self, slots: asyncio.Semaphore):
        self.slots, self.held, self._taking = slots, False, asyncio.Lock()

    async def take(self) -> None:
        """Wait for one, unless it is held: calls at once of a rollout need one between them."""
        async with self._taking:
            if not self.held:
                await self.slots.acquire()
                self.held = True

    def leave(self) -> None:
        """Give it away, if it is held."""
        if self.held:
            self.slots.release()
        self.held = False

    def around(self, pace: Pace) -> Callable[[int], Awaitable[int]]:
        """`pace`, without the place for as long as it waits."""

        async def weights(depth: int) -> int:
            if not pace.ready(depth):
                self.leave()
                await pace(depth)
                await self.take()
            return await pace(depth)

        return weights


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
            episode = await self.run(job, on_retry)
            on_done(episode)
            return episode

        code = (source(self.flow.fn), source(self.evaluator.fn))
        ahead = self.flow.ahead([job.task for job in jobs], self.base_url)
        async with ahead, watched(code, self.config.episode_timeout):
            tasks = [asyncio.ensure_future(one(job)) for job in jobs]
            try:
                return list(await asyncio.gather(*tasks))
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def run(self, job: Job, on_retry: OnEpisode = lambda _: None) -> Episode:
        """One graded episode: what fails is in `termination_reason` and `reason`. An engine that fails is nothing which
        the agent did: the same attempt is made again, with the same seeds. Raises EngineError when it keeps failing."""
        slot = _Slot(self.slots)
        await slot.take()
        deadline, failures = Deadline(self.config.episode_timeout), 0
        self.in_flight += 1
        try:
            while True:
                session = self._open(job, failures, slot)
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
            slot.leave()

    async def _attempt(self, job: Job, session: AnySession, deadline: Deadline) -> Episode:
        began = time.monotonic()
        try:
            episode = await self._agent(job.task, self._agent_config(job, session, deadline), deadline, session)
        finally:
            self.sessions.close(session.id)  # late calls, of a thread left behind say, are refused
        if session.failure is not None:
            raise session.failure
        _identify(episode, job, session)
        own = [step for step in session.steps if not step.auxiliary]
        if episode.termination_reason in FAILED or not own:
            episode.trajectories[0].steps = list(session.steps)  # what it had done can be read
        elif problem := _join(episode, session):
            episode.termination_reason, episode.reason = TerminationReason.ERROR, problem
        calls = own or self.flow.silent
        if not calls and episode.termination_reason is TerminationReason.ENV_DONE:
            episode.termination_reason = TerminationReason.NO_CALLS
            ended = f"; {episode.artifacts['ended']}" if "ended" in episode.artifacts else ""
            did = "made auxiliary calls only" if session.steps else "never called the model at config.base_url"
            if session.refusal and not session.steps:
                did = f"was refused every call ({session.refusal.rstrip('.')})"
            episode.reason = f"the agent {did}, so there is nothing to learn from{ended}"
        episode.tree = session.tree
        if calls and episode.termination_reason not in FAILED:
            await self._grade(job.task, episode, deadline)
        if episode.termination_reason in OVERDUE:
            where = (job.task.id, job.rollout_idx, job.attempt)
            logger.warning("task %r, rollout %d, attempt %d: %s", *where, episode.reason)
        _measure(episode, session, time.monotonic() - began)
        return episode

    def _open(self, job: Job, failures: int, slot: _Slot) -> AnySession:
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
            weights=slot.around(job.weights) if job.weights else None,
            auxiliary=self.flow.auxiliary,
        )

    def _agent_config(self, job: Job, session: AnySession, deadline: Deadline) -> AgentConfig:
        temperature = self.config.eval_temperature if job.validation else self.config.temperature
        return AgentConfig(
            base_url=f"{self.base_url}/sessions/{quote(session.id, safe='')}/v1",
            model=session.model,
            api_key=session.key,
            session_uid=session.id,
            metadata={
                "timeout": deadline.remaining(),
                "rollout_idx": job.rollout_idx,
                "step": job.step,
                "ahead": job.step % (self.config.lag + 1),  # among the steps whose rollouts run at one time
                "max_context": session.max_context,
                "max_tokens": session.default_max_tokens,
                "date": self.config.date,
            },
            is_validation=job.validation,
            sampling_params={"temperature": temperature},
        )

    async def _agent(self, task: Task, config: AgentConfig, deadline: Deadline, session: AnySession) -> Episode:
        """What the agent returned, or why it did not. Here an agent's failure becomes data."""

        async def work() -> Episode:
            try:
                return as_episode(await watchdog.call(self.flow, self.flow.is_async, task, config))
            except (Exception, SystemExit) as error:
                said = message_of(error)
                why = next((reason for code, reason in REFUSED.items() if code in said), TerminationReason.ERROR)
                return _failed(why, "agent failed: " + one_line(error, source(self.flow.fn)))

        try:
            return await within(work(), deadline.remaining(), source(self.flow.fn), session.waiting)
        except Overdue as overdue:
            return _failed(TerminationReason.TIMEOUT, f"agent did not end within {deadline.seconds:.3g} s{overdue}")

    async def _grade(self, task: Task, episode: Episode, deadline: Deadline) -> None:
        """Fills in the verdict, or why there is none."""
        try:
            output = await self._verdict(task, episode, deadline)
            rewards, known = trajectory_rewards(episode), step_values(episode)  # the evaluator may have set them
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
        for step, values in zip(episode.steps, known, strict=True):
            step.reward, step.advantage = values

    async def _verdict(self, task: Task, episode: Episode, deadline: Deadline) -> EvalOutput:
        limit = self.evaluator.timeout or self.config.grading_timeout
        if self.graders is not None:
            return await self.graders.grade(task, episode, deadline.remaining(), limit)
        limit = min(deadline.remaining(), limit)
        grader = self.evaluator

        async def work() -> EvalOutput:
            try:
                return verdict(await watchdog.call(grader, grader.is_async, task, episode))
            except GradingError:
                raise
            except (Exception, SystemExit) as error:
                raise GradingError("evaluator failed: " + one_line(error, source(grader.fn))) from error

        try:
            return await within(work(), limit, source(grader.fn))
        except Overdue as overdue:
            raise GradingTimeout(f"evaluator did not end within {limit:.3g} s{overdue}") from None


def _slug(task_id: str) -> str:
    """The id itself where it can stand in any URL, else its harmless part and a hash of the whole."""
    safe = re.sub(r"[^A-Za-z0-9._-]+", "_", task_id)[:48]
    return safe if safe == task_id else f"{safe}~{hashlib.sha256(task_id.encode()).hexdigest()[:12]}"


def _failed(why: TerminationReason, reason: str) -> Episode:
    return Episode(trajectories=[Trajectory()], termination_reason=why, reason=reason)


def _identify(episode: Episode, job: Job, session: AnySession) -> None:
    episode.id, episode.task, episode.task_id = f"{job.task.id}:{job.rollout_idx}", job.task, job.task.id
    episode.rollout_idx, episode.attempt, episode.session_id = job.rollout_idx, job.attempt, session.id
    episode.reward, episode.is_correct = None, False  # an evaluator's to say
    episode.metadata |= {"step": job.step, "validation": job.validation, "seed": list(session.seed_parts)}


def _join(episode: Episode, session: AnySession) -> str:
    """Fill the agent's steps from the captured calls, by call id. Returns what is wrong, or nothing.

    A single trajectory without step ids has all calls; its own steps, if any, lend them their labels (action, reward)
    in call order, but for auxiliary ones. Which tokens are trained on never depends on this order.
    """
    first, own = episode.trajectories[0], {step.id for step in session.steps if not step.auxiliary}
    if len(episode.trajectories) == 1 and not any(step.id for step in first.steps):
        if first.steps and len(first.steps) != len(own):
            counts = f"{len(first.steps)} steps without ids for {len(own)} model calls"
            return f"the agent returned {counts}: give each Step(id=response.id), or no steps"
        labels = iter(first.steps)
        first.steps = [_fill(next(labels, Step()) if call.id in own else Step(), call) for call in session.steps]
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
    episode.metrics["unclaimed_calls"] = float(len(own - owner.keys()))
    return ""


def _fill(label: Step, call: Step) -> Step:
    """The captured call with what the agent said about it."""
    return replace(
        call, input=label.input, output=label.output, action=label.action,
        reward=label.reward, advantage=label.advantage, done=label.done, metadata={**label.metadata, **call.metadata},
    )  # fmt: skip


def _measure(episode: Episode, session: AnySession, seconds: float) -> None:
    episode.metrics |= {
        "turns": float(sum(not step.auxiliary for step in session.steps)),
        "prompt_tokens": float(sum(step.prompt_length for step in session.steps)),
        "response_tokens": float(sum(step.response_length for step in session.steps)),
        "seconds": seconds,
        **{name: float(count) for name, count in session.counters.items()},
    }
