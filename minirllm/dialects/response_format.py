"""`response_format`: is the request's schema sound, and does the answer follow it?

Owns: the check after the fact. Nothing constrains decoding: training needs samples of the full distribution, so an
answer that breaks the format is returned as sampled, with a sentence that says what is wrong. Does not know: HTTP.
"""

from __future__ import annotations

import json
from typing import Any

from jsonschema import Draft202012Validator, validators
from jsonschema.exceptions import SchemaError
from referencing import Registry
from referencing.exceptions import Unresolvable

from minirllm.dialects.fields import Fields, no_constant
from minirllm.errors import RequestError
from minirllm.types import ModelReply

# A caller's regular expression can take exponential time, so what would run one is left out; so is `$schema`, which
# would switch to other rules half-way.
_UNCHECKED = {"pattern", "patternProperties", "unevaluatedProperties", "$schema"}
_HOLD_NAMES = {"properties", "$defs", "definitions", "dependentSchemas"}  # their keys are names, not keywords
_HOLD_VALUES = {"enum", "const", "default", "examples"}
_MOST_VALUES = 4_000  # in a schema: it takes 0.3 s to see that it is one
_MOST_WORK = 50_000  # keywords and values looked at in one check, about 0.5 s: references can double it at every step


class _TooMuch(Exception):
    """The check would take too long."""


def _validator(schema: Any, **options: Any) -> Any:
    """A validator that raises _TooMuch when it has done `_MOST_WORK`."""
    left, size = _MOST_WORK, _size(schema)

    def counted(keyword: str, rule: Any) -> Any:
        def check(validator: Any, value: Any, instance: Any, holder: Any) -> Any:
            nonlocal left
            left -= 1 + (len(value) if isinstance(value, dict | list) else 0)
            if keyword == "uniqueItems" and isinstance(instance, list):
                left -= len(instance) ** 2
            if keyword in ("$ref", "$dynamicRef") and not str(value).startswith("#/"):
                left -= size  # the whole schema is searched for an anchor
            if left < 0:
                raise _TooMuch
            return rule(validator, value, instance, holder)

        return check

    rules = Draft202012Validator.VALIDATORS
    kind = validators.extend(Draft202012Validator, {name: counted(name, rule) for name, rule in rules.items()})
    return kind(schema, **options)


def parse(fields: Fields) -> dict[str, Any] | None:
    """The request's `response_format`; None for plain text. Raises RequestError when its schema is no JSON schema."""
    value = fields.get("response_format")
    if value is None:
        return None
    form = Fields(value, "response_format")
    nested = form.get("type") == "json_schema"
    return checked(form, Fields(form.get("json_schema"), "response_format.json_schema") if nested else form)


def checked(form: Fields, holder: Fields | None = None) -> dict[str, Any] | None:
    """The same for a `form` that stands elsewhere; its schema stands in `holder`, or in itself."""
    kind, holder = form.get("type"), holder or form
    if kind == "text":
        return None
    if kind == "json_object":
        return {"type": kind}
    if kind != "json_schema":
        raise form.wrong("type", "text, json_object or json_schema")
    schema = holder.get("schema")
    try:
        if _size(schema) > _MOST_VALUES:
            raise RequestError(f"{holder.path('schema')} has more than {_MOST_VALUES} values.", holder.path("schema"))
        Draft202012Validator.check_schema({} if schema is None else Fields(schema, holder.path("schema")).values)
    except (SchemaError, RecursionError) as problem:
        why = problem.message[:500] if isinstance(problem, SchemaError) else "it is nested too deep"
        raise RequestError(f"{holder.path('schema')} is not a JSON schema: {why}", holder.path("schema")) from None
    strict = {"strict": True} if holder.flag("strict") else {}  # means something to a provider only
    return {"type": kind, "schema": _checkable(schema or {}), **strict}


def _size(schema: Any) -> int:
    """How many values it holds."""
    if not isinstance(schema, dict | list):
        return 1
    return 1 + sum(map(_size, schema.values() if isinstance(schema, dict) else schema))


def _checkable(schema: Any, names: bool = False) -> Any:
    """`schema` without the keywords that are not checked; `names`: its keys are names of properties."""
    if isinstance(schema, list):
        return [_checkable(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    left_out = set() if names else _UNCHECKED
    if not names and "patternProperties" in schema:
        left_out = left_out | {"additionalProperties"}  # means: those that match no pattern
    return {
        key: value if not names and key in _HOLD_VALUES else _checkable(value, not names and key in _HOLD_NAMES)
        for key, value in schema.items()
        if key not in left_out
    }


def error(reply: ModelReply, form: dict[str, Any] | None) -> str | None:
    """What keeps the answers from following `form`, per choice; None when nothing does. Tool calls are exempt."""
    if form is None:
        return None
    found = {c.index: _broken(c.message.content, form) for c in reply.choices if not c.message.tool_calls}
    return "; ".join(f"choice {index}: {text}" for index, text in found.items() if text) or None


def _broken(text: str, form: dict[str, Any]) -> str | None:
    try:
        value = json.loads(text, parse_constant=no_constant)
    except (ValueError, RecursionError) as problem:
        return f"not JSON: {problem}"
    if form["type"] == "json_object":
        return None if isinstance(value, dict) else "JSON, but not an object"
    try:
        # an empty registry: a remote $ref is never fetched
        first = next(_validator(form["schema"], registry=Registry()).iter_errors(value), None)
    except _TooMuch:
        return "the schema takes too long to check"
    except (Unresolvable, RecursionError, ValueError, ArithmeticError) as problem:
        return f"the schema cannot be followed: {type(problem).__name__}"
    return None if first is None else f"{first.json_path}: {first.message[:500]}"
