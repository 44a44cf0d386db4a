"""One conversation in one token tree, whichever dialect each of its requests comes in; and Claude Code's and Codex's
own ways to send it back."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest

from minirllm.dialects import DIALECTS, Dialect, chat, gemini, messages, responses
from minirllm.session import Session
from minirllm.types import Message, Step
from tests.fake_engine import TOOL, FakeEngine, ask, check, session

Json = dict[str, Any]
ARGUMENTS = {"a": 1, "b": ["é", {"c": None}]}
SAYS = (
    f'<think>hm</think>Let me see.\n<tool_call>\n{{"name": "add", "arguments": {json.dumps(ARGUMENTS)}}}\n</tool_call>'
)
FUNCTION = TOOL["function"]
assert isinstance(FUNCTION, dict)
NAME, PARAMETERS = FUNCTION["name"], FUNCTION["parameters"]
SYSTEM, USER, RESULT = "Be brief.", "Add.", "3"


def in_chat(answers: list[Message]) -> Json:
    said: list[Json] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": USER}]
    for answer in answers:
        (call,) = answer.tool_calls
        function = {"name": call.name, "arguments": call.arguments}
        calls = [{"id": call.id, "type": "function", "function": function}]
        said.append(
            {"role": "assistant", "content": answer.content, "reasoning_content": answer.reasoning, "tool_calls": calls}
        )
        said.append({"role": "tool", "tool_call_id": call.id, "content": RESULT})
    return {"messages": said, "tools": [TOOL]}


def in_messages(answers: list[Message]) -> Json:
    said: list[Json] = [{"role": "user", "content": USER}]
    for answer in answers:
        (call,) = answer.tool_calls
        said.append({"role": "assistant", "content": [
            {"type": "thinking", "thinking": answer.reasoning, "signature": "x"},
            {"type": "text", "text": answer.content},
            {"type": "tool_use", "id": call.id, "name": call.name, "input": json.loads(call.arguments)},
        ]})  # fmt: skip
        said.append({"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": RESULT}]})
    return {"system": SYSTEM, "messages": said, "tools": [{"name": NAME, "input_schema": PARAMETERS}], "max_tokens": 99}


def in_responses(answers: list[Message]) -> Json:
    said: list[Json] = [{"role": "user", "content": USER}]
    for answer in answers:
        (call,) = answer.tool_calls
        text = [{"type": "output_text", "text": answer.content}]
        said += [
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": answer.reasoning}]},
            {"type": "message", "role": "assistant", "content": text},
            {"type": "function_call", "call_id": call.id, "name": call.name, "arguments": call.arguments},
            {"type": "function_call_output", "call_id": call.id, "output": RESULT},
        ]
    tools = [{"type": "function", "name": NAME, "parameters": PARAMETERS}]
    return {"instructions": SYSTEM, "input": said, "tools": tools}


def in_gemini(answers: list[Message]) -> Json:
    said: list[Json] = [{"role": "user", "parts": [{"text": USER}]}]
    for answer in answers:
        (call,) = answer.tool_calls
        parts = [{"text": answer.reasoning, "thought": True}, {"text": answer.content}]
        asked = {"functionCall": {"name": call.name, "args": json.loads(call.arguments)}}
        said.append({"role": "model", "parts": [*parts, asked]})
        told = {"name": call.name, "response": {"output": RESULT}}
        said.append({"role": "user", "parts": [{"functionResponse": told}]})
    tools = [{"functionDeclarations": [{"name": NAME, "parameters": PARAMETERS}]}]
    return {"systemInstruction": {"parts": [{"text": SYSTEM}]}, "contents": said, "tools": tools}


WRITERS: list[tuple[Dialect, Callable[[list[Message]], Json]]] = [
    (chat, in_chat), (messages, in_messages), (responses, in_responses), (gemini, in_gemini),
]  # fmt: skip


async def say(s: Session, dialect: Dialect, body: Json) -> Step:
    await ask(s, dialect.parse(copy.deepcopy(body), dialect.ROUTES[0]))
    return s.steps[-1]


@pytest.mark.parametrize(
    ("first", "second", "third"),
    [[*pair, WRITERS[0]] for pair in product(WRITERS, WRITERS)],
    ids=["-".join(w[0].__name__.rpartition(".")[2] for w in pair) for pair in product(WRITERS, WRITERS)],
)
async def test_a_conversation_goes_on_in_another_dialect(first: Any, second: Any, third: Any) -> None:
    s = session(FakeEngine(lambda prompt, seed: SAYS))
    answers: list[Message] = []
    for dialect, write in (first, second, third):
        step = await say(s, dialect, write(answers))
        assert step.response is not None
        assert (step.response.reasoning, step.response.content) == ("hm", "Let me see.")
        answers.append(step.response)
    assert [step.metadata["match"] for step in s.steps] == ["conversation", "extended", "extended"]
    assert [step.parent for step in s.steps] == [None, s.steps[0].id, s.steps[1].id]
    assert s.tree.num_tokens == s.steps[-1].prompt_length + s.steps[-1].response_length, "one path"
    check(s)


def test_every_dialect_with_messages_is_here() -> None:
    assert {*DIALECTS.values()} == {dialect for dialect, _ in WRITERS} | {DIALECTS["completions"]}


MARK = {"cache_control": {"type": "ephemeral"}}


def block(text: str, **fields: Any) -> Json:
    return {"type": "text", "text": text, **fields}


async def test_claude_code_moves_its_marks_and_flips_strings_and_blocks() -> None:
    s = session(FakeEngine(lambda prompt, seed: SAYS))
    body = in_messages([])
    body |= {"system": [block(SYSTEM, **MARK)], "messages": [{"role": "user", "content": [block(USER, **MARK)]}]}
    answer = (await say(s, messages, body)).response
    assert answer is not None
    for turn, (system, user) in enumerate([(SYSTEM, USER), ([block(SYSTEM)], USER), (SYSTEM, [block(USER, **MARK)])]):
        body = in_messages([answer])
        result = body["messages"][-1]["content"][0]
        body["system"], body["messages"][0]["content"] = system, user
        result["content"] = [block(f"{turn}", **MARK)]
        body["messages"][1]["content"][-1] |= MARK
        assert (await say(s, messages, body)).metadata["match"] == "extended"
    body["messages"][1]["content"][-1]["input"] = {"a": 2}
    assert (await say(s, messages, body)).metadata["match"] == "edited"


async def test_codex_may_leave_out_reasoning_and_ids() -> None:
    s = session(FakeEngine(lambda prompt, seed: SAYS))
    answer = (await say(s, responses, in_responses([]))).response
    assert answer is not None
    items = in_responses([answer])["input"]
    kept = [[item for item in items if item.get("type") != "reasoning"], [{**item, "id": "x_1"} for item in items]]
    reordered = json.dumps({name: ARGUMENTS[name] for name in sorted(ARGUMENTS, reverse=True)})
    kept.append([{**item, "arguments": reordered} if "arguments" in item else item for item in items])
    for echoed in kept:
        assert (await say(s, responses, {**in_responses([]), "input": echoed})).metadata["match"] == "extended"
    prose = [{**item, "content": "Something else."} if item.get("type") == "message" else item for item in items]
    assert (await say(s, responses, {**in_responses([]), "input": prose})).metadata["match"] == "edited"
