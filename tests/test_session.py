"""Prompts, sampling rules, seeds, quotas and the registry of sessions."""

from __future__ import annotations

from typing import Any

import pytest

from minirllm.errors import (
    ContextOverflow,
    QuotaExceeded,
    RequestError,
    SessionClosed,
    UnknownSession,
    UserError,
)
from minirllm.inflight import identify, prompt_digest
from minirllm.sessions import Sessions
from minirllm.types import Delta, Message, ModelRequest, SamplingParams
from tests.fake_engine import RENDERER, TOOL, FakeEngine, ask, chat, check, said, session


async def test_a_malformed_tool_call_is_text_and_counted() -> None:
    s = session(FakeEngine(lambda prompt, seed: '<tool_call>\n{"name": "add", "argu\n</tool_call>'))
    reply = await ask(s, chat("sum", tools=[TOOL]))
    assert reply.choices[0].message.malformed
    assert "argu" in said(reply)
    assert s.counters["malformed_tool_calls"] == 1


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


async def test_a_call_id_proves_the_seed_and_the_step_keeps_what_the_engine_was_told() -> None:
    s = session(enforced=SamplingParams(temperature=0.5), default_max_tokens=6, seed_parts=(7, "train", 1, "t", 0, 0))
    for _ in range(2):
        await ask(s, chat("a", n=2, params=SamplingParams(stop=("x",)), asked=frozenset({"stop"})))
    assert isinstance(s.engine, FakeEngine)
    told = [(seed, params) for _, params, seed in s.engine.calls]
    prompt = s.tree.prompt_ids(s.steps[0].node or 0)
    for step, place, sent in zip(s.steps, ((0, 0), (0, 1), (1, 0), (1, 1)), told, strict=True):
        assert (step.id, sent[0]) == identify(s.seed_parts, prompt_digest(prompt), *place)
        assert step.params == sent[1] == SamplingParams(max_tokens=6, temperature=0.5, stop=("x",))


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
    for unknown in ("chatcmpl-0123456789abcdef", "nonsense", "", f"{first.id}-1"):
        with pytest.raises(UserError, match="No call of session"):
            s.claim([unknown])


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


async def test_closed_sessions_are_not_remembered_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minirllm.sessions.CLOSED_KEPT", 3)
    sessions = Sessions(FakeEngine(), RENDERER, model="m")
    for name in "abcda":
        sessions.create(name)
        sessions.close(name)
    assert list(sessions._closed) == ["c", "d", "a"]
    with pytest.raises(SessionClosed):
        sessions.get("c")
    with pytest.raises(UnknownSession):
        sessions.get("b")


async def test_counting_a_prompt_leaves_no_trace() -> None:
    s = session(FakeEngine())
    first = await ask(s, chat("a"))
    before = dict(s.counters), s.tokens_used, s.tree.num_tokens, len(s.steps)
    assert s.count(chat("a")) == len(first.prompt_ids)
    assert s.count(chat("a", said(first), "more")) > len(first.prompt_ids)
    assert s.count(ModelRequest(prompt=[5, 6, 7])) == 3
    assert (dict(s.counters), s.tokens_used, s.tree.num_tokens, len(s.steps)) == before
