"""Tool calls from tokens and back: markers that are tokens, calls streamed while they are sampled, hostile calls,
conversations with calls that go on, and what is said when calls cannot be read back."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from minirllm import stack
from minirllm.config import Config
from minirllm.conversation import normalized
from minirllm.errors import ConfigError
from minirllm.models import tiny
from minirllm.renderer import Renderer
from minirllm.syntaxes import SYNTAXES
from minirllm.syntaxes.calls import ToolSyntax
from minirllm.syntaxes.reader import TurnReader
from minirllm.types import Delta, Message
from tests.chat_templates import (
    ALL,
    STYLES,
    SYSTEM,
    TODAY,
    TOOLS,
    USER,
    call,
    calling,
    content_ids,
    renderer,
    tokenizer,
    turn,
)
from tests.deltas import calls_of, check_calls
from tests.fake_engine import CALL, TOOL, FakeEngine, chat, session
from tests.test_syntaxes import syntax_of

NATIVE = [name for name in ALL if name not in ("smollm2", "gemma3")]


def streamed(it: Renderer, ids: list[int]) -> tuple[list[Delta], Message]:
    stream = it.stream(TOOLS)
    deltas = [*(stream.push(id) for id in ids), stream.finish()]
    return deltas, stream.message()


# ---- tokens ----


@pytest.mark.parametrize("name", ["mistral", "deepseek_r1", "deepseek_v31", "kimi_k2"])
def test_a_marker_that_is_a_token_counts_only_as_that_token(name: str) -> None:
    it = renderer(name)
    text = it.template.tool_syntax.write([call()])
    assert it.markers, "the markers of this syntax are special tokens"
    begun = "</think>" if it.template.thinking else ""
    assert normalized(it.parse(turn(it, begun + text), TOOLS), calling(call()))
    spelled = [*content_ids(it, text), min(it.eos_ids)]
    assert it.decode(spelled[:-1]) == text
    assert it.parse([*it.encode(begun), *spelled], TOOLS) == Message("assistant", text)


def test_a_spelled_end_does_not_end_a_call_and_a_spelled_beginning_inside_begins_none() -> None:
    it = renderer("kimi_k2")
    begin, end = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
    head = "<|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
    whole = f'{begin}{head}{{"city": "{end}"}}<|tool_call_end|>{end}'
    ids = it.encode(whole)
    cut = len(it.encode(f'{begin}{head}{{"city": "'))
    ids = [*ids[:cut], *content_ids(it, end), *ids[cut + 1 :]]
    assert it.decode(ids) == whole
    assert normalized(it.parse(ids, TOOLS), calling(call(json.dumps({"city": end}))))
    text = f"I write {begin}{head}{{}} like this."
    assert it.parse(content_ids(it, text), TOOLS) == Message("assistant", text)


def test_thoughts_end_at_the_token_that_ends_them() -> None:
    its = tiny.build_tokenizer()
    its.add_special_tokens({"additional_special_tokens": ["<think>", "</think>"]})
    it = Renderer(its, template=tiny.TEMPLATE)
    ids = [*it.encode("<think>"), *content_ids(it, "not </think> yet"), *it.encode("</think>yes")]
    assert it.parse(ids) == Message("assistant", "yes", reasoning="not </think> yet")
    assert it.parse(content_ids(it, "<think>no")) == Message("assistant", "<think>no")


@pytest.mark.parametrize("name", ALL)
def test_a_call_reads_back_from_its_tokens(name: str) -> None:
    it = renderer(name)
    asked = [USER, calling(call('{"city": "São \\"P\\"", "days": 3}'))]
    result = Message("tool", "sunny", tool_call_id="call_0")
    begin, whole = it.prompt([USER], TOOLS), it.prompt([*asked, result], TOOLS)
    assert "weather" in it.decode(begin)
    assert "sunny" in it.decode(whole)
    written = it.template.tool_syntax.write([call('{"city": "São \\"P\\"", "days": 3}')])
    assert normalized(it.parse(turn(it, ("</think>" if it.template.thinking else "") + written), TOOLS), asked[1])


def test_calls_stand_in_the_prompt_as_the_model_writes_them() -> None:
    """What the templates here write, and what is written in their place."""
    for name, text in {
        "deepseek_r1": 'function<\uff5ctool\u2581sep\uff5c>weather\n```json\n{"city":  "Rome"}\n```<\uff5c',
        "deepseek_v31": 'weather<\uff5ctool\u2581sep\uff5c>{"city":  "Rome"}<\uff5c',
        "glm45": "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n</tool_call>",
        "kimi_k2": 'functions.weather:1<|tool_call_argument_begin|>{"city": "Rome"}<|tool_call_end|>',
        "llama4": '[weather(city="Rome")]<|eot|>',
        "smollm2": '<tool_call>\n{"name": "weather", "arguments": {"city":  "Rome"}}\n</tool_call><|im_end|>',
    }.items():
        it = renderer(name)
        said = [USER, calling(call(id="a")), USER, calling(call('{"city":  "Rome"}', "b"))]
        prompt = it.prompt([*said, Message("tool", "sunny", tool_call_id="b")], TOOLS)
        assert text in it.decode(prompt)
        marks = {id for id, marker in it.markers.items() if "think" not in marker}
        assert marks <= set(prompt) or name in ("glm45", "llama4"), "markers are written as tokens"
    assert "## Return of functions.weather:1\nsunny" in renderer("kimi_k2").decode(
        renderer("kimi_k2").prompt([*said, Message("tool", "sunny", tool_call_id="b")], TOOLS)
    )


# ---- streaming ----

ARGUMENTS = '{"city":  "R\\u00f6m \\"x\\" é😀", "days": 3}'


@pytest.mark.parametrize(
    "name", ["smollm2", "tiny", "llama3", "mistral", "deepseek_r1", "deepseek_v31", "kimi_k2", "thinking_xml", "llama4"]
)
def test_arguments_are_streamed_while_they_are_sampled(name: str) -> None:
    it = renderer(name)
    text = it.template.tool_syntax.write([call(ARGUMENTS), call(id="call_1")])
    ids = turn(it, ("</think>" if it.template.thinking else "") + text)
    deltas, message = streamed(it, ids)
    assert normalized(message, calling(call(ARGUMENTS), call()))
    assert [made.id for made in message.tool_calls] == ["call_0", "call_1"]
    check_calls(deltas, message)
    pieces = [piece for delta in deltas for piece in delta.calls if piece.index == 0]
    if name in ("thinking_xml", "llama4"):  # not JSON as it is written: given whole
        assert [piece.arguments for piece in pieces] == [message.tool_calls[0].arguments]
    else:
        assert message.tool_calls[0].arguments == ARGUMENTS
        assert len(pieces) > len(it.encode(ARGUMENTS)) / 2
        before = next(index for index, delta in enumerate(deltas) if delta.calls)
        assert '"city"' not in it.decode(ids[: before + 1]), "a call is announced once its arguments begin"


def test_what_is_in_doubt_is_held_back() -> None:
    reader = TurnReader(syntax_of("hermes"), TOOLS)
    fed = [
        '<tool_call>{"name": "f", "arguments"',
        ": ",
        '{"a',
        "\\u00",
        'e9": tr',
        "ue, ",
        '"b": -1',
        "2}",
        "}</tool_call>",
    ]
    said = ["", "", '{"a', "", '\\u00e9": ', "true, ", '"b": ', "-12}", ""]
    assert ["".join(piece.arguments for piece in reader.feed(text).calls) for text in fed] == said


def test_a_call_that_breaks_ends_in_the_stream_and_its_number_is_not_given_again() -> None:
    it = renderer("tiny")
    broken, good = (
        '<tool_call>{"name": "f", "arguments": {"a": 1, oops}}</tool_call>',
        it.template.tool_syntax.write([call()]),
    )
    deltas, message = streamed(it, turn(it, f"{broken} {good}"))
    assert (message.content, message.malformed) == (broken, True)
    assert calls_of(deltas)[0].arguments == '{"a": 1, '
    assert [made.id for made in calls_of(deltas)] == ["call_0", "call_1"]
    assert [made.id for made in message.tool_calls] == ["call_1"]
    check_calls(deltas, message)


def test_text_behind_a_broken_call_is_not_held_back() -> None:
    reader = TurnReader(syntax_of("hermes"), TOOLS)
    assert reader.feed('<tool_call>{"name" oops} </tool_call> and').text == '<tool_call>{"name" oops} </tool_call> and'


# ---- hostile ----

NASTY = [
    '{"a":' * 5000,
    '{"a":' * 5000 + "1" + "}" * 5000,
    '{"a": ' + "[" * 99 + "]" * 99 + "}",
    '{"a": ' + "[" * 150 + "]" * 150 + "}",
    '{"a": ' + "9" * 5000 + "}",
    '{"a": 1e999}',
    '{"a": NaN}',
    '{"a": 1, "a": 2}',
    '{"a": "\\ud800"}',
    '{"a": "\ud800"}',
    '{"a": "\x00\u2028\uffff😀"}',
    '{"a": "' + "\\" * 4001,
    "((((" * 50 + "a" * 9,
    "-" * 20000,
    "x" * 50000,
    "</tool_call>" * 500,
    "<function=f>" * 500,
    "<arg_key>a</arg_key><arg_value>" * 500,
    '{"name": "f", "arguments": ' * 200,
]


@pytest.mark.parametrize("name", SYNTAXES)
def test_hostile_calls_never_raise_and_give_only_json(name: str) -> None:
    syntax = syntax_of(name)
    heads = ('<tool_call>{"name": "f", "arguments": ', "<tool_call>f\n<arg_key>n</arg_key>\n<arg_value>", "[f(n=")
    xml = "<tool_call><function=f><parameter=n>"
    kimi = "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>"
    began = time.monotonic()
    for nasty in NASTY:
        for head in (*heads, xml, kimi, "[TOOL_CALLS]f[ARGS]", '{"name": "f", "parameters": ', *syntax.opens):
            for tail in ("", "}</tool_call>", ")]", "</parameter></function></tool_call>", "<|tool_call_end|>"):
                reader = TurnReader(syntax, TOOLS)
                deltas = [reader.feed(head), reader.feed(nasty), reader.feed(tail), reader.finish()]
                message = reader.message()
                assert message.content == "".join(delta.text for delta in deltas)
                check_calls(deltas, message)
                for made in message.tool_calls:
                    assert isinstance(json.loads(made.arguments), dict)
    assert time.monotonic() - began < 60


def test_hostile_calls_through_an_answer() -> None:
    it = renderer("tiny")
    for nasty in NASTY[:8]:
        message = it.parse(turn(it, f'<tool_call>{{"name": "f", "arguments": {nasty}}}</tool_call>'), TOOLS)
        assert bool(message.tool_calls) != message.malformed


# ---- conversations go on ----


@pytest.mark.parametrize("name", ["smollm2", *STYLES])
def test_conversations_with_calls_are_extended_like_any_other(name: str) -> None:
    it = renderer(name)
    written = it.template.tool_syntax.write([call('{"city":  "Rome"}')])
    messages, ids = [SYSTEM, USER], it.prompt([SYSTEM, USER], TOOLS)
    for round in range(3):
        thinking = it.decode(ids).endswith("<think>\n")  # R1 does not after results
        sampled = turn(it, ("why</think>" if thinking else "") + written)
        answer = it.parse(sampled, TOOLS, prompt_ids=ids)
        assert (answer.content, answer.reasoning) == ("", "why" if thinking else "")
        assert normalized(answer, calling(call()))
        new = [Message("tool", f"sunny{round}", tool_call_id=answer.tool_calls[0].id)]
        ids += sampled
        extended = it.extend(ids, [*messages, answer], new, TOOLS)
        assert extended is not None
        assert extended[: len(ids)] == ids
        assert f"sunny{round}" in it.decode(extended[len(ids) :])
        messages, ids = [*messages, answer, *new], extended


@pytest.mark.parametrize("name", ["mistral", "kimi_k2"])
def test_ids_go_on_where_a_history_was_rewritten(name: str) -> None:
    """An answer of ours, then turns that are not: the ids are those of a rendering."""
    it = renderer(name)
    said = [USER, calling(call(id="a")), Message("tool", "sunny", tool_call_id="a"), Message("assistant", "Yes.")]
    new = [USER, calling(call(id="b")), Message("tool", "rain", tool_call_id="b"), USER]
    ids = it.prompt(said[:-1], TOOLS) + turn(it, "Yes.")
    extended = it.extend(ids, said, new, TOOLS)
    assert extended is not None
    assert it.decode(extended) == it.decode(it.prompt([*said, *new], TOOLS))


# ---- which syntax, and whether it works ----


def test_a_syntax_can_be_asked_for() -> None:
    it = Renderer(tokenizer("tiny"), tool_syntax="glm45")
    assert (it.template.syntax, it.template.lists_tools, it.template.writes_calls) == ("glm45", False, False)
    text = it.decode(it.prompt([USER, calling(call())], TOOLS))
    assert "<tool_call>the_function\n<arg_key>an_argument</arg_key>" in text
    assert "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n</tool_call><|im_end|>" in text
    assert normalized(it.parse(turn(it, it.template.tool_syntax.write([call()])), TOOLS), calling(call()))
    assert Renderer(tokenizer("qwen25"), tool_syntax="hermes").template.lists_tools
    with pytest.raises(ConfigError, match=r"no tool syntax 'hermse' \(did you mean hermes\?\)"):
        Renderer(tokenizer("tiny"), tool_syntax="hermse")
    with pytest.raises(ConfigError, match="is no minirllm"):
        Renderer(tokenizer("tiny"), tool_syntax="json:loads")


DEAF = ToolSyntax(("<tool_call>",), "</tool_call>", lambda text, tools: None, lambda calls: "<tool_call>no</tool_call>")


@pytest.mark.parametrize("syntax", ["auto", f"{__name__}:DEAF"])
async def test_what_cannot_be_read_back_is_said_once_and_written_down(tmp_path: Any, syntax: str) -> None:
    said: list[str] = []
    config = Config(model="tiny", tool_syntax=syntax, runs_dir=str(tmp_path), determinism="off")
    async with stack.serving(config, say=said.append) as served:
        warnings = [sentence for sentence in said if sentence.startswith("Tool calls cannot be read back")]
        assert served.facts["tool_calls_read_back"] == (syntax == "auto")
        assert served.facts["tool_syntax"] == ("hermes" if syntax == "auto" else syntax)
        assert [note for note in served.facts["template_notes"] if note.startswith("Tool calls")] == warnings
        assert len(warnings) == (syntax != "auto")


def test_a_tokenizer_that_changes_calls_is_found_out() -> None:
    its = tiny.build_tokenizer()
    its.add_special_tokens({"additional_special_tokens": ['"name"']})  # then hidden, as all special tokens are
    it = Renderer(its)
    assert "cannot be read back" in it.problem
    assert it.notes[-1] == it.problem
    assert Renderer(tiny.build_tokenizer(), today=TODAY).problem == ""


# ---- in a session ----


async def test_streamed_calls_have_the_ids_of_the_answer() -> None:
    broken = '<tool_call>{"name": "add", "arguments": {"a": oops}}</tool_call>'
    s = session(FakeEngine(lambda prompt, seed: f"{CALL}{broken}{CALL}"))
    deltas: list[Delta] = []
    message = (await s.call(chat("a", tools=[TOOL]), deltas.append)).choices[0].message
    assert (message.content, message.malformed, s.counters["malformed_tool_calls"]) == (broken, True, 1)
    assert [made.id[-2:] for made in message.tool_calls] == ["_0", "_2"]
    check_calls(deltas, message)
    assert len(calls_of(deltas)) == 3


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "add"}}])
async def test_a_forced_choice_is_not_enforced_and_the_reply_says_so(choice: Any) -> None:
    s = session(FakeEngine(lambda prompt, seed: "no"))
    reply = await s.call(chat("a", tools=[TOOL], tool_choice=choice))
    assert reply.overridden == {"tool_choice": "auto"}
    free = await s.call(chat("a", tools=[TOOL]))
    assert (free.overridden, free.prompt_ids) == ({}, reply.prompt_ids)
