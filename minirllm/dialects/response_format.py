"""`response_format`: is the request's schema sound, and does the answer follow it?

Owns: the check after the fact. Nothing constrains decoding: training needs samples of the full distribution, so an
answer that breaks the format is returned as sampled, with a sentence that says what is wrong. Does not know: HTTP.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError, ValidationError
from jsonschema.validators import extend
from referencing import Registry
from referencing.exceptions import Unresolvable

from minirllm.dialects.fields import Fields
from minirllm.errors import RequestError
from minirllm.types import ModelReply


def _unchecked(validator: Any, value: Any, instance: Any, schema: Any) -> Iterator[ValidationError]:
    return iter(())


def _additional_properties(validator: Any, value: Any, instance: Any, schema: Any) -> Iterator[ValidationError] | None:
    if "patternProperties" in schema:
        return None
    return Draft202012Validator.VALIDATORS["additionalProperties"](validator, value, instance, schema)


# A caller's regular expression can take exponential time, so the keywords that run one are not checked.
_Validator = extend(
    Draft202012Validator,
    {
        "pattern": _unchecked,
        "patternProperties": _unchecked,
        "unevaluatedProperties": _unchecked,
        "additionalProperties": _additional_properties,
    },
)


def parse(fields: Fields) -> dict[str, Any] | None:
    """The request's `response_format`; None for plain text. Raises RequestError when its schema is no JSON schema."""
    value = fields.get("response_format")
    if value is None:
        return None
    form = Fields(value, "response_format")
    kind = form.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return {"type": kind}
    if kind != "json_schema":
        raise form.wrong("type", "text, json_object or json_schema")
    holder = Fields(form.get("json_schema"), "response_format.json_schema")
    schema = holder.get("schema")
    try:
        Draft202012Validator.check_schema({} if schema is None else Fields(schema, holder.path("schema")).values)
    except SchemaError as error:
        raise RequestError(
            f"{holder.path('schema')} is not a JSON schema: {error.message}", holder.path("schema")
        ) from None
    return {"type": kind, "schema": schema or {}}


def error(reply: ModelReply, form: dict[str, Any] | None) -> str | None:
    """What keeps the answers from following `form`, per choice; None when nothing does. Tool calls are exempt."""
    if form is None:
        return None
    found = {c.index: _broken(c.message.content, form) for c in reply.choices if not c.message.tool_calls}
    return "; ".join(f"choice {index}: {text}" for index, text in found.items() if text) or None


def _broken(text: str, form: dict[str, Any]) -> str | None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as problem:
        return f"not JSON: {problem}"
    if form["type"] == "json_object":
        return None if isinstance(value, dict) else "JSON, but not an object"
    try:
        # an empty registry: a remote $ref is never fetched
        first = next(_Validator(form["schema"], registry=Registry()).iter_errors(value), None)
    except (Unresolvable, RecursionError) as problem:
        return f"the schema cannot be followed: {type(problem).__name__}"
    return None if first is None else f"{first.json_path}: {first.message[:500]}"
