"""Sessions: every request ends in the right branch with the right tokens, whatever agents and connections do."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import Any

import pytest

from minirllm import tiny
from minirllm.errors import (
    ContextOverflow,
    EngineError,
    QuotaExceeded,
    RequestError,
    SessionClosed,
    UnknownSession,
    UserError,
)
from minirllm.renderer import Renderer
from minirllm.session import Session, Sessions
from minirllm.tree import merge
from minirllm.types import Completion, Delta, Message, ModelReply, ModelRequest, SampledToken, SamplingParams, StopCheck

RENDERER = Renderer(tiny.build_tokenizer())
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


def logprob(prompt: Sequence[int], seed: int, position: int) -> float:
    """A number that only this token of this call has."""
    digest = blake2b(repr((list(prompt), seed, position)).encode(), digest_size=4).digest()
    return -int.from_bytes(digest, "big") / 2**32


class FakeEngine:
    """Says `answer(prompt text, seed)`. With `hold`, each token waits for a `release`."""

    def __init__(self, answer: Callable[[str, int], str] | None = None, max_context: int = 4000, hold: bool = False):
        self.answer = answer or (lambda prompt, seed: f"answer {seed % 997}")
        self.max_context, self.vocab_size = max_context, len(RENDERER.tokenizer)
        self.calls: list[tuple[list[int], SamplingParams, int]] = []
        self.completions: list[tuple[list[int], Completion]] = []
        self.active = self.cancelled = 0
        self.failure: Exception | None = None
        self._permits = asyncio.Semaphore(0) if hold else None

    def release(self, tokens: int = 10_000) -> None:
        assert self._permits is not None
        for _ in range(tokens):
            self._permits.release()

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    def weights_changed(self) -> None: ...

    async def generate(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        seed: int,
        *,
        stop: StopCheck | None = None,
        on_token: Callable[[SampledToken], None] | None = None,
    ) -> Completion:
        self.calls.append((list(prompt_ids), params, seed))
        self.active += 1
        try:
            text = self.answer(RENDERER.decode(list(prompt_ids)), seed)
            planned = [*RENDERER.encode(text), min(RENDERER.eos_ids)]
            ids: list[int] = []
            logprobs: list[float] = []
            reason = "length"
            for token in planned[: params.max_tokens]:
                await (self._permits.acquire() if self._permits else asyncio.sleep(0))
                if self.failure is not None:
                    raise self.failure
                ids.append(token)
                logprobs.append(logprob(prompt_ids, seed, len(ids)))
                if on_token is not None:
                    on_token(SampledToken(token, logprobs[-1]))
                if token in RENDERER.eos_ids or (stop is not None and stop(ids)):
                    reason = "stop"
                    break
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.active -= 1
        completion = Completion(ids, logprobs, reason, 7, params.temperature)  # type: ignore[arg-type]
        self.completions.append((list(prompt_ids), completion))
        return completion


def session(engine: FakeEngine | None = None, **settings: Any) -> Session:
    settings = {"seed_parts": (0, "task", 1, 0), **settings}
    return Session("s", "key", engine or FakeEngine(), settings.pop("renderer", RENDERER), "model", **settings)


def chat(*texts: str, **fields: Any) -> ModelRequest:
    """A request whose messages alternate: user, assistant, user ..."""
    roles = ("user", "assistant")
    return ModelRequest(messages=[Message(roles[i % 2], text) for i, text in enumerate(texts)], **fields)


def said(reply: ModelReply) -> str:
    return reply.choices[0].message.content


async def ask(s: Session, request: ModelRequest) -> ModelReply:
    """A call whose answer reaches its client."""
    reply = await s.call(request)
    s.delivered(reply.id)
    return reply


def check(s: Session) -> None:
    """Every step names the tokens that the engine read and sampled."""
    assert isinstance(s.engine, FakeEngine)
    seen = {(tuple(prompt), tuple(c.token_ids), tuple(c.logprobs)) for prompt, c in s.engine.completions}
    assert len(seen) == len(s.engine.completions)
    for step in s.steps:
        assert step.node is not None
        prompt, (ids, logprobs) = s.tree.prompt_ids(step.node), s.tree.response(step.node)
        assert (tuple(prompt), tuple(ids), tuple(logprobs)) in seen
        assert (step.prompt_length, step.response_length, step.weight_version) == (len(prompt), len(ids), 7)


async def test_a_growing_conversation_is_one_path_of_the_tree() -> None:
    s = session()
    first = await ask(s, chat("one"))
    second = await ask(s, chat("one", said(first), "two"))
    third = await ask(s, chat("one", said(first), "two", said(second), "three"))
    check(s)
    for before, after in ((first, second), (second, third)):
        held = before.prompt_ids + before.choices[0].completion.token_ids
        assert after.prompt_ids[: len(held)] == held
    assert s.tree.num_tokens == len(third.prompt_ids) + len(third.choices[0].completion.token_ids)
    assert merge([s.tree])[0].paths() == [[(0, s.tree.num_tokens)]]
    assert [step.parent for step in s.steps] == [None, s.steps[0].id, s.steps[1].id]
    assert [[m.content for m in step.messages] for step in s.steps] == [["one"], ["two"], ["three"]]
    assert s.steps[0].response == first.choices[0].message
    assert first.id == f"chatcmpl-{s.steps[0].id}"
    counted = {name: count for name, count in s.counters.items() if count}
    assert counted == {"calls": 3, "conversations": 1, "extended": 2}


async def test_echoed_answers_match_though_white_space_and_ids_changed() -> None:
    s = session(FakeEngine(lambda prompt, seed: " padded " if "tools" not in prompt else CALL))
    await ask(s, chat("one"))
    await ask(s, chat("one", "padded", "two"))
    assert s.counters["extended"] == 1


async def test_tool_calls_round_trip_and_have_ids_unique_in_the_session() -> None:
    s = session(FakeEngine(lambda prompt, seed: f"Let me see.\n{CALL}"))
    request = chat("sum", tools=[TOOL])
    reply = await ask(s, request)
    choice = reply.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert [(call.name, call.arguments) for call in choice.message.tool_calls] == [("add", '{"a": 1}')]
    assert choice.message.tool_calls[0].id == f"call_{choice.call_id}_0"
    assert request.messages is not None
    result = Message("tool", "3", tool_call_id=choice.message.tool_calls[0].id)
    following = await ask(s, replace(request, messages=[*request.messages, choice.message, result]))
    assert s.counters["extended"] == 1
    assert following.choices[0].message.tool_calls[0].id != choice.message.tool_calls[0].id
    await ask(s, replace(request, messages=[*request.messages, choice.message, result], tool_choice="none"))
    assert s.counters["conversations"] == 2, "a call with other tools is not continued"
    assert s.steps[-1].response is not None
    assert not s.steps[-1].response.tool_calls
    check(s)


async def test_a_malformed_tool_call_is_text_and_counted() -> None:
    s = session(FakeEngine(lambda prompt, seed: '<tool_call>\n{"name": "add", "argu\n</tool_call>'))
    reply = await ask(s, chat("sum", tools=[TOOL]))
    assert reply.choices[0].message.malformed
    assert "argu" in said(reply)
    assert s.counters["malformed_tool_calls"] == 1


async def test_parallel_calls_and_sub_agents_are_branches_whatever_their_order() -> None:
    requests = [
        chat("plan"),
        ModelRequest(messages=[Message("system", "You are a critic."), Message("user", "plan")]),
        chat("other"),
        chat("plan", n=2, params=SamplingParams(max_tokens=3), asked=frozenset({"max_tokens"})),
    ]
    forests = []
    for seed in range(4):
        s = session(FakeEngine(lambda prompt, seed: f"answer {seed}"[: 3 + seed % 9]))
        order = random.Random(seed).sample(requests[:3], 3) + requests[3:]
        replies = await asyncio.gather(*(s.call(request) for request in order))
        check(s)
        assert [step.id for step in s.steps] == [c.call_id for reply in replies for c in reply.choices]
        assert s.counters["conversations"] == 4
        forest = merge([s.tree])[0]
        forests.append((forest.token_T.tolist(), forest.logprob_T.tolist(), forest.parent_T.tolist()))
    assert forests[1:] == forests[:-1]


async def test_an_edited_answer_branches_where_it_was_edited() -> None:
    s = session()
    first = await ask(s, chat("one"))
    second = await ask(s, chat("one", said(first), "two"))
    edited = await ask(s, chat("one", said(first), "two", "not what you said", "three"))
    check(s)
    assert s.counters["edited"] == s.counters["branches"] == 1
    assert s.steps[2].parent == s.steps[0].id
    held = first.prompt_ids + first.choices[0].completion.token_ids
    assert edited.prompt_ids[: len(held)] == held
    assert [m.content for m in s.steps[2].messages] == ["two", "not what you said", "three"]
    assert edited.prompt_ids[: len(second.prompt_ids)] == second.prompt_ids


async def test_few_shot_answers_are_no_edits() -> None:
    s = session()
    first = await ask(s, chat("1+1", "2", "2+2"))
    await ask(s, chat("1+1", "2", "2+2", said(first), "3+3"))
    await ask(s, chat("1+1", "2", "5+5"))
    assert (s.counters["edited"], s.counters["extended"], s.counters["conversations"]) == (0, 1, 2)


class Unsure(Renderer):
    """Never proves an extension."""

    def extend(self, *args: Any, **kwargs: Any) -> list[int] | None:
        return None


@pytest.mark.parametrize(("history", "name"), [("keep", "unprovable"), ("rerender", "rerendered")])
async def test_what_cannot_be_proved_is_rendered_anew_and_named(history: str, name: str) -> None:
    s = session(renderer=Unsure(tiny.build_tokenizer(), history))
    first = await ask(s, chat("one"))
    request = chat("one", said(first), "two")
    second = await ask(s, request)
    assert request.messages is not None
    assert second.prompt_ids == RENDERER.prompt(request.messages)
    assert s.counters[name] == s.counters["branches"] == 1
    assert s.steps[1].parent == s.steps[0].id
    check(s)


async def test_equal_answers_of_two_calls_are_told_apart_by_tool_call_ids() -> None:
    s = session(FakeEngine(lambda prompt, seed: CALL))
    request = chat("sum", tools=[TOOL], n=4)
    choices = (await ask(s, request)).choices
    for choice in choices:
        messages = [*(request.messages or []), choice.message, Message("tool", f"result {choice.index}")]
        await ask(s, replace(request, messages=messages, n=1))
    assert [step.parent for step in s.steps[4:]] == [choice.call_id for choice in choices]
    check(s)


async def test_the_window_is_checked_before_any_work() -> None:
    engine = FakeEngine(max_context=40)
    s = session(engine)
    with pytest.raises(ContextOverflow) as caught:
        await s.call(chat("x" * 100))
    assert caught.value.limit == 40
    assert caught.value.got > 100
    assert not engine.calls
    assert not any(s.counters.values())
    length = len(RENDERER.prompt([Message("user", "x")]))
    await s.call(chat("x", params=SamplingParams(max_tokens=32000), asked=frozenset({"max_tokens"})))
    assert engine.calls[0][1].max_tokens == 40 - length
    exact = session(FakeEngine(max_context=length))
    with pytest.raises(ContextOverflow):
        await exact.call(chat("x"))
    one = session(FakeEngine(max_context=length + 1))
    assert len((await one.call(chat("x"))).choices[0].completion.token_ids) == 1
    assert one.counters["truncated"] == 1


async def test_sampling_is_the_agents_outside_training_with_defaults_for_what_it_did_not_ask() -> None:
    s = session(default_max_tokens=9, default_temperature=0.25)
    asked = SamplingParams(max_tokens=5, temperature=1.5, top_p=0.5, top_k=3, stop=("x",))
    names = frozenset({"max_tokens", "temperature", "top_p", "top_k", "stop"})
    reply = await s.call(chat("a", params=asked, asked=names))
    await s.call(chat("b"))
    assert isinstance(s.engine, FakeEngine)
    assert s.engine.calls[0][1] == asked
    assert s.engine.calls[1][1] == SamplingParams(max_tokens=9, temperature=0.25)
    assert reply.overridden == {}


async def test_training_replaces_the_agents_sampling_and_says_so() -> None:
    s = session(default_max_tokens=64, enforced=SamplingParams(temperature=0.5))
    asked = SamplingParams(
        max_tokens=1000, temperature=0.0, top_p=0.9, top_k=5, min_p=0.1, presence_penalty=1, seed=4, stop=("END",)
    )
    names = frozenset({"max_tokens", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "seed", "stop"})
    reply = await s.call(chat("a", params=asked, asked=names))
    assert isinstance(s.engine, FakeEngine)
    _, params, seed = s.engine.calls[0]
    assert params == SamplingParams(max_tokens=64, temperature=0.5, stop=("END",))
    assert seed != 4
    replaced = {"temperature": 0.5, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "presence_penalty": 0.0}
    assert reply.overridden == {**replaced, "seed": None, "max_tokens": 64}
    asked = SamplingParams(max_tokens=3, temperature=0.5)
    few = await s.call(chat("b", params=asked, asked=frozenset({"max_tokens", "temperature"})))
    assert s.engine.calls[1][1].max_tokens == 3
    assert few.overridden == {}
    capped = session(enforced=SamplingParams(max_tokens=8))
    await capped.call(chat("a"))
    assert isinstance(capped.engine, FakeEngine)
    assert capped.engine.calls[0][1].max_tokens == 8


async def test_seeds_depend_on_the_session_the_prompt_and_how_often_it_was_sent() -> None:
    async def seeds(*requests: ModelRequest, **settings: Any) -> list[int]:
        s = session(**settings)
        for request in requests:
            await ask(s, request)
        assert isinstance(s.engine, FakeEngine)
        return [seed for _, _, seed in s.engine.calls]

    a, again, b, *pair = await seeds(chat("a"), chat("a"), chat("b"), chat("c", n=2))
    assert len({a, again, b, *pair}) == 5
    assert all(0 <= seed < 2**63 for seed in (a, again, b, *pair))
    assert await seeds(chat("c", n=2), chat("b"), chat("a"), chat("a")) == [*pair, b, a, again]
    assert await seeds(chat("a"), seed_parts=(0, "task", 2, 0)) != [a]
    given = {"params": SamplingParams(seed=41), "asked": frozenset({"seed"})}
    assert await seeds(chat("a", n=2, **given), chat("a", **given)) == [41, 42, 41]
    assert await seeds(chat("a", **given), enforced=SamplingParams()) == [a]


async def test_n_choices_are_n_steps_sampled_at_once() -> None:
    engine = FakeEngine(hold=True)
    s = session(engine)
    pending = asyncio.create_task(s.call(chat("a", n=3)))
    await asyncio.sleep(0.01)
    assert engine.active == 3
    engine.release()
    reply = await pending
    assert [choice.index for choice in reply.choices] == [0, 1, 2]
    assert len({choice.call_id for choice in reply.choices}) == 3
    assert [step.id for step in s.steps] == [choice.call_id for choice in reply.choices]
    assert reply.id == f"chatcmpl-{reply.choices[0].call_id}"
    check(s)


async def test_an_undelivered_answer_is_given_again_and_a_delivered_one_is_not() -> None:
    s = session()
    reply = await s.call(chat("a"))
    again = await s.call(chat("a", stream=True, include_usage=True))  # how it travels does not matter
    assert again is reply
    assert len(s.steps) == s.counters["replayed"] == 1
    s.delivered(reply.id)
    anew = await s.call(chat("a"))
    assert anew.id != reply.id
    assert len(s.steps) == 2
    assert s.counters["reasked"] == 1
    assert (await s.call(chat("a", params=SamplingParams(temperature=0.5)))).id not in (reply.id, anew.id)
    check(s)


async def test_an_equal_request_joins_the_one_in_flight_and_hears_it_from_the_start() -> None:
    engine = FakeEngine(hold=True)
    s = session(engine)
    heard: tuple[list[Delta], list[Delta]] = ([], [])
    first = asyncio.create_task(s.call(chat("a"), heard[0].append))
    await asyncio.sleep(0.01)
    engine.release(3)
    await asyncio.sleep(0.01)
    second = asyncio.create_task(s.call(chat("a"), heard[1].append))
    await asyncio.sleep(0.01)
    first.cancel()  # the other one still waits: nothing is lost
    await asyncio.sleep(0.01)
    engine.release()
    reply = await second
    assert len(engine.calls) == len(s.steps) == 1
    assert s.counters["aborted"] == 0
    assert [token.id for delta in heard[1] for token in delta.tokens] == reply.choices[0].completion.token_ids
    assert len([token for delta in heard[0] for token in delta.tokens]) == 3
    late: list[Delta] = []
    assert await s.call(chat("a"), late.append) is reply
    assert "".join(delta.text for delta in late) == "".join(delta.text for delta in heard[1]) == said(reply)


async def test_a_client_that_leaves_cancels_and_its_retry_gets_the_same_seed() -> None:
    engine = FakeEngine(hold=True)
    s = session(engine)
    gone = asyncio.create_task(s.call(chat("a")))
    await asyncio.sleep(0.01)
    engine.release(2)
    await asyncio.sleep(0.01)
    gone.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gone
    retry = asyncio.create_task(s.call(chat("a")))  # at once, before the engine has even noticed
    await asyncio.sleep(0.01)
    assert (engine.active, engine.cancelled) == (1, 1)
    engine.release()
    reply = await retry
    assert engine.calls[0] == engine.calls[1]
    assert s.counters["aborted"] == 1
    assert s.counters["reasked"] == 0
    assert [step.id for step in s.steps] == [reply.choices[0].call_id]
    aborted = [node for node in s.tree.nodes if node.aborted]
    assert [node.tokens for node in aborted] == [reply.choices[0].completion.token_ids[:2]]
    forest, _ = merge([s.tree])
    assert forest.trained_T.sum() == len(reply.choices[0].completion.token_ids)
    check(s)


async def test_a_client_that_leaves_after_the_last_token_finds_its_answer_again() -> None:
    def leave() -> float:  # the session looks at the clock when it makes the reply
        gone.cancel()
        return 5.0

    s = session(clock=leave)
    gone = asyncio.create_task(s.call(chat("a")))
    with pytest.raises(asyncio.CancelledError):
        await gone
    reply = await s.call(chat("a"))
    assert reply.created == 5
    assert s.counters["aborted"] == 0
    assert [step.id for step in s.steps] == [reply.choices[0].call_id]
    check(s)


async def test_closing_cancels_what_is_in_flight_and_refuses_the_rest() -> None:
    engine = FakeEngine(hold=True)
    s = session(engine)
    pending = asyncio.create_task(s.call(chat("a", n=2)))
    await asyncio.sleep(0.01)
    engine.release(3)
    await asyncio.sleep(0.01)
    s.close()
    assert sum(len(node.tokens) for node in s.tree.nodes if node.aborted) == 3, "recorded before close returns"
    with pytest.raises(SessionClosed):
        await pending
    with pytest.raises(SessionClosed):
        await s.call(chat("b"))
    await asyncio.sleep(0.01)
    assert (engine.active, engine.cancelled) == (0, 2)
    assert s.steps == []
    assert s.counters["aborted"] == 2
    s.close()


async def test_an_engine_failure_reaches_the_caller_and_the_next_try_starts_anew() -> None:
    engine = FakeEngine()
    s = session(engine)
    engine.failure = EngineError("the device is gone")
    with pytest.raises(EngineError, match="device"):
        await s.call(chat("a", n=2))
    engine.failure = None
    assert (await s.call(chat("a"))).choices[0].completion.token_ids
    assert engine.calls[0] == engine.calls[-1]
    assert s.counters["aborted"] == 2


async def test_streamed_pieces_are_the_answer() -> None:
    texts = ["plain", "öäü 😀 end", f"before {CALL}", "<think>hm</think>yes", f"{CALL}\n{CALL}"]
    s = session(FakeEngine(lambda prompt, seed: texts[int(prompt.split("no ")[1][0])]))
    for index in range(len(texts)):
        deltas: list[Delta] = []
        reply = await s.call(chat(f"no {index}", tools=[TOOL]), deltas.append)
        choice = reply.choices[0]
        assert deltas[0] == Delta(0, reply_id=reply.id, prompt_ids=tuple(reply.prompt_ids))
        assert "".join(delta.text for delta in deltas) == choice.message.content
        assert "".join(delta.reasoning for delta in deltas) == choice.message.reasoning
        assert tuple(call for delta in deltas for call in delta.tool_calls) == choice.message.tool_calls
        assert [token.id for delta in deltas for token in delta.tokens] == choice.completion.token_ids


async def test_a_stop_string_ends_the_answer_before_it_and_the_conversation_goes_on() -> None:
    s = session(FakeEngine(lambda prompt, seed: "thought STOP more"))
    request = chat("a", params=SamplingParams(stop=("STOP",)), asked=frozenset({"stop"}))
    deltas: list[Delta] = []
    reply = await s.call(request, deltas.append)
    assert said(reply) == "".join(delta.text for delta in deltas) == "thought "
    assert reply.choices[0].finish_reason == "stop"
    s.delivered(reply.id)
    following = await s.call(chat("a", "thought", "b"))
    assert s.counters["extended"] == 1
    held = reply.prompt_ids + reply.choices[0].completion.token_ids
    assert following.prompt_ids[: len(held)] == held
    check(s)


async def test_a_truncated_answer_is_continued_token_for_token() -> None:
    s = session(default_max_tokens=4)
    first = await ask(s, chat("a"))
    assert first.choices[0].finish_reason == "length"
    await ask(s, chat("a", said(first), "b"))
    assert s.counters["extended"] == 1
    assert s.counters["truncated"] == 2
    check(s)


async def test_quotas() -> None:
    s = session(max_calls=3)
    await ask(s, chat("a", n=2))
    with pytest.raises(QuotaExceeded, match="3 model calls"):
        await s.call(chat("b", n=2))
    await ask(s, chat("b"))
    with pytest.raises(QuotaExceeded):
        await s.call(chat("c"))
    small = session(max_tokens_total=60)
    first = await ask(small, chat("a"))
    assert small.tokens_used == len(first.prompt_ids) + len(first.choices[0].completion.token_ids)
    with pytest.raises(QuotaExceeded, match="60 tokens"):
        await small.call(chat("b" * 60))


async def test_raw_prompts() -> None:
    s = session(FakeEngine(lambda prompt, seed: "<think>raw"))
    deltas: list[Delta] = []
    reply = await s.call(ModelRequest(prompt="once upon"), deltas.append)
    assert reply.prompt_ids == RENDERER.encode("once upon", add_bos=True)
    assert said(reply) == "".join(delta.text for delta in deltas) == "<think>raw", "raw text is not read as a chat turn"
    assert reply.id == f"cmpl-{s.steps[0].id}"
    held = reply.prompt_ids + reply.choices[0].completion.token_ids
    following = await ask(s, ModelRequest(prompt=[*held, 5]))
    assert following.prompt_ids == [*held, 5]
    assert s.steps[1].parent == s.steps[0].id
    assert s.counters["extended"] == 1
    assert s.tree.num_tokens == len(held) + 1 + len(following.choices[0].completion.token_ids)
    check(s)


@pytest.mark.parametrize(
    ("request_", "param"),
    [
        (ModelRequest(prompt=""), "prompt"),
        (ModelRequest(prompt=[]), "prompt"),
        (ModelRequest(prompt=[0, 10**6]), "prompt"),
        (ModelRequest(prompt=[-1]), "prompt"),
        (ModelRequest(messages=[]), "messages"),
        (chat("a", n=0), "n"),
        (chat("a", params=SamplingParams(max_tokens=0)), "max_tokens"),
        (chat("a", params=SamplingParams(max_tokens=-4)), "max_tokens"),
    ],
)
async def test_bad_requests_are_refused_by_name_and_leave_no_trace(request_: ModelRequest, param: str) -> None:
    s = session()
    with pytest.raises(RequestError) as caught:
        await s.call(request_)
    assert caught.value.param == param
    assert isinstance(s.engine, FakeEngine)
    assert not s.engine.calls
    assert not any(s.counters.values())
    assert not s.tree.nodes


async def test_claim_joins_by_call_id() -> None:
    s = session()
    first, pair = await ask(s, chat("a")), await ask(s, chat("b", n=2))
    one, two, three = s.steps
    assert s.claim([pair.id, first.id, f"{pair.id}-1", three.id, f"cmpl-{one.id}"]) == [two, one, three, three, one]
    assert s.trajectory().steps == [one, two, three]
    for unknown in ("chatcmpl-0123456789abcdef", "nonsense", "", f"{first.id}-1"):
        with pytest.raises(UserError, match="No call of session"):
            s.claim([unknown])


async def test_random_agents_always_end_in_the_right_branch() -> None:
    for seed in range(12):
        chance = random.Random(seed)
        s = session(FakeEngine(lambda prompt, seed: f"{'abc'[seed % 3]}"), max_calls=10_000)
        histories: list[list[Message]] = [[]]
        for _ in range(25):
            before = chance.choice(histories)
            if before and chance.random() < 0.2:  # compaction: the middle is dropped
                before = before[:1] + before[-1:]
            messages = [*before, Message("user", chance.choice("xyz"))]
            reply = await ask(s, ModelRequest(messages=messages, n=chance.choice([1, 1, 2])))
            if chance.random() < 0.1:
                messages.append(Message("assistant", "edited"))
            else:
                messages.append(chance.choice(reply.choices).message)
            histories.append(messages)
        assert len(s.steps) == s.counters["calls"]
        check(s)
        ids = {step.id: step for step in s.steps}
        assert len(ids) == len(s.steps)
        for step in s.steps:
            if step.parent is not None:
                assert step.node is not None
                assert ids[step.parent].node in s.tree.path(step.node)
        assert merge([s.tree])[0].trained_T.sum() == sum(step.response_length for step in s.steps)


async def test_the_registry() -> None:
    sessions = Sessions(FakeEngine(), RENDERER, model="m", default_max_tokens=5, max_calls=4)
    one = sessions.create("a/b:0", seed_parts=(1,), enforced=SamplingParams(temperature=0.5))
    assert sessions.get("a/b:0") is one
    assert (one.default_max_tokens, one.max_calls, one.seed_parts, one.model) == (5, 4, (1,), "m")
    assert one.key != sessions.create("other").key
    assert sessions.create("third", key="k").key == "k"
    assert [s.id for s in sessions] == ["a/b:0", "other", "third"]
    sessions.close("a/b:0")
    sessions.close("a/b:0")
    assert one.closed
    assert "a/b:0" not in sessions
    with pytest.raises(SessionClosed):
        sessions.get("a/b:0")
    with pytest.raises(UnknownSession):
        sessions.get("never")
    assert sessions.create("a/b:0") is sessions.get("a/b:0"), "an id may be used again"
    shared = sessions.create_open("key")
    assert sessions.create_open("key") is shared
    shared.tokens_used = 10**9
    fresh = sessions.create_open("key")
    assert fresh is not shared
    assert not shared.closed, "its calls in flight go on"
    assert fresh.seed_parts != shared.seed_parts
    sessions.close_all()
    assert list(sessions) == []
    assert fresh.closed
