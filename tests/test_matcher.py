"""What agent programs send back of a conversation, one observed rewriting a row, and whether it continues the call.

Each row is what really arrived: the answer as the endpoint gave it, changed as that program changes it.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest

from minirllm.config import Config
from minirllm.conversation import matcher, normalized
from minirllm.dialects import chat
from minirllm.errors import ConfigError
from minirllm.stack import serving
from minirllm.types import Message, Step
from tests.fake_engine import RENDERER, TOOL, FakeEngine, ask, session

Json = dict[str, Any]
MARK = {"cache_control": {"type": "ephemeral"}}
THOUGHT, CALL = "<think>hm</think>", '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2, "é"]}}\n</tool_call>'
SAYS = f"{THOUGHT} Let me see.\n{CALL}"
TASK = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Add."}]


def result(**fields: Any) -> Json:
    return {"role": "tool", "tool_call_id": "x", "content": "3", **fields}


def arguments(answer: Json, text: str) -> Json:
    call = answer["tool_calls"][0]
    return {**answer, "tool_calls": [{**call, "function": {**call["function"], "arguments": text}}]}


def respelled(answer: Json) -> Json:
    """As JSON.stringify writes it: no spaces."""
    text = json.dumps(json.loads(answer["tool_calls"][0]["function"]["arguments"]), separators=(",", ":"))
    return arguments(answer, text)


def thoughtless(answer: Json) -> Json:
    return {name: value for name, value in answer.items() if name != "reasoning_content"}


def parts(text: Any, **fields: Any) -> list[Json]:
    return [{"type": "text", "text": text, **fields}]


def as_parts(messages: list[Json], marked: int | None = None) -> list[Json]:
    """Each content as a list of one text part, the one at `marked` to be cached up to."""
    marks = [MARK if index == marked else {} for index in range(len(messages))]
    return [{**m, "content": parts(m["content"], **mark)} for m, mark in zip(messages, marks, strict=True)]


def smolagents(answer: Json) -> Json:
    called = [{"id": c["id"], "type": "function", "function": c["function"]} for c in answer["tool_calls"]]
    return {"role": "assistant", "content": parts(f"{answer['content']}Calling tools:\n{called}")}


Echo = Callable[[Json], list[Json]]  # the answer -> the messages of the request after it
TWO_PARTS = [TASK[0], {"role": "user", "content": [*parts("One."), *parts("Two.")]}]
FEW_SHOT = [*TASK, {"role": "assistant", "content": "Example."}, TASK[1]]


def same(answer: Json) -> Json:
    return answer


def after(change: Callable[[Json], Json] = same, first: list[Json] = TASK, **tool: Any) -> Echo:
    """The first request, the answer changed, a tool's result."""
    return lambda answer: [*first, change(answer), result(**tool)]


def then(text: str, change: Callable[[Json], Json] | None = None) -> Echo:
    """The task, the answer changed or dropped, a user message."""
    return lambda answer: [*TASK, *([change(answer)] if change else []), {"role": "user", "content": text}]


def without_id(answer: Json) -> Json:
    return {**answer, "tool_calls": [{**answer["tool_calls"][0], "id": "toolu_1"}]}


ROWS: list[tuple[str, list[Json], Echo, str]] = [
    ("codex, langgraph, openai-agents, strands: verbatim", TASK, after(), "extended"),
    ("opencode, pi, qwen, cline: arguments written anew, thoughts sent back", TASK, after(respelled), "extended"),
    ("openhands: content as parts, thoughts dropped, results named", TASK,
     after(lambda a: {**thoughtless(a), "content": parts(a["content"])}, name="add", content=parts("3")), "extended"),
    ("hermes: stripped, arguments written anew, thoughts dropped, results named", TASK,
     after(lambda a: {**thoughtless(respelled(a)), "content": a["content"].strip()}, name="add"), "extended"),
    ("pydantic-ai: arguments written anew, thoughts dropped", TASK,
     after(lambda a: thoughtless(respelled(a))), "extended"),
    ("mini: a user message behind the answer", TASK, then("Go on.", same), "extended"),
    ("mini: a turn with a format error dropped for a user message", TASK, then("Format error."), "conversation"),
    ("terminus-2: thoughts dropped, a user message follows", TASK, then("Next screen.", thoughtless), "extended"),
    ("terminus-2: a summary begins a new chat", TASK,
     lambda a: [{"role": "user", "content": "Summary."}], "conversation"),
    ("opencode, qwen: compaction drops the middle", TASK, then("Summary: it added."), "conversation"),
    ("smolagents: calls turned into prose", TASK, lambda a: [*TASK, smolagents(a), TASK[1]], "edited"),
    ("claude code: the cache mark moves on, strings become parts", as_parts(TASK, 1),
     lambda a: as_parts([*TASK, a, result()], 3), "extended"),
    ("claude code: parts become strings", as_parts(TASK, 1), after(), "extended"),
    ("claude code: strings become parts", TASK, after(first=as_parts(TASK, 0)), "extended"),
    ("qwen: several parts stay several parts", TWO_PARTS, after(first=TWO_PARTS), "extended"),
    ("several parts, later one string: a line for each", TWO_PARTS,
     after(first=[TASK[0], {"role": "user", "content": "One.\nTwo."}]), "extended"),
    ("several parts, later run together: another text", TWO_PARTS,
     after(first=[TASK[0], {"role": "user", "content": "One.Two."}]), "conversation"),
    ("aider: answers that the model never gave before the task", FEW_SHOT, after(first=FEW_SHOT), "extended"),
    ("ids of calls made anew", TASK, after(without_id, tool_call_id="toolu_1"), "extended"),
    ("keys in another order, other escapes, 1.0 for 1", TASK,
     after(lambda a: arguments(a, r'{"b": [2, "\u00e9"], "a": 1.0}')), "extended"),
    ("an argument changed", TASK, after(lambda a: arguments(a, '{"a": 2, "b": [2, "é"]}')), "edited"),
    ("other thoughts", TASK, after(lambda a: {**a, "reasoning_content": "hm, no"}), "edited"),
    ("a call left out", TASK, after(lambda a: {**a, "tool_calls": []}), "edited"),
]  # fmt: skip


