"""`response_format`: wrong schemas are refused, answers that break theirs say so, hostile schemas do no harm."""

from __future__ import annotations

import json
from typing import Any

import pytest

from minirllm.dialects import chat
from minirllm.errors import RequestError
from minirllm.types import Choice, Completion, Message, ModelReply, ModelRequest, ToolCall


def parse(**fields) -> ModelRequest:
    return chat.parse({"messages": [{"role": "user", "content": "hi"}], **fields})


def said(*messages: Message, response_format) -> str | None:
    """The `format_error` of an answer with these messages."""
    choices = [Choice(k, f"c{k}", m, Completion([1], [-0.5], "stop", 0), "stop") for k, m in enumerate(messages)]
    return chat.response(
        ModelReply("chatcmpl-c0", "tiny", 0, [5], choices), parse(response_format=response_format), str
    ).get("format_error")


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}


def form(schema) -> dict:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


@pytest.mark.parametrize(
    ("text", "response_format", "expected"),
    [
        ('{"a": 1}', form(SCHEMA), None),
        ('{"a": "1"}', form(SCHEMA), "choice 0: $.a: '1' is not of type 'integer'"),
        ("{}", form(SCHEMA), "choice 0: $: 'a' is a required property"),
        ('{"a": 1, "b": 2}', form(SCHEMA), "choice 0: $: Additional properties"),
        ("no", form(SCHEMA), "choice 0: not JSON"),
        ("[1]", {"type": "json_object"}, "choice 0: JSON, but not an object"),
        ("{}", {"type": "json_object"}, None),
        ("no", {"type": "text"}, None),
        ("[" * 100_000, {"type": "json_object"}, "choice 0: not JSON"),
        ("1", form({"$ref": "http://127.0.0.1:9/never-fetched"}), "choice 0: the schema cannot be followed"),
        ("NaN", {"type": "json_object"}, "choice 0: not JSON: NaN is not a JSON number"),
        ("1", form({"$ref": "http://["}), "choice 0: the schema cannot be followed"),
        ("1" * 400, form({"multipleOf": 1e-300}), "choice 0: the schema cannot be followed"),
        ('{"pattern": 1}', form({"properties": {"pattern": {"type": "string"}}}), "choice 0: $.pattern: 1 is not"),
        ('"pattern"', form({"enum": [{"pattern": "x"}]}), "choice 0: $: 'pattern' is not one of [{'pattern': 'x'}]"),
        ("1", form({"$ref": "#"}), "choice 0: the schema cannot be followed"),
        (
            json.dumps("a" * 50 + "b"),
            form({"type": "string", "pattern": "^(a+)+$"}),
            None,
        ),  # not run: it would never end
        (
            json.dumps(["a" * 50 + "b"]),
            form({"items": {"$schema": "http://json-schema.org/draft-07/schema#", "pattern": "^(a+)+$"}}),
            None,
        ),
        (
            '{"aaaa": 1}',
            form({"patternProperties": {"^(a+)+$": {"type": "string"}}, "additionalProperties": False}),
            None,
        ),
    ],
)
def test_the_answer_is_checked_against_the_format(text, response_format, expected) -> None:
    found = said(Message("assistant", text), response_format=response_format)
    assert found is expected or found.startswith(expected)


def test_several_choices_say_which_broke_the_format_and_tool_calls_are_exempt() -> None:
    call = Message("assistant", "", (ToolCall("c", "run", "{}"),))
    broken = said(Message("assistant", "{}"), Message("assistant", "no"), call, response_format={"type": "json_object"})
    assert broken.startswith("choice 1: not JSON")
    assert "choice 2" not in broken


@pytest.mark.parametrize(
    ("response_format", "param"),
    [
        ({"type": "xml"}, "response_format.type"),
        ({"type": "json_schema"}, "response_format.json_schema"),
        (form({"type": "nonsense"}), "response_format.json_schema.schema"),
        (form({"pattern": "(" * 5000}), "response_format.json_schema.schema"),
        (form([]), "response_format.json_schema.schema"),
    ],
)
def test_a_wrong_format_is_refused(response_format, param) -> None:
    with pytest.raises(RequestError) as caught:
        parse(response_format=response_format)
    assert caught.value.param == param


# ---- schemas that take time ----

LONG = "choice 0: the schema takes too long to check"


def following(schema: dict[str, Any], value: Any) -> str | None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    return said(Message("assistant", json.dumps(value)), response_format=form)


def laughs(levels: int) -> dict[str, Any]:
    """A schema in which every reference is followed twice: 2 ** levels checks."""
    definitions: dict[str, Any] = {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(levels)}
    return {"$defs": {**definitions, f"d{levels}": {}}, "$ref": "#/$defs/d0"}


def searched(size: int) -> dict[str, Any]:
    """One whose every reference is looked for in all of it."""
    definitions: dict[str, Any] = {f"a{i}": {"properties": {}} for i in range(size)}
    return {"items": {"$ref": "#x"}, "$defs": {**definitions, "b": {"$anchor": "x"}}}


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        (laughs(60), 1),
        (searched(1000), [1] * 1000),
        ({"items": {"enum": list(range(3000))}}, [2999] * 3000),
        ({"uniqueItems": True}, [{"a": i} for i in range(3000)]),
    ],
    ids=["doubles", "searches", "compares", "pairs"],
)
def test_a_check_without_end_is_given_up(schema: dict[str, Any], value: Any) -> None:
    assert following(schema, value) == LONG


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        (laughs(5), 1),
        (searched(3), [1] * 100),
        ({"items": {"enum": list(range(50))}}, [7] * 500),
        ({"uniqueItems": True}, [{"a": i} for i in range(100)]),
        ({"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(200)}}, {"p3": "x"}),
    ],
)
def test_honest_schemas_are_followed(schema: dict[str, Any], value: Any) -> None:
    assert following(schema, value) is None


def test_a_schema_too_large_to_check_is_refused() -> None:
    schema = {"properties": {f"p{i}": {"type": "string", "minLength": 1} for i in range(50_000)}}
    with pytest.raises(RequestError, match="has more than 4000 values"):
        parse(response_format={"type": "json_schema", "json_schema": {"schema": schema}})
