"""Connections come and go: answers are streamed, shared, given again or cut off, and the record stays true."""

from __future__ import annotations

import asyncio

import pytest

from minirllm.errors import (
    EngineError,
    SessionClosed,
)
from minirllm.tree import merge
from minirllm.types import Delta, SamplingParams
from tests.deltas import calls_of
from tests.fake_engine import CALL, TOOL, FakeEngine, chat, check, said, session


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
    s.lost(reply.id)
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


async def test_equal_requests_at_the_same_time_are_samples_of_their_own() -> None:
    s = session()
    one, two = await asyncio.gather(s.call(chat("a")), s.call(chat("a")))
    assert one.id != two.id
    assert len(s.steps) == 2
    assert s.counters["replayed"] == 0
    three = await s.call(chat("a"))  # nobody said that an answer was lost
    assert three.id not in (one.id, two.id)
    check(s)


async def test_a_lost_answer_given_again_is_heard_from_the_start() -> None:
    s = session()
    reply = await s.call(chat("a"))
    s.lost(reply.id)
    late: list[Delta] = []
    assert await s.call(chat("a"), late.append) is reply
    assert "".join(delta.text for delta in late) == said(reply)
    assert [token.id for delta in late for token in delta.tokens] == reply.choices[0].completion.token_ids


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
        assert calls_of(deltas) == choice.message.tool_calls
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
