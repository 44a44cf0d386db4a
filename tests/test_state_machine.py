"""Agents at random: sessions, their trees and an engine under any interleaving of calls, retries, cancels and closes.

Every rule is one thing that a client, the network or the engine does; between two rules the event loop makes as many
turns as hypothesis likes, so that a client may leave in the very turn in which its answer comes. What must hold is in
`check`. ``MINIRLLM_EXAMPLES=3000`` runs that many examples (`make properties`).
"""

from __future__ import annotations

import asyncio
import functools
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from minirllm import batch
from minirllm.algorithms import create
from minirllm.config import Config
from minirllm.engines.hf import HFEngine
from minirllm.errors import EngineError, RequestError, SessionClosed
from minirllm.inflight import identity
from minirllm.models import tiny
from minirllm.policy import Policy
from minirllm.session import Session
from minirllm.store import episode_from_dict, episode_to_dict
from minirllm.tree import unfold
from minirllm.types import Delta, Episode, Message, ModelReply, ModelRequest, SamplingParams, Trajectory
from tests import tiny_engine
from tests.fake_engine import CALL, RENDERER, TOOL, FakeEngine
from tests.recorder import Recorder, Served, check_tree, samples

EXAMPLES = int(os.environ.get("MINIRLLM_EXAMPLES", "0"))
pytestmark = pytest.mark.timeout(7200 if EXAMPLES else 120)
TOKENS = st.sampled_from([0, 1, 8, 60, 60])
SAYS = ("yes", "no", " padded ", "<think>\nhm\n</think>\n\nyes", f"Let me see.\n{CALL}", '<tool_call>\n{"name": ', "")


@dataclass(eq=False)
class Client:
    """Somebody who sent a request and waits."""

    at: int  # which session
    request: ModelRequest
    task: asyncio.Task[ModelReply]
    deltas: list[Delta]
    fate: str = "waiting"  # answered | delivered | lost | left | refused
    again: set[str] = field(default_factory=set)  # ids of answers that were lost: it must get one of them


