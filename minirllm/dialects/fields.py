"""Reading JSON fields with one-sentence errors that name the field.

Owns: type and range checks, and the fields that several dialects have: sampling, functions as tools. Does not know:
messages, replies, HTTP.
A field that is null counts as absent. Unknown fields are never looked at, so they are ignored.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from minirllm.errors import RequestError
from minirllm.types import SamplingParams

MAX_CHOICES = 128
MAX_MESSAGES = 4096
MAX_TOOLS = 512
MAX_STOPS = 16
MAX_STOP = 256  # characters of one stop string: every token is compared with every beginning of it
MAX_TOP_LOGPROBS = 20


def shown(value: Any) -> str:
    """`value` for an error message, cut to a readable length."""
    if isinstance(value, dict | list):
        return f"{'an object' if isinstance(value, dict) else 'a list'} of {len(value)}"
    text = repr(value) if not isinstance(value, str) else repr(value[:61])
    return text if len(text) <= 60 else text[:57] + "..."


def no_constant(name: str) -> Any:
    """For ``json.loads(parse_constant=...)``: Python reads NaN and Infinity, JSON does not have them."""
    raise ValueError(f"{name} is not a JSON number")


def sayable(text: str) -> Any:
    """The value of JSON text, so that it can be said again: of 1e999, which no float can hold, the greatest one."""
    most = sys.float_info.max
    return json.loads(text, parse_float=lambda digits: min(max(float(digits), -most), most))


def finite(digits: str) -> float:
    """For ``json.loads(parse_float=...)``: Python reads 1e999 as infinity, which no JSON can say again."""
    value = float(digits)
    if math.isinf(value):
        raise ValueError(f"{digits[:40]} is too large a number")
    return value


class Fields:
    """A JSON object and where it stands in the request (``messages[2]``)."""

    def __init__(self, values: Any, at: str = ""):
        self.at = at
        if not isinstance(values, dict):
            raise RequestError(f"{at or 'The body'} must be a JSON object, got {shown(values)}.", at or None)
        self.values = values

    def path(self, name: str) -> str:
        """The full name of a field, for `param`."""
        return f"{self.at}.{name}" if self.at else name

    def wrong(self, name: str, expected: str) -> RequestError:
        """The error that field `name` is not what was expected."""
        return RequestError(f"{self.path(name)} must be {expected}, got {shown(self.get(name))}.", self.path(name))

    def get(self, name: str) -> Any:
        """The raw value; None when null or absent."""
        return self.values.get(name)

    def integer(self, name: str, low: int, high: int | None = None) -> int | None:
        """An integer within inclusive bounds, or None."""
        value = self.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
            raise self.wrong(
                name, f"an integer of at least {low}" + (f" and at most {high}" if high is not None else "")
            )
        return value

    def number(self, name: str, low: float, high: float) -> float | None:
        """A finite number within inclusive bounds, or None."""
        value = self.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            raise self.wrong(name, f"a number between {low:g} and {high:g}")
        return float(value)

    def flag(self, name: str) -> bool:
        """A boolean; absent is false."""
        value = self.get(name)
        if value is not None and not isinstance(value, bool):
            raise self.wrong(name, "true or false")
        return bool(value)

    def text(self, name: str) -> str:
        """A string; absent is empty."""
        value = self.get(name)
        if value is not None and not isinstance(value, str):
            raise self.wrong(name, "a string")
        return value or ""

    def list(self, name: str, most: int | None = None) -> list[Any]:
        """A list of at most `most`; absent is empty."""
        value = self.get(name)
        if value is not None and (not isinstance(value, list) or (most is not None and len(value) > most)):
            raise self.wrong(name, "a list" if most is None else f"a list of at most {most}")
        return value or []

    def refuse(self, defaults: dict[str, Any], instead: dict[str, str] | None = None) -> None:
        """Fields we know but do not support: null and the given default value pass, all else is refused by name."""
        for name, default in defaults.items():
            value = self.get(name)
            if value is not None and value != default:
                advice = (instead or {}).get(name, "leave it out")
                raise RequestError(f"{self.path(name)} is not supported here: {advice}.", self.path(name))


def name(fields: Fields) -> str:
    """The name that something must have."""
    given = fields.text("name")
    if not given:
        raise fields.wrong("name", "a non-empty string")
    return given


def lines(fields: Fields, name: str, expected: str, part: Callable[[Any, str], str]) -> str:
    """Text of a string, of a list of parts (one line each), of null, of nothing. `part` reads one, and hears where it
    stands."""
    value = fields.get(name)
    if value is None or isinstance(value, str):
        return value or ""
    if not isinstance(value, list):
        raise fields.wrong(name, expected)
    return "\n".join(part(item, f"{fields.path(name)}[{i}]") for i, item in enumerate(value))


def function_tool(fields: Fields, schema: str = "parameters") -> dict[str, Any]:
    """A tool in the one internal form: only what every dialect can say of one, so that all say the same of it.
    `schema`: the field with its parameters."""
    parameters = fields.get(schema)
    if parameters is not None:
        Fields(parameters, fields.path(schema))
    told = {"name": name(fields), "description": fields.text("description") or None, "parameters": parameters}
    return {"type": "function", "function": {key: value for key, value in told.items() if value is not None}}


def one_tool(fields: Fields, tools: list[dict[str, Any]]) -> dict[str, Any]:
    """The `tool_choice` of the tool that `fields` names, which must be one of `tools`."""
    called = name(fields)
    if called not in [tool["function"]["name"] for tool in tools]:
        raise RequestError(f"tool_choice names {shown(called)}, which is not in tools.", "tool_choice")
    return {"type": "function", "function": {"name": called}}


def logprobs(fields: Fields) -> tuple[bool, int]:
    """(`logprobs`: are they wanted?, `top_logprobs`: of how many other tokens)."""
    wanted, top = fields.flag("logprobs"), fields.integer("top_logprobs", 0, MAX_TOP_LOGPROBS) or 0
    if top and not wanted:
        raise RequestError("top_logprobs needs logprobs to be true.", "top_logprobs")
    return wanted, top


#: Known and not supported in any dialect, with the value that asks for nothing.
UNSUPPORTED: dict[str, Any] = {
    "logit_bias": {},
    "repetition_penalty": 1.0,
    "min_tokens": 0,
    "prompt_logprobs": None,
    "use_beam_search": False,
}


def sampling(
    fields: Fields, top_logprobs: int, names: Mapping[str, str] | None = None
) -> tuple[SamplingParams, frozenset[str]]:
    """The sampling parameters, and the names of those the caller sent. `names`: what a dialect calls them otherwise."""
    fields.refuse(UNSUPPORTED)

    def called(name: str) -> str:
        return (names or {}).get(name, name)

    max_tokens = fields.integer("max_completion_tokens", 1)
    top_k = fields.integer(called("top_k"), -1)
    sent: dict[str, Any] = {
        "max_tokens": fields.integer(called("max_tokens"), 1) if max_tokens is None else max_tokens,
        "temperature": fields.number("temperature", 0, 2),
        "top_p": fields.number(called("top_p"), 0, 1),
        "top_k": None if top_k is None else max(top_k, 0),
        "min_p": fields.number("min_p", 0, 1),
        "presence_penalty": fields.number(called("presence_penalty"), -2, 2),
        "frequency_penalty": fields.number(called("frequency_penalty"), -2, 2),
        "stop": _stops(fields, called("stop")) or None,
        "stop_token_ids": token_ids(fields, "stop_token_ids") or None,
        "seed": fields.integer("seed", -(2**63), 2**63 - 1),
        "ignore_eos": fields.flag("ignore_eos") or None,
    }
    sent = {name: value for name, value in sent.items() if value is not None}
    return SamplingParams(**sent, top_logprobs=top_logprobs), frozenset(sent)


def _stops(fields: Fields, name: str) -> tuple[str, ...]:
    stop = fields.get(name)
    stops = [stop] if isinstance(stop, str) else stop or []
    short = isinstance(stops, list) and all(isinstance(stop, str) and 0 < len(stop) <= MAX_STOP for stop in stops)
    if not short or len(stops) > MAX_STOPS:
        kind = f"a string of 1 to {MAX_STOP} characters"
        raise fields.wrong(name, f"{kind} or a list of at most {MAX_STOPS} of them")
    return tuple(stops)


def token_ids(fields: Fields, name: str) -> tuple[int, ...]:
    """A list of token ids; absent is empty."""
    ids = fields.list(name)
    if not is_ids(ids):
        raise fields.wrong(name, "a list of token ids")
    return tuple(ids)


def is_ids(ids: Iterable[Any]) -> bool:
    """Are these all token ids (whether the vocabulary has them is checked where it is known)?"""
    return all(isinstance(i, int) and not isinstance(i, bool) and 0 <= i < 2**31 for i in ids)


def stream_options(fields: Fields) -> bool:
    """``stream_options.include_usage``."""
    options = fields.get("stream_options")
    return options is not None and Fields(options, "stream_options").flag("include_usage")


def choices(fields: Fields) -> int:
    """`n`, the number of answers. `best_of` may only repeat it."""
    n = fields.integer("n", 1, MAX_CHOICES) or 1
    fields.refuse({"best_of": n}, {"best_of": "ask for n answers and choose yourself"})
    return n
