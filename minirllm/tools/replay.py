"""``minirllm replay``: compute a run again from its folder alone, and say where it comes out otherwise.

Owns: which weights a step is computed from and how they are derived, what is compared, what is promised.
Does not know: agents, graders, tasks: their doings are recorded, not repeated. Writes nothing.

A call is sampled again by the engine from its prompt ids, its parameters and its seed, which its id proves. An update
is made again from the recorded episodes. The weights before a step are those of the newest earlier checkpoint, or of
the run's seed, and of every update between, made again and compared on the way. What the run's manifest says of level,
threads, device and model's revision holds for the replay.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections import Counter
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from minirllm import checkpoint, penalty
from minirllm.ahead import History
from minirllm.algorithms import roles
from minirllm.config import Config, nearest
from minirllm.errors import LedgerError, UserError
from minirllm.inflight import identify, prompt_digest
from minirllm.log import MANIFEST, changes
from minirllm.machine import machine
from minirllm.stack import Stack
from minirllm.teachers.teacher import serving
from minirllm.tools.runs import Call, Run, calls, equal, page, part, write
from minirllm.trainer import Trainer
from minirllm.types import Completion, Episode

PROMISES = {
    "exact": "every call and every update comes out the same on this kind of machine, whatever runs beside it",
    "fixed": "every call and every update comes out the same on this very kind of machine, with as many slots",
    "off": "no promise was made: a call's bits depend on the calls beside it; updates are still computed again",
}
SAMPLING = "hf"  # the engine whose calls can be sampled again; a script or a remote server is not in the folder
FACTS = ("config", "level", "threads", "device", "model", "model_revision")  # of the manifest, needed to begin
SENT_AGAIN = 1000  # how often one prompt may have been sent in a session, at most

Wanted = dict[int, set[str] | None]  # step -> ids of calls; None: all of them, and the update


class Differs(Exception):
    """Where the replay left the record."""

    def __init__(self, step: int, place: str, recorded: Any, replayed: Any):
        super().__init__(f"step {step}, {place}:\n  recorded: {recorded}\n  replayed: {replayed}")
        self.step = step


@dataclass
class _Held:
    """What computes, and the configuration that it was made with."""

    config: Config
    stack: Stack
    trainer: Trainer
    history: History


def replay(
    folder: Path,
    *,
    step: int | None = None,
    episode: str | None = None,
    call: str | None = None,
    console: Console | None = None,
) -> bool:
    """Replay a call, an episode's calls, a step, or all steps that can be derived. True when everything matches.

    Raises UserError for what is not in the folder, and when the folder does not hold enough to derive it.
    """
    run = Run(folder)
    lacking = [name for name in FACTS if name not in run.manifest]
    if lacking:
        raise UserError(
            f"{folder}: {MANIFEST} does not say {', '.join(lacking)}, so its first step cannot be begun again."
        )
    wanted = select(run, step, episode, call)
    with tempfile.TemporaryDirectory() as between:
        return asyncio.run(_Replay(run, page(console), Path(between)).all(wanted))


def select(run: Run, step: int | None, episode: str | None, call: str | None) -> Wanted:
    """What is asked for, by step. Raises UserError naming the nearest that there is."""
    if not run.steps:
        raise UserError(f"{run.folder} holds no step yet.")
    if step is not None and step not in run.steps:
        near = min(run.steps, key=lambda there: abs(there - step))
        raise UserError(
            f"{run.folder} has no step {step}: it has {run.steps[0]} to {run.steps[-1]}; {near} is nearest."
        )
    steps = run.steps if step is None else [step]
    name = call or episode
    if name is None:
        return dict.fromkeys(steps)
    found: Wanted = {}
    names: set[str] = set()
    for number in steps:
        for one in run.episodes(number):
            ids = [known.id for known in calls(one)]
            names.update(ids if call else (one.id, one.session_id))
            if call in ids or (not call and name in (one.id, one.session_id)):
                found[number] = {call} if call else set(ids)
    kind, where = "call" if call else "episode", "" if step is None else f" in step {step}"
    if not found:
        raise UserError(f"{run.folder} has no {kind} {name!r}{where}{nearest(name, sorted(names))}.")
    if len(found) > 1:
        raise UserError(f"{kind} {name!r} is in steps {', '.join(map(str, found))}: name one with --step.")
    return found


def config_of(run: Run, step: int) -> Config:
    """The options that `step` ran under, with what the start of the run found out (level, threads, ...) fixed."""
    facts = run.facts(step)
    revision = facts["model_revision"]
    fixed = {
        "model": facts["model"] + (f"@{revision}" if revision else ""),
        "determinism": facts["level"],
        "threads": facts["threads"],
        "device": facts["device"].partition(":")[0],
        "engine": SAMPLING,
    }
    return replace(run.config(step), **fixed)


def seed_of(episode: Episode, call: Call, most: int) -> int | None:
    """The seed of a call, by the hash that also made its id; None when no seed belongs to this id and prompt."""
    parts, digest = tuple(episode.metadata["seed"]), prompt_digest(call.prompt_ids)
    for both in range(min(most, SENT_AGAIN)):
        for nth in range(both + 1):
            name, seed = identify(parts, digest, nth, both - nth)
            if name == call.id:
                return seed
    return None


class _Replay:
    """The weights of one moment of a run after another. `done` steps lie behind them; -1: there are none yet."""

    def __init__(self, run: Run, console: Console, between: Path):
        self.run, self.console, self.between = run, console, between
        self.done = -1
        self._held: _Held | None = None
        self.exit = AsyncExitStack()
        self.seen: Counter[str] = Counter()
        self.samples = run.manifest["config"].get("engine", SAMPLING) == SAMPLING

    @property
    def held(self) -> _Held:
        assert self._held is not None, "nothing is computed before the first weights are there"
        return self._held

    async def all(self, wanted: Wanted) -> bool:
        """Everything in `wanted`, until the first difference."""
        manifest = self.run.manifest
        title = f"{self.run.folder}: task {manifest.get('task', '?')}, level {manifest['level']}"
        write(self.console, f"{title}: {PROMISES[manifest['level']]}.")
        if not self.samples:
            sentence = f"The calls of engine {manifest['config']['engine']} cannot be sampled again"
            if any(ids is not None for ids in wanted.values()):
                raise UserError(f"{sentence}: name a --step, whose update is replayed.")
            write(self.console, f"{sentence}: only updates are replayed.")
        async with self.exit:
            try:
                for step, ids in wanted.items():
                    if reason := await asyncio.to_thread(self._underivable, step):
                        if len(wanted) == 1:
                            raise UserError(reason)
                        write(self.console, reason)
                        continue
                    await self._before(step)
                    await self._step(step, ids)
            except Differs as difference:
                write(self.console, f"\nFirst difference: {difference}", "bold")
                write(self.console, await asyncio.to_thread(self._around, difference.step))
                return False
        counts = ", ".join(f"{count} {name}" for name, count in self.seen.items())
        write(self.console, f"\nMatch: {counts or 'nothing could be replayed'}.")
        return True

    def _underivable(self, step: int) -> str:
        """Why the weights before `step` cannot be had, in a sentence; empty when they can."""
        if self.done == step - 1:
            return ""
        begin = _origin(self.run, step)[1]
        for earlier in range(begin + 1, step):
            if lacking := self._lacking(earlier):
                return (
                    f"Step {step} of {self.run.folder} cannot be derived: {lacking}, "
                    f"and no whole checkpoint of steps {earlier} to {step - 1} is kept."
                )
        return ""

    def _lacking(self, step: int) -> str:
        """What is missing to make the update of `step` again; empty when nothing is."""
        row = self.run.rows.get(step)
        if row is None:
            return f"step {step} was not finished"
        there = len(self.run.store.finished(step))
        made = row.get("episodes", there)
        return "" if there == made else f"step {step} has {there} of its {made:.0f} episodes"

    async def _before(self, step: int) -> None:
        """Hold the weights that `step` began with. Raises Differs."""
        if self.done != step - 1:
            path, self.done = await asyncio.to_thread(_origin, self.run, step)
            await self._open(config_of(self.run, self.done + 1), path)
            row, policy = self.run.rows.get(self.done, {}), self.held.stack.policy
            digest = await policy.run(policy.weights_sha256)
            if path is not None and row.get("weights_sha256", digest) != digest:
                raise Differs(self.done, f"weights in {path.name}", row["weights_sha256"], digest)
            for earlier in range(self.done + 1, step):
                await self._update(earlier)
                write(self.console, f"step {earlier}: its update matches")
        await self._under(config_of(self.run, step))

    async def _step(self, step: int, ids: set[str] | None) -> None:
        """The calls of a step and, when all of them are wanted, its update."""
        row, said, began = self.run.rows.get(step, {}), [], time.perf_counter()
        if self.samples:
            count, tokens = await self._calls(step, ids)
            took = f" in {row['seconds_generate']:.1f} s" if ids is None and "seconds_generate" in row else ""
            said.append(f"{count} calls with {tokens} tokens match ({time.perf_counter() - began:.1f} s; made{took})")
            self.seen += Counter(calls=count, tokens=tokens)
        if ids is None and (lacking := await asyncio.to_thread(self._lacking, step)):
            said.append(f"no update to compare: {lacking}")
        elif ids is None:
            began = time.perf_counter()
            await self._update(step)
            took = f"{time.perf_counter() - began:.1f} s; made in {row['seconds_train']:.1f} s"
            said.append(f"its update matches ({took}), weights {row['weights_sha256'][:12]}")
            self.seen["updates"] += 1
        write(self.console, f"step {step}: {', '.join(said)}")

    # -- calls --------------------------------------------------------------------------------------------------------

    async def _calls(self, step: int, ids: set[str] | None) -> tuple[int, int]:
        """Sample the calls of `step` again, all at once. Returns how many, and their tokens. Raises Differs."""
        recorded = [
            (episode, call)
            for episode in await asyncio.to_thread(self.run.episodes, step)
            for call in calls(episode)
            if ids is None or call.id in ids
        ]
        older = next((call for _, call in recorded if call.params is None), None)
        if older is not None:
            raise UserError(
                f"Call {older.id} of {self.run.folder} was recorded without its sampling parameters, by an older "
                "version of minirllm: it cannot be sampled again."
            )
        answers = await asyncio.gather(*[self._sample(episode, call) for episode, call in recorded])
        for (episode, call), answer in zip(recorded, answers, strict=True):
            where = f"episode {episode.id}, call {call.id}"
            if answer is None:
                told = "its prompt, its id or the episode's seed was changed"
                raise Differs(step, f"{where}: {told}", f"id {call.id}", "no seed gives this prompt this id")
            version = answer.weight_version if call.version >= 0 else call.version
            again = Call(call.id, call.prompt_ids, answer.token_ids, answer.logprobs, answer.temperature, version)
            if found := part(call, again):
                raise Differs(step, f"{where}, {found[0]}", *found[1:])
            if call.step is not None:
                reason = "stop" if call.step.finish_reason == "tool_calls" else call.step.finish_reason
                if reason != answer.finish_reason:
                    raise Differs(step, f"{where}, finish reason", reason, answer.finish_reason)
        return len(recorded), sum(len(call.token_ids) for _, call in recorded)

    async def _sample(self, episode: Episode, call: Call) -> Completion | None:
        """What the engine says now. None when the call's seed cannot be told."""
        assert call.params is not None
        params, stack = call.params, self.held.stack
        seed = seed_of(episode, call, self.held.config.max_calls)
        if seed is None:
            return None
        if params.max_tokens == 0:  # its client left before the first token: there is nothing to compare
            return Completion([], [], "abort", call.version, call.temperature)
        stop = stack.renderer.stop_check(params.stop)
        kept, first = stack.policy.kept, self.held.history.sampling(self.done + 1).version
        weights = None if not kept else call.version if call.version in kept else first
        return await stack.engine.generate(call.prompt_ids, params, seed, stop=stop, weights=weights)

    # -- weights ------------------------------------------------------------------------------------------------------

    async def _update(self, step: int) -> None:
        """Make the update of `step` again, from the weights before it. Raises Differs."""
        await self._under(config_of(self.run, step))
        trainer, row = self.held.trainer, self.run.rows[step]
        try:
            episodes = await asyncio.to_thread(self.run.episodes, step)
            taught = await self.held.stack.teach(episodes)
            learned = await penalty.build(step, episodes, trainer, self.held.history)
            learned.metrics |= taught
        except LedgerError as error:
            raise Differs(step, "its episodes", "trained on", f"refused: {error}") from None
        metrics = await trainer.update(learned)
        weights = await self.held.history.add(step, learned.means)
        self.held.stack.engine.weights_changed()
        found = {**learned.metrics, **metrics, "weight_version": weights.version, "weights_sha256": weights.sha256}
        for name, value in found.items():
            if name in row and not name.startswith("seconds_") and not equal(row[name], value):
                raise Differs(step, name, row[name], value)
        self.done = step

    async def _open(self, config: Config, weights: Path | None) -> None:
        """Begin with the weights of a checkpoint, or of the seed."""
        await self.exit.aclose()
        stack = await self.exit.enter_async_context(serving(config))
        trainer = Trainer(stack.policy, config, roles.of(config))
        self._held = _Held(config, stack, trainer, History(stack.policy, config))
        extra: dict[str, Any] = {}
        if weights is not None:
            extra = await stack.policy.run(checkpoint.load, weights, stack.policy, trainer)
        await self.held.history.restore(self.done, extra.get("sampling", {}))

    async def _under(self, config: Config) -> None:
        """Go on as a run that was resumed with other options did: through a checkpoint."""
        if config == self.held.config:
            return
        policy, trainer, state = self.held.stack.policy, self.held.trainer, {"sampling": self.held.history.state()}
        await self._open(config, await policy.run(checkpoint.save, self.between, self.done, policy, trainer, state))

    def _around(self, step: int) -> str:
        """What of this machine is not as the manifest says: the first suspects."""
        here = {**self.held.stack.facts, **machine()}
        changed = self.run.changes_before(step)
        there = {name: value for name, value in self.run.manifest.items() if name in here}
        now = {
            name: (old, new)
            for name, (old, new) in changes(there, here).items()
            if name not in changed or changed[name][1] != new
        }
        if now:
            listed = ", ".join(f"{name} {old!r} -> {new!r}" for name, (old, new) in now.items())
            return f"Not as when the run was made: {listed}."
        if self.run.manifest["level"] == "off":
            return "The run was made with determinism = off: such differences are to be expected."
        return "Machine and versions are those of the manifest, so a file of the run was changed after it was written."


def _origin(run: Run, step: int) -> tuple[Path | None, int]:
    """The newest whole checkpoint before `step`, and how many steps it has behind it; none at all for the seed's."""
    path = checkpoint.newest(run.folder / "checkpoints", until=step - 1)[0]
    return path, int(path.name.rpartition("_")[2]) if path else 0