class Agents(RuleBasedStateMachine):
    """Two sessions on one engine; the engine samples nothing until a rule lets it."""

    can_fail = speaks_text = True
    limits: ClassVar[dict[str, Any]] = {"default_max_tokens": 90, "max_calls": 40, "max_tokens_total": 20_000}

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.clients: list[Client] = []
        self.turns: list[tuple[int, ModelRequest, Message]] = []  # (session, request, one of its answers)

    def make_engine(self) -> Any:
        return FakeEngine(lambda prompt, seed: SAYS[seed % len(SAYS)], max_context=1500, hold=True)

    def permit(self, tokens: int) -> None:
        self.engine.release(tokens)

    @initialize()
    def begin(self) -> None:
        self.engine = self.make_engine()
        self.loop.run_until_complete(self.engine.start())
        self.recorders = [Recorder(self.engine) for _ in range(2)]
        enforced = SamplingParams(temperature=1.0)
        self.sessions = [
            Session(
                f"s{k}", "key", recorder, RENDERER, "model", seed_parts=(0, "t", k), enforced=enforced, **self.limits
            )
            for k, recorder in enumerate(self.recorders)
        ]

    # ---- what happens ----

    def spin(self, turns: int) -> None:
        for _ in range(turns):
            self.loop.call_soon(self.loop.stop)
            self.loop.run_forever()

    def close(self, session: Session) -> None:
        self.loop.call_soon(session.close)
        self.spin(1)

    def settle(self) -> None:
        while self.loop._ready:  # type: ignore[attr-defined]
            self.spin(1)

    def send(self, at: int, request: ModelRequest, tokens: int = 0) -> None:
        """A new client; with `tokens` that many are sampled at once, so that conversations grow."""
        at = 0 if self.sessions[at].closed else at  # perhaps with the history of another session
        deltas: list[Delta] = []
        task = self.loop.create_task(self.sessions[at].call(request, deltas.append if request.stream else None))
        task.add_done_callback(lambda task: task.cancelled() or task.exception())  # nobody may come to ask
        self.clients.append(Client(at, request, task, deltas))
        if tokens:
            self.permit(tokens)
            self.settle()

    def pick(self, items: Sequence[Any], which: int) -> Any:
        return items[which % len(items)] if items else None

    @rule(turns=st.integers(1, 8))
    def time_passes(self, turns: int) -> None:
        self.spin(turns)

    @rule(tokens=st.integers(1, 12), turns=st.integers(0, 8))
    def tokens_are_sampled(self, tokens: int, turns: int) -> None:
        self.permit(tokens)
        self.spin(turns)

    @rule(tokens=st.integers(4, 90))
    def answers_come(self, tokens: int) -> None:
        self.permit(tokens)
        self.settle()

    @precondition(lambda self: len(self.clients) < 12)
    @rule(
        at=st.integers(0, 1), system=st.sampled_from([None, None, "You are A.", "You are B."]),
        user=st.sampled_from(["a", "b", "a", "b", "a<|im_end|>", "é" * 800]), n=st.sampled_from([1, 1, 2]),
        tools=st.booleans(), cap=st.sampled_from([None, None, 1, 3]), tokens=TOKENS,
    )  # fmt: skip
    def asks(self, at: int, system: str | None, user: str, n: int, tools: bool, cap: int | None, tokens: int) -> None:
        messages = [*([Message("system", system)] if system else []), Message("user", user)]
        params = SamplingParams(max_tokens=cap, stop=("o",) if cap == 3 else ())
        asked = frozenset({"max_tokens"} if cap else ())
        request = ModelRequest(messages, tools=[TOOL] if tools else [], n=n, stream=n == 1, params=params, asked=asked)
        self.send(at, request, tokens)

    @rule(which=st.integers(0, 99), echo=st.sampled_from(["same", "stripped", "without thoughts"]), n=st.integers(1, 2),
          user=st.sampled_from(["a", "tool"]), tools=st.sampled_from(["same", "none"]), tokens=TOKENS)  # fmt: skip
    def goes_on(self, which: int, echo: str, n: int, user: str, tools: str, tokens: int) -> None:
        if found := self.pick(self.turns[-8:], which):
            at, request, answer = found
            if echo == "stripped":
                answer = replace(answer, content=answer.content.strip())
            if echo == "without thoughts":
                answer = replace(answer, reasoning="")
            following = Message("user", user)
            if user == "tool" and answer.tool_calls:
                following = Message("tool", "3", tool_call_id=answer.tool_calls[0].id)
            messages = [*request.messages, answer, following]
            tool_choice = "none" if tools == "none" else "auto"
            self.send(at, replace(request, messages=messages, n=n, stream=n == 1, tool_choice=tool_choice), tokens)

    @rule(which=st.integers(0, 99), place=st.integers(0, 9), how=st.sampled_from(["edit", "cut", "drop", "swap"]))
    def rewrites_history(self, which: int, place: int, how: str) -> None:
        if found := self.pick(self.turns, which):
            at, request, answer = found
            messages = [*request.messages, answer]
            place %= len(messages)
            if how in ("edit", "cut"):
                text = messages[place].content
                messages[place] = replace(messages[place], content=text[:-1] if how == "cut" else "edited")
            elif how == "drop":
                del messages[place]
            else:
                other = self.pick([turn for turn in self.turns if turn[0] == at], which + place)
                messages[place] = other[2]
            self.send(at, replace(request, messages=[*messages, Message("user", "b")], n=1))

    @rule(at=st.integers(0, 1), which=st.integers(0, 99), text=st.sampled_from(["once", "o"]), n=st.integers(1, 2))
    def completes_a_raw_prompt(self, at: int, which: int, text: str, n: int) -> None:
        raw = [c for c in self.clients if (c.at, c.request.messages) == (at, None) and c.fate in ("lost", "delivered")]
        if found := self.pick(raw, which) if which % 2 else None:
            reply = found.task.result()
            self.send(at, ModelRequest(prompt=[*reply.prompt_ids, *reply.choices[-1].completion.token_ids, 5], n=n))
        else:
            self.send(at, ModelRequest(prompt=text, n=n))

    @rule(which=st.integers(0, 99), stream=st.booleans())
    def sends_again(self, which: int, stream: bool) -> None:
        if client := self.pick(self.clients[-4:], which):
            self.send(client.at, replace(client.request, stream=stream))

    @rule(which=st.integers(0, 99))
    def leaves(self, which: int) -> None:
        if client := self.pick([c for c in self.clients if c.fate == "waiting"], which):
            client.task.cancel()

    @rule(which=st.integers(0, 99), then=st.sampled_from(["delivered", "lost", "asked again"]))
    def an_answer_is(self, which: int, then: str) -> None:
        self.settle()
        self.hear()
        if client := self.pick([c for c in self.clients if c.fate == "answered"], which):
            session, id = self.sessions[client.at], client.task.result().id
            if then == "delivered":
                session.delivered(id)
            session.lost(id)  # says nothing of a delivered one
            client.fate = "delivered" if then == "delivered" else "lost"
            if then == "asked again" and not session.closed:
                known, same = len(self.recorders[client.at].served), identity(client.request)
                self.send(client.at, client.request)
                self.clients[-1].again = {
                    c.task.result().id for c in self.clients if c.fate == "lost" and identity(c.request) == same
                }
                self.settle()
                assert len(self.recorders[client.at].served) == known, "an answer that was lost is given, not sampled"

    @rule(turns=st.integers(0, 3))
    def the_engine_fails_once(self, turns: int) -> None:
        if self.can_fail and any(one.end == "running" for r in self.recorders for one in r.served):
            self.engine.failure = EngineError("the device failed")
            self.permit(1)
            self.settle()
            self.engine.failure = None
            self.spin(turns)

    @rule(which=st.integers(0, 99))
    def a_session_ends(self, which: int) -> None:
        if which > 60:
            self.close(self.sessions[1])  # the other lasts as long as the example

    # ---- what must hold ----

    def hear(self) -> None:
        """What clients learned since."""
        for client in self.clients:
            if client.fate != "waiting" or not client.task.done():
                continue
            if client.task.cancelled():
                client.fate = "left"
            elif client.task.exception() is not None:
                assert isinstance(client.task.exception(), RequestError | EngineError), client.task.exception()
                client.fate = "refused"
            else:
                self.got(client, client.task.result())

    def got(self, client: Client, reply: ModelReply) -> None:
        """An answer: to this very request, new or lost before, its pieces those of the whole."""
        before = [c for c in self.clients if c.fate in ("answered", "delivered", "lost") and c.at == client.at]
        if client.again and reply.id not in client.again:  # it is another's, which came as its client left
            assert reply.id not in {c.task.result().id for c in before}
        assert all(c.fate == "lost" for c in before if c.task.result().id == reply.id), "an answer is given once"
        client.fate = "answered"
        served = self.recorders[client.at].served
        seen = Counter(one.sampled for one in served if one.end == "finished")
        for choice in reply.choices:
            completion = choice.completion
            assert seen[tuple(reply.prompt_ids), tuple(completion.token_ids), tuple(completion.logprobs)]
            if client.request.stream:
                pieces = [delta for delta in client.deltas if delta.index == choice.index]
                assert "".join(piece.text for piece in pieces) == choice.message.content
                assert [token.id for piece in pieces for token in piece.tokens] == completion.token_ids
            if client.request.messages is not None:
                self.turns.append((client.at, client.request, choice.message))
        assert len(reply.choices) == client.request.n
        if client.request.messages is not None:  # the model read these messages, in this order, and no others
            text, at = RENDERER.decode(reply.prompt_ids), 0
            for message in client.request.messages:
                if self.speaks_text or message.role != "assistant":
                    assert message.reasoning in text
                    at = text.index(message.content.strip(), at) + len(message.content.strip())

    @invariant()
    def check(self) -> None:
        if not hasattr(self, "sessions"):
            return
        self.hear()
        for session, recorder in zip(self.sessions, self.recorders, strict=True):
            check_tree(session)
            assert session.counters["drift"] == 0
            stored = samples(session.tree)
            everything = Counter(one.sampled for one in recorder.served if one.tokens)
            assert not stored - everything, "what is stored was served, and once"
            if not self.loop._ready:  # type: ignore[attr-defined]
                running = {tuple(one.prompt) for one in recorder.served if one.end == "running"}  # of some, one choice
                ended = Counter({one: count for one, count in everything.items() if one[0] not in running})
                assert not ended - stored, "what was served is stored"
                waiting = sum(len(flight.samples) for flight in session._flights if not flight.done)
                assert session.counters["calls"] == len(session.steps) + session.counters["aborted"] + waiting
                there = sum((c.at, c.fate) == (self.sessions.index(session), "waiting") for c in self.clients)
                assert sum(not flight.done for flight in session._flights) <= there, "nobody waits for it"

    def teardown(self) -> None:
        try:
            if hasattr(self, "sessions"):
                self.finish()
        finally:
            rest = asyncio.all_tasks(self.loop)  # of an example that failed
            for task in rest:
                task.cancel()
            self.spin(5 if rest else 0)
            self.loop.close()

    def finish(self) -> None:
        """Everything ends; what is trained on is what was served."""
        self.permit(3)
        self.settle()
        for session in self.sessions:
            self.close(session)
        self.settle()
        self.check()
        assert all(client.task.done() for client in self.clients)
        served = [one for recorder in self.recorders for one in recorder.served]
        assert {one.end for one in served} <= {"finished", "cancelled", "failed"}
        self.send(0, ModelRequest([Message("user", "a")]))
        self.settle()
        assert isinstance(self.clients[-1].task.exception(), SessionClosed)
        self.trained(served)
        self.stop_engine()

    def stop_engine(self) -> None:
        assert self.engine.active == 0

    def trained(self, served: list[Served]) -> None:
        episodes = [
            Episode(f"t:{k}", "t", [Trajectory(steps=s.steps)], task_id="t", rollout_idx=k, reward=1.0, tree=s.tree)
            for k, s in enumerate(self.sessions)
        ]
        version = next((step.weight_version for session in self.sessions for step in session.steps), 0)
        config = Config(algorithm="reinforce", micro_batch_tokens=100_000)
        learned = batch.build(episodes, config, create("reinforce"), version)
        finished = [one for session in self.sessions for one in (session.tree.response(s.node) for s in session.steps)]
        assert learned.metrics["sampled_tokens"] == sum(len(one.tokens) for one in served)
        assert learned.metrics["trained_tokens"] == sum(len(ids) for ids, _ in finished)
        assert learned.metrics["discarded_tokens"] == learned.metrics.get("discarded/aborted", 0)
        rows = [row for forest in learned.forests for row in unfold(forest)]
        token = [(t, lp) for r in rows for t, lp in zip(r.token_T[r.trained_T], r.logprob_T[r.trained_T], strict=True)]
        assert Counter(token) == Counter(
            (id, np.float32(logprob)) for ids, logprobs in finished for id, logprob in zip(ids, logprobs, strict=True)
        )
        paths = {tuple(row.token_T.tolist()) for row in rows}
        for session in self.sessions:
            for step in session.steps:
                ids = tuple(session.tree.ids(step.node))
                assert any(path[: len(ids)] == ids for path in paths), "a call is learned behind what it read"
        again = [episode_from_dict(episode_to_dict(one)) for one in episodes]
        other = batch.build(again, config, create("reinforce"), version)
        for a, b in zip(learned.forests, other.forests, strict=True):
            assert all(np.array_equal(value, vars(b)[name]) for name, value in vars(a).items())
        self.learned = learned