async def sent_back(
    says: str, first: list[Json], echo: Echo, tools: tuple[Any, Any] = ([TOOL], [TOOL]), **settings: Any
) -> Step:
    """The step of the second call."""
    s = session(FakeEngine(lambda prompt, seed: says), **settings)
    request = chat.parse({"messages": copy.deepcopy(first), "tools": tools[0]})
    answer = chat.response(await ask(s, request), request, RENDERER.token_text)["choices"][0]["message"]
    await ask(s, chat.parse({"messages": echo(answer), "tools": tools[1]}))
    one, two = s.steps
    assert (one.metadata["match"], one.parent) == ("conversation", None)
    assert two.parent == (one.id if two.metadata["match"] == "extended" else None)
    assert s.counters["conversations"] == (1 if two.parent else 2)
    assert s.counters["edited"] == s.counters["branches"] == (two.metadata["match"] == "edited")
    assert s.counters["drift"] == 0
    if two.parent:
        assert two.prompt_length > one.prompt_length + one.response_length
        assert s.tree.ids(two.node or 0)[: one.prompt_length + one.response_length] == s.tree.ids(one.node or 0)
    return two


@pytest.mark.parametrize(("first", "echo", "match"), [row[1:] for row in ROWS], ids=[row[0] for row in ROWS])
async def test_what_programs_send_back(first: list[Json], echo: Echo, match: str) -> None:
    assert (await sent_back(SAYS, first, echo)).metadata == {"match": match}


@pytest.mark.parametrize("nothing", [{"content": None}, {"content": ""}, {"content": []}, {}])
async def test_kimi_and_others_have_four_ways_to_say_nothing(nothing: Json) -> None:
    def echo(answer: Json) -> list[Json]:
        assert answer["content"] is None
        return [*TASK, {"role": "assistant", "tool_calls": answer["tool_calls"], **nothing}, result()]

    assert (await sent_back(CALL, TASK, echo)).metadata["match"] == "extended"


async def test_a_call_with_other_tools_continues_none() -> None:
    step = await sent_back(SAYS, TASK, after(), ([TOOL], []))
    assert step.metadata["match"] == "conversation"


def prose(said: Message, sent: Message) -> bool:
    """A matcher of one's own: that of smolagents, which tells its model's calls as prose."""
    told = sent.content.partition("Calling tools:")[0]
    return normalized(said, sent) or (bool(said.tool_calls) and said.content.strip() == told.strip())


async def test_a_matcher_of_ones_own() -> None:
    known = matcher("tests.test_matcher:prose")
    step = await sent_back(SAYS, TASK, lambda a: [*TASK, smolagents(a), TASK[1]], matcher=known)
    assert step.metadata["match"] == "extended"
    assert matcher("normalized") is normalized
    async with serving(Config(model="tiny", matcher="tests.test_matcher:prose")) as stack:
        assert stack.sessions.create("one").matcher is known


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("normal", r"There is no matcher 'normal' \(did you mean normalized\?\): use normalized, or module:attr\."),
        ("no_such_module:x", "The matcher 'no_such_module:x' cannot be imported: No module named 'no_such_module'"),
        ("sys:path", r"Matcher 'sys:path' is not a function \(said, sent\) -> bool of two Messages\."),
    ],
)
def test_a_matcher_that_is_none(name: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        matcher(name)
