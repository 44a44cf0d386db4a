"""Tool-call syntaxes and the reader of assistant turns, on plain text."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minirllm.config import find
from minirllm.syntaxes import SYNTAXES, deepseek_v31
from minirllm.syntaxes.calls import ToolSyntax, parsed_arguments, same_call
from minirllm.syntaxes.json_calls import read_json
from minirllm.syntaxes.reader import TurnReader
from minirllm.types import Delta, Message, ToolCall
from tests.deltas import calls_of, check_calls

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "f",
            "parameters": {"type": "object", "properties": {"n": {"type": "integer"}, "s": {"type": "string"}}},
        },
    }
]


def syntax_of(name: str) -> ToolSyntax:
    syntax = find("tool syntax", name, SYNTAXES)
    assert isinstance(syntax, ToolSyntax)
    return syntax


def read(text: str, syntax: str | None = "hermes", stops: tuple = (), thinking: bool | None = False) -> Message:
    reader = TurnReader(syntax_of(syntax) if syntax else None, TOOLS, stops, thinking)
    reader.feed(text)
    reader.finish()
    return reader.message()


def calls(message: Message) -> list[tuple[str, str]]:
    return [(call.name, call.arguments) for call in message.tool_calls]


# ---- JSON calls ----


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"name": "f", "arguments": {"a":  1}}', [("f", '{"a":  1}')]),  # the arguments' own spacing is kept
        (' {"arguments":{"a":"}"},"x":[1,{"y":2}],"name":"f"}\n', [("f", '{"a":"}"}')]),
        ('{"name": "f", "parameters": {}}', [("f", "{}")]),
        ('{"name": "f", "arguments": "{\\"a\\": 1}"}', [("f", '{"a": 1}')]),  # encoded twice
        ('{"name": "f"}', [("f", "{}")]),
        ('{"name": "f", "arguments": null}', [("f", "{}")]),
        ('{"name": "f", "arguments": {}} {"name": "g"}', [("f", "{}"), ("g", "{}")]),
        ('[{"name": "f"}, {"name": "g"}]', [("f", "{}"), ("g", "{}")]),
        ("", None),
        ("[]", None),
        ("{}", None),
        ('{"name": ""}', None),
        ('{"name": 3}', None),
        ('{"name": "\\ud800"}', None),  # could not be sent on as UTF-8
        ('{"name": "f", "arguments": [1]}', None),
        ('{"name": "f", "name": "g", "arguments": {}}', None),  # which one?
        ('{"name": "f", "arguments": {}, "arguments": {"a": 1}}', None),
        ('{"name": "f", "arguments": {}, "parameters": {"a": 1}}', None),
        ('{"name": "f", "arguments": {"a": 1, "a": 2}}', [("f", '{"a": 1, "a": 2}')]),  # the agent's to judge
        ('{"name": "f", "arguments": "{\\"a\\": \\"\\ud800\\"}"}', None),
        ('[{"name": "f"}', None),
        ('{"name": "f"}]', None),
        ('{"name": "f"} [{"name": "g"}]', None),
        ('{"name": "f", "arguments": "no JSON"}', None),
        ('{"name": "f", "arguments": {"a": NaN}}', None),  # the agent's JSON parser would refuse it
        ('{"name": "f", "arguments": {"a": 1}', None),
        ('{"name": "f", "arguments": {"a": 1}} and more', None),
        ('["f"]', None),
        ('{"name": "f", "arguments": ' + '{"a":' * 5000, None),
        ('{"name": "f", "arguments": ' + '{"a":' * 5000 + "1" + "}" * 5001, None),
        ('{"name": "f", "arguments": {"a": ' + "9" * 5000 + "}}", None),  # more digits than Python reads
    ],
)
def test_json_calls(text: str, expected: list[tuple[str, str]] | None) -> None:
    assert read_json(text, ()) == expected


def test_a_bare_object_is_a_call_only_with_arguments() -> None:
    assert calls(read('{"name": "f", "parameters": {"n": 1}}', "llama3_json")) == [("f", '{"n": 1}')]
    answer = read('{"name": "Bob"}', "llama3_json")
    assert (answer.content, answer.tool_calls, answer.malformed) == ('{"name": "Bob"}', (), False)
    broken = read('{"name": "f", "parameters": {"n": }}', "llama3_json")
    assert (broken.content, broken.malformed) == ('{"name": "f", "parameters": {"n": }}', True)
    two = read('<|python_tag|>{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}', "llama3_json")
    assert calls(two) == [("f", "{}"), ("g", "{}")]


def test_xml_values_are_typed_by_the_schema() -> None:
    block = "<tool_call>\n<function=f>\n{}{}</function>\n</tool_call>"
    n, s = "<parameter=n>\n12\n</parameter>\n", "<parameter=s>\n12\n</parameter>\n"
    assert calls(read(block.format(n, s), "qwen3_xml")) == [("f", '{"n": 12, "s": "12"}')]
    assert calls(read(block.format(n.replace("12", "twelve"), ""), "qwen3_xml")) == [("f", '{"n": "twelve"}')]
    assert read("<tool_call><function=f>junk</function></tool_call>", "qwen3_xml").malformed


@pytest.mark.parametrize("tool", [None, {}, {"function": 3}, {"function": {"name": "f", "parameters": "x"}}])
def test_tools_of_any_shape_are_survived(tool: Any) -> None:
    call = "<function=f><parameter=n>1</parameter></function>"
    assert syntax_of("qwen3_xml").read(call, [tool]) == [("f", '{"n": "1"}')]


def test_mistral_forms() -> None:
    listed = read('[TOOL_CALLS][{"name": "f", "arguments": {"n": 1}, "id": "000000000"}]', "mistral")
    assert calls(listed) == [("f", '{"n": 1}')]
    assert calls(read('ok [TOOL_CALLS]f[ARGS]{"n": 1}[TOOL_CALLS]g[CALL_ID]abc[ARGS]{}', "mistral")) == [
        ("f", '{"n": 1}'),
        ("g", "{}"),
    ]
    assert read("[TOOL_CALLS]f[ARGS]{", "mistral").malformed


names = st.from_regex(r"[a-z_]{1,8}", fullmatch=True)
values = st.one_of(st.text(st.characters(codec="utf-8"), max_size=12), st.integers(-99, 99), st.booleans(), st.none())
objects = st.dictionaries(names, values, max_size=3)


@pytest.mark.parametrize("syntax", ["hermes", "mistral", "llama3_json", "deepseek_v3", "deepseek_v31", "kimi_k2"])
@given(written=st.lists(st.tuples(names, objects), min_size=1, max_size=3))
def test_what_is_written_reads_back(syntax: str, written: list) -> None:
    made = [ToolCall("", name, json.dumps(arguments, ensure_ascii=False)) for name, arguments in written]
    message = read(syntax_of(syntax).write(made), syntax)
    assert calls(message) == [(call.name, call.arguments) for call in made]
    assert (message.content, message.malformed) == ("", False)


@pytest.mark.parametrize("syntax", ["qwen3_xml", "glm45"])
def test_untyped_text_writes_what_it_reads(syntax: str) -> None:
    made = [ToolCall("", "f", '{"n": 3, "s": "a\\nb"}'), ToolCall("", "f", "{}")]
    assert calls(read(syntax_of(syntax).write(made), syntax)) == [("f", '{"n": 3, "s": "a\\nb"}'), ("f", "{}")]


def test_arguments_that_are_no_object() -> None:
    assert parsed_arguments("[1]") is None
    assert parsed_arguments("{") is None
    assert parsed_arguments('{"a": 1} x') is None
    written = syntax_of("hermes").write([ToolCall("", "f", "not JSON")])
    assert written == '<tool_call>\n{"name": "f", "arguments": "not JSON"}\n</tool_call>'


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        ('{"a": 1, "b": [2]}', '{"b":[2],"a":1}', True),
        ('{"a": 1.0}', '{"a": 1}', True),
        ('{"a": "\\u00e9"}', '{"a": "é"}', True),
        ('{"a": 1}', '{"a": true}', False),
        ('{"a": "1"}', '{"a": 1}', False),
        ("broken {", " broken { ", True),
        ("broken {", "broken [", False),
        ('{"a":' * 5000, '{"a":' * 5001, False),
    ],
)
def test_calls_are_compared_as_json(a: str, b: str, same: bool) -> None:
    assert same_call(ToolCall("1", "f", a), ToolCall("2", "f", b)) is same
    assert not same_call(ToolCall("1", "f", a), ToolCall("1", "g", a))


# ---- turns ----


@pytest.mark.parametrize(
    ("text", "content", "reasoning", "names", "malformed"),
    [
        ("  plain\n", "  plain\n", "", [], False),
        ("<think>\nwhy\n</think>\n\nbecause ", "because ", "why", [], False),
        (" \n<think>a<b</think>c", "c", "a<b", [], False),
        ("<think>cut off", "", "cut off", [], False),
        ("<think></think>x", "x", "", [], False),
        ("x <think>y</think>", "x <think>y</think>", "", [], False),  # only at the beginning
        ('so:\n<tool_call>\n{"name": "f"}\n</tool_call>\n', "so:", "", ["f"], False),
        ('<think>t</think>\n<tool_call>{"name": "f"}</tool_call> \n', "", "t", ["f"], False),
        ('<tool_call>{"name": "f"}</tool_call><tool_call>{"name": "g"}</tool_call>', "", "", ["f", "g"], False),
        ('a <tool_call>{"name": "f"}</tool_call> b', "a\nb", "", ["f"], False),
        ('<tool_call>{"name": "f"}', "", "", ["f"], False),  # the closing tag was left out
        ('a <tool_call>{"name": "f"', 'a <tool_call>{"name": "f"', "", [], True),
        ("a\n<tool_call>x</tool_call> b", "a\n<tool_call>x</tool_call> b", "", [], True),
        ('<tool_call>x</tool_call><tool_call>{"name": "f"}</tool_call>', "<tool_call>x</tool_call>", "", ["f"], True),
        ('<tool_call>{"name": "f", "arguments": {"s": "</tool_call>"}}</tool_call>', "", "", ["f"], False),
        ("a <tool_cal", "a <tool_cal", "", [], False),
        ("", "", "", [], False),
    ],
)
def test_turns(text: str, content: str, reasoning: str, names: list[str], malformed: bool) -> None:
    message = read(text)
    assert (message.content, message.reasoning, message.malformed) == (content, reasoning, malformed)
    assert [call.name for call in message.tool_calls] == names
    assert [call.id for call in message.tool_calls] == [f"call_{index}" for index in range(len(names))]


def test_without_tools_calls_are_text() -> None:
    text = ' <tool_call>{"name": "f"}</tool_call> '
    assert read(text, None) == Message("assistant", text)


def test_turns_that_begin_inside_the_reasoning() -> None:
    message = read("\nwhy\n</think>\n\nyes", None, thinking=True)
    assert (message.reasoning, message.content) == ("why", "yes")


def test_raw_text_keeps_its_tags() -> None:
    assert read(" <think>x</think>", None, thinking=None) == Message("assistant", " <think>x</think>")


@pytest.mark.parametrize(
    ("text", "stops", "content", "stop"),
    [
        ("one\ntwo", ("\n",), "one", "\n"),
        ("abc", ("",), "abc", ""),
        ("abcd", ("abcd", "c"), "ab", "c"),  # "c" is complete first, as if it came character by character
        ("aab", ("ab",), "a", "ab"),
        ("ends in EN", ("END",), "ends in EN", ""),
        ("<think>a END b</think>c", ("END",), "", "END"),
    ],
)
def test_stop_strings(text: str, stops: tuple[str, ...], content: str, stop: str) -> None:
    assert read(text, None, stops).content == content
    reader = TurnReader(None, (), stops)
    for character in text:
        reader.feed(character)
    reader.finish()
    assert reader.message().content == content
    assert reader.stopped == stop


def test_text_is_not_held_back_longer_than_needed() -> None:
    reader = TurnReader(syntax_of("hermes"), TOOLS, ("STOP",))
    pieces = ["Hel", "lo ", "wor", "ld S", "o <", "b>"]
    assert [reader.feed(piece).text for piece in pieces] == ["Hel", "lo", " wor", "ld", " So", " <b>"]
    deltas = [reader.feed(piece) for piece in (" <tool_call>", '{"name": "f"}', "</tool_call>", " ")]
    assert [delta.text for delta in deltas] == ["", "", "", ""]
    assert [len(delta.calls) for delta in deltas] == [0, 1, 0, 0]  # without arguments: sent when the object ends
    assert reader.finish().text == ""


JSON_CALL = '{"name": "f", "arguments": {"s": "x"}}'
XML_CALL = ("<function=f>", "<parameter=n>1</parameter>", "</function>")
GLM_CALL = ("<tool_call>f\n", "<arg_key>n</arg_key>\n<arg_value>1</arg_value>\n")
KIMI = (
    "<|tool_calls_section_begin|>",
    "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
)
DEEPSEEK = (deepseek_v31.CALLS, f"{deepseek_v31.CALL}f{deepseek_v31.SEPARATOR}", deepseek_v31.CALL_END)
MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "f[ARGS]{}")
PARTS = (
    '{"name"',
    "{",
    "}",
    '"',
    "; ",
    " ",
    "\n",
    "word",
    "é",
    "<",
    "STOP",
    "ST",
    "</tool",
    "<thi",
    "[",
    "f(s='x')",
    "]",
)
BLOCKS = ("<|tool_calls_section_end|>", deepseek_v31.CALLS_END, '{"s": "x"}', '{"s": ', "\\u00e", "[f(n=1)]")
fragments = st.sampled_from([JSON_CALL, *XML_CALL, *GLM_CALL, *KIMI, *DEEPSEEK, *MARKERS, *PARTS, *BLOCKS])


def pieces(reader: TurnReader, text: str, cuts: list[int]) -> list[Delta]:
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    return [*(reader.feed(text[start:end]) for start, end in pairwise(edges)), reader.finish()]


@pytest.mark.parametrize("syntax", [None, *SYNTAXES])
@given(
    parts=st.lists(fragments, max_size=14),
    cuts=st.lists(st.integers(0, 200), max_size=12),
    stops=st.sampled_from([(), ("STOP",), ("OP", "STO"), ("</tool", "}}")]),
    thinking=st.sampled_from([False, True, None]),
)
def test_pieces_of_any_size_give_the_same_turn(
    syntax: str | None, parts: list[str], cuts: list[int], stops: tuple, thinking: bool | None
) -> None:
    text = "".join(parts)
    made = [TurnReader(syntax_of(syntax) if syntax else None, TOOLS, stops, thinking) for _ in range(3)]
    streams = [pieces(made[0], text, cuts), pieces(made[1], text, []), pieces(made[2], text, list(range(len(text))))]
    message = made[0].message()
    for reader, deltas in zip(made, streams, strict=True):
        assert reader.message() == message
        assert message.content == "".join(delta.text for delta in deltas)
        assert message.reasoning == "".join(delta.reasoning for delta in deltas)
        assert calls_of(deltas) == calls_of(streams[0])
        check_calls(deltas, message)