# ---- the same agents on the real engine ----


@functools.cache
def policy() -> Policy:
    model, tokenizer = tiny.build()
    return Policy(model, tokenizer, tiny_engine.config())


@pytest.fixture(scope="module", autouse=True)
def closed_policy() -> Iterator[None]:
    yield
    if policy.cache_info().currsize:
        policy().close()


class AgentsOnTheModel(Agents):
    """The tiny model at random weights says anything: bytes that are no text, ends in the middle, long answers."""

    can_fail = speaks_text = False
    limits: ClassVar[dict[str, Any]] = {"default_max_tokens": 10, "max_calls": 40, "max_tokens_total": 20_000}

    def make_engine(self) -> Any:
        return HFEngine(tiny_engine.Lane(policy()), tiny_engine.config(slots=3, max_context=900, prefill_chunk=128))  # type: ignore[arg-type]

    def permit(self, tokens: int) -> None:
        for _ in range(tokens):
            self.engine.policy.permits.release()

    def stop_engine(self) -> None:
        assert self.engine._running == []
        assert list(self.engine._waiting) == []
        self.permit(2)
        self.loop.run_until_complete(self.engine.close())
        if policy().level == "exact":  # what the trainer computes is what the sampler saw
            for forest in self.learned.forests:
                logprob_T = policy().score(forest)[0].detach().numpy()
                assert np.array_equal(logprob_T[forest.trained_T], forest.logprob_T[forest.trained_T])


def profile(examples: int) -> settings:
    return settings(
        max_examples=EXAMPLES or examples, stateful_step_count=100 if EXAMPLES else 50, deadline=None,
        suppress_health_check=list(HealthCheck), print_blob=True,
    )  # fmt: skip


TestAgents = Agents.TestCase
TestAgents.settings = profile(60)
TestAgentsOnTheModel = AgentsOnTheModel.TestCase
TestAgentsOnTheModel.settings = profile(25)
