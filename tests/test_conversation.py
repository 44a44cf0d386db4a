"""Every request ends in the right branch with the right tokens, whatever the agent does with its history."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from itertools import permutations
from typing import Any

import pytest

from minirllm.conversation import Answer, Conversations, Match, normalized
from minirllm.models import tiny
from minirllm.renderer import Renderer
from minirllm.tree import merge
from minirllm.types import Message, ModelRequest, SamplingParams
from tests.fake_engine import CALL, RENDERER, TOOL, FakeEngine, ask, chat, check, said, session


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


async def test_equal_answers_further_down_continue_the_branch_they_were_given_in() -> None:
    s = session(FakeEngine(lambda prompt, seed: "ok" if "tool_response" in prompt else CALL))
    request = chat("sum", tools=[TOOL], n=2)
    assert request.messages is not None
    histories = []
    for choice in (await ask(s, request)).choices:
        result = Message("tool", "3", tool_call_id=choice.message.tool_calls[0].id)
        messages = [*request.messages, choice.message, result]
        reply = await ask(s, replace(request, messages=messages, n=1))
        histories.append([*messages, reply.choices[0].message, Message("user", "go on")])
    for messages in histories[::-1]:
        await ask(s, replace(request, messages=messages, n=1))
    assert [step.parent for step in s.steps[4:]] == [s.steps[3].id, s.steps[2].id]


async def test_thoughts_that_the_model_did_not_have_are_an_edit() -> None:
    s = session(FakeEngine(lambda prompt, seed: "yes"))
    first = await ask(s, chat("one"))
    thoughtful = replace(first.choices[0].message, reasoning="hm")
    second = await ask(s, ModelRequest(messages=[Message("user", "one"), thoughtful, Message("user", "two")]))
    assert s.counters["edited"] == 1
    assert "hm" in RENDERER.decode(second.prompt_ids), "the model reads what its agent sent"


def test_which_answer_an_echo_continues_does_not_depend_on_which_came_first() -> None:
    question, echo = Message("user", "?"), Message("assistant", "yes")
    answers = [Answer(id, n, [], replace(echo, reasoning=f"thought {id}")) for n, id in enumerate("cab")]
    for order in permutations([*answers, Answer("d", 3, [], echo)]):
        known = Conversations(normalized)
        for answer in order:
            known.record(Match(added=[question]), answer)
        for sent, continued in ((echo, "d"), (replace(echo, content=" yes"), "a"), (answers[2].message, "b")):
            parent = known.match([question, sent, question], []).parent
            assert parent is not None
            assert parent.call_id == continued
