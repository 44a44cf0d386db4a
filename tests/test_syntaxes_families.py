"""The forms of single syntaxes: Python calls, sections of special tokens, untyped text."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minirllm.syntaxes.calls import typed
from minirllm.syntaxes.reader import TurnReader
from minirllm.types import Message, ToolCall
from tests.test_syntaxes import TOOLS, calls, names, read, syntax_of, values

# ---- Python ----

keys = st.text(max_size=8)
deep = st.recursive(values, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3))


@given(written=st.lists(st.tuples(names, st.dictionaries(keys, deep, max_size=3)), min_size=1, max_size=3))
def test_python_writes_what_it_reads(written: list) -> None:
    made = [ToolCall("", f"{name}_", json.dumps(arguments)) for name, arguments in written]
    message = read(syntax_of("llama3_pythonic").write(made), "llama3_pythonic")
    assert [(one.name, json.loads(one.arguments)) for one in message.tool_calls] == [
        (one.name, json.loads(one.arguments)) for one in made
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[f(n=1)]", [("f", '{"n": 1}')]),
        (" [f(n=-1.5, s='it\\'s'), g.h()] ", [("f", '{"n": -1.5, "s": "it\'s"}'), ("g.h", "{}")]),
        ("[f(s=None, b=[True, false, null])]", [("f", '{"s": null, "b": [true, false, null]}')]),
        ("[f(o={'a': (1, 2)})]", [("f", '{"o": {"a": [1, 2]}}')]),
        ("[f(**{'a-b': 1}, n=2)]", [("f", '{"a-b": 1, "n": 2}')]),
        ("[f(s='\\ud800')]", [("f", '{"s": "\\ud800"}')]),  # can be sent on as an escape only
        ("[f(s='\\d')]", [("f", '{"s": "\\\\d"}')]),  # Python would warn
        ("<|python_start|>[f(n=1)]<|python_end|>", [("f", '{"n": 1}')]),
    ],
)
def test_python_calls(text: str, expected: list) -> None:
    assert calls(read(text, "llama3_pythonic")) == expected


@pytest.mark.parametrize(
    ("text", "malformed"),
    [
        ("[f(1)]", True),  # which argument it is cannot be known
        ("[f(n=1, n=2)]", True),
        ("[f(n=1, **{'n': 2})]", True),
        ("[f(**3)]", True),
        ("[f(n=__import__('os').system('true'))]", True),
        ("[f(n=g())]", True),
        ("[f(n=open)]", True),
        ("[f(n=1 + 1)]", True),
        ("[f(n=f'{1}')]", True),
        ("[f(n=1e999)]", True),
        ("[f(n=1j)]", True),
        ("[f(n={1: 2})]", True),
        ("[f(s=b'x')]", True),
        ("[f()()]", True),
        ("[f(n=1)", True),
        ("[f(n=1)] and more", True),
        ("[1] says so", False),
        ("[]", False),
        ("[f, g]", False),
    ],
)
def test_what_is_no_list_of_python_calls_stays_text(text: str, malformed: bool) -> None:
    assert read(text, "llama3_pythonic") == Message("assistant", text, malformed=malformed)


def test_text_in_brackets_is_not_held_back() -> None:
    reader = TurnReader(syntax_of("llama3_pythonic"), TOOLS)
    assert [reader.feed(piece).text for piece in ("[", "1", "] ", "says")] == ["", "[1", "]", " says"]


# ---- sections of special tokens ----


def test_deepseek_and_kimi_forms() -> None:
    bar, space = "\uff5c", "\u2581"
    begin, end = (f"<{bar}tool{space}calls{space}{edge}{bar}>" for edge in ("begin", "end"))
    call, call_end = (f"<{bar}tool{space}call{space}{edge}{bar}>" for edge in ("begin", "end"))
    separator = f"<{bar}tool{space}sep{bar}>"
    fenced = f"{call}function{separator}f\n```json\n" + '{"n":  1}' + f"\n```{call_end}"
    bare = f"{call}f{separator}" + '{"n":  1}' + call_end
    assert calls(read(f"Well.{begin}{fenced}\n{fenced}{end}", "deepseek_v3")) == [("f", '{"n":  1}')] * 2
    assert calls(read(f"{begin}{bare}{bare}{end}", "deepseek_v31")) == [("f", '{"n":  1}')] * 2
    assert read(f"{begin}{fenced}{end}", "deepseek_v31").malformed
    assert read(f"{begin}{bare}{end}", "deepseek_v3").malformed
    kimi = '<|tool_call_begin|>functions.f:{}<|tool_call_argument_begin|> {{"n": 1}} <|tool_call_end|>'
    section = "<|tool_calls_section_begin|>{}<|tool_calls_section_end|>"
    message = read("ok " + section.format(kimi.format(3) + kimi.format(4)), "kimi_k2")
    assert (message.content, calls(message)) == ("ok", [("f", '{"n": 1}')] * 2)
    assert read(section.format(kimi.format("x")), "kimi_k2").malformed
    assert read(section.format(""), "kimi_k2").malformed


# ---- untyped text ----

PROPERTIES = {
    "n": {"type": "integer"},
    "b": {"type": "boolean"},
    "o": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "r": {"$ref": "#/$defs/r"},
    "l": {"type": ["array", "null"]},
    "u": {},
}


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("n", "12", "12"),
        ("n", " 12 ", "12"),
        ("n", "1.50", "1.50"),  # to the letter
        ("n", "twelve", '"twelve"'),  # not what the schema asks for: the agent gets to see it
        ("n", "NaN", '"NaN"'),
        ("n", "9" * 5000, '"' + "9" * 5000 + '"'),
        ("l", "[" * 99 + "]" * 99, "[" * 99 + "]" * 99),
        ("l", "[" * 101 + "]" * 101, '"' + "[" * 101 + "]" * 101 + '"'),
        ("n", '{"a":' * 5000, json.dumps('{"a":' * 5000)),
        ("b", "True", "true"),  # as templates write it
        ("b", "false", "false"),
        ("o", "12", '"12"'),
        ("o", "null", "null"),
        ("o", "None", "null"),
        ("r", '{"a": 1}', '{"a": 1}'),
        ("l", "[1,  2]", "[1,  2]"),
        ("l", "null", "null"),
        ("u", "12", '"12"'),
        ("u", 'a "b"\né', '"a \\"b\\"\\né"'),
        ("unknown", "null", '"null"'),
    ],
)
def test_texts_mean_what_the_schema_says(name: str, text: str, value: str) -> None:
    schema = {"type": "object", "properties": PROPERTIES, "$defs": {"r": {"type": "object"}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    assert typed([(name, text)], [tool], "f") == f'{{"{name}": {value}}}'
    assert typed([(name, text), (name, text)], [tool], "f") is None
    assert typed([("l", "[" * 100 + "]" * 100)], [tool], "f") is None


RING = {"n": {"$ref": "#/$defs/n"}}


@pytest.mark.parametrize(
    "schema", ["x", {"properties": []}, {"properties": {"n": 3}}, {"properties": RING, "$defs": RING}]
)
def test_schemas_of_any_shape_are_survived(schema: Any) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    assert typed([("n", "1")], [tool], "f") == '{"n": "1"}'


def test_glm_forms() -> None:
    first, second = "<arg_key>n</arg_key>\n<arg_value>1</arg_value>\n", "<arg_key>s</arg_key><arg_value>1</arg_value>"
    assert calls(read(f"<tool_call>f\n{first}{second}</tool_call>", "glm45")) == [("f", '{"n": 1, "s": "1"}')]
    assert calls(read("<tool_call>f</tool_call>", "glm45")) == [("f", "{}")]
    assert read("<tool_call>f\n<arg_key>n</arg_key></tool_call>", "glm45").malformed
    assert read('<tool_call>{"name": "f"}</tool_call>', "glm45").malformed
