"""Chat Completions from the client's side: a `ModelRequest` as a body, events as deltas, refusals as errors.

Owns: those three translations. Does not know: HTTP, sessions, who the provider is.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from minirllm.dialects.chat import message_json
from minirllm.errors import ContextOverflow, ProviderError, RequestError
from minirllm.inflight import shown_tools
from minirllm.syntaxes.calls import parsed_arguments
from minirllm.types import CallDelta, Delta, Message, ModelRequest, ToolCall, Usage

SAID = 500  # characters of a provider's own words that an error repeats
MAX_EVENT = 16 * 2**20  # bytes

#: Sampling parameters that are sent when the caller asked for them.
PASSED = ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "stop", "stop_token_ids")

_OVERFLOW = re.compile(
    r"context[ _](?:length|window|size)|maximum context|prompt is too long|input is too long|too many (?:input )?tokens"
    r"|exceeds? the (?:model's )?(?:maximum )?(?:number of )?(?:input )?tokens",
    re.IGNORECASE,
)
_COUNT = re.compile(r"\b\d[\d,]*\b")
_NO_CREDIT = re.compile(r"insufficient_quota|exceeded your current quota|credit balance")


def body(request: ModelRequest, model: str, seed: int) -> dict[str, Any]:
    """The request as it goes out, always streamed: so a provider that hangs or dies is noticed. Reasoning is not sent
    back: most providers refuse it."""
    asked = {name: getattr(request.params, name) for name in PASSED if name in request.asked}
    form = request.response_format
    if form is not None and form["type"] == "json_schema":
        strict = {"strict": True} if form.get("strict") else {}
        form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": form["schema"], **strict}}
    optional = {
        "max_tokens": request.params.max_tokens,
        "tools": shown_tools(request) or None,
        "tool_choice": request.tool_choice if shown_tools(request) and request.tool_choice != "auto" else None,
        "response_format": form,
    }
    return {
        "model": model,
        "messages": [message_json(replace(message, reasoning="")) for message in request.messages or []],
        "stream": True,
        "stream_options": {"include_usage": True},
        "seed": seed,
        **asked,
        **{name: value for name, value in optional.items() if value is not None},
    }


async def events(chunks: AsyncIterator[bytes]) -> AsyncIterator[str]:
    """The data of server-sent events. Lines end at line feeds only: JSON text may hold what Unicode calls line ends."""
    rest, data = b"", list[str]()
    async for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        if len(rest) > MAX_EVENT:
            raise ValueError("an event without an end")
        for line in (line.removesuffix(b"\r").decode() for line in lines):
            name, _, value = line.partition(":")
            if name == "data":
                data.append(value.removeprefix(" "))
            elif not line and data:
                yield "\n".join(data)
                data.clear()
    name, _, value = rest.decode().strip().partition(":")
    data += [value.strip()] if name == "data" else []  # some end without the empty line
    if data:
        yield "\n".join(data)


@dataclass
class _Call:
    id: str
    name: str
    arguments: str = ""


class Reading:
    """One answer as its events come in; `tell` hears each piece. `call_id` names calls that the provider did not."""

    def __init__(self, index: int, call_id: str, tell: Callable[[Delta], None]):
        self.index, self.call_id, self.tell = index, call_id, tell
        self.id = self.model = self.finish = self.text = self.reasoning = ""
        self.usage = Usage()
        self.calls: dict[Any, _Call] = {}  # by the provider's index
        self.begun = False  # a piece was told

    def event(self, value: Mapping[str, Any]) -> None:
        """One chunk, or a whole answer. Raises AttributeError, LookupError, TypeError or ValueError if it is none."""
        self.id, self.model = value.get("id") or self.id, value.get("model") or self.model
        if used := value.get("usage"):
            details = used.get("prompt_tokens_details") or {}
            counts = used.get("prompt_tokens"), used.get("completion_tokens"), details.get("cached_tokens")
            self.usage = Usage(*(int(count or 0) for count in counts))
        for choice in (value.get("choices") or [])[:1]:
            self._piece(choice.get("delta") or choice.get("message") or {})
            self.finish = choice.get("finish_reason") or self.finish

    def _piece(self, piece: Mapping[str, Any]) -> None:
        text, reasoning = _text(piece.get("content")), _text(piece.get("reasoning_content") or piece.get("reasoning"))
        text += _text(piece.get("refusal"))
        calls = tuple(delta for call in piece.get("tool_calls") or [] if (delta := self._call(call)))
        self.text, self.reasoning = self.text + text, self.reasoning + reasoning
        if text or reasoning or calls:
            self.begun = True
            self.tell(Delta(self.index, text, reasoning, calls))

    def _call(self, piece: Mapping[str, Any]) -> CallDelta | None:
        """A piece of a call. Without an index: of a new one if it has another id, else of the last."""
        function = piece.get("function") or {}
        key, id, name = piece.get("index"), piece.get("id") or "", function.get("name") or ""
        if key is None:
            last = next(reversed(self.calls), -1)
            key = last if last in self.calls and id in ("", self.calls[last].id) and not name else len(self.calls)
        arguments = function.get("arguments") or ""
        arguments = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        if key in self.calls:
            self.calls[key].arguments += arguments
            place = list(self.calls).index(key)
            return CallDelta(place, arguments=arguments) if arguments else None
        if not name:
            raise ValueError("a tool call without a name")
        known, place = {call.id for call in self.calls.values()}, len(self.calls)
        id = id if id and id not in known else f"call_{self.call_id}_{place}"
        self.calls[key] = _Call(id, name, arguments)
        return CallDelta(place, id, name, arguments)

    def message(self) -> tuple[Message, str]:
        """The answer and why it ended, once all events are in. A call whose arguments are no JSON object is text."""
        whole, content, broken = list[ToolCall](), self.text, False
        for call in self.calls.values():
            if parsed_arguments(call.arguments or "{}") is not None:
                whole.append(ToolCall(call.id, call.name, call.arguments or "{}"))
            else:
                content += json.dumps({"name": call.name, "arguments": call.arguments}, ensure_ascii=False)
                broken = True
        ends = {"length": "length", "max_tokens": "length"}
        reason = ends.get(self.finish, "tool_calls" if whole else "stop")
        message = Message("assistant", content, tuple(whole), reasoning=self.reasoning, malformed=broken)
        return message, reason


def _text(value: Any) -> str:
    """Text, whether it comes as a string or as parts."""
    if isinstance(value, list):
        return "".join(_text(part.get("text")) for part in value)
    if not isinstance(value, str | None):
        raise TypeError("content that is no text")
    return value or ""


def refusal(name: str, status: int, raw: str) -> RequestError:
    """What a provider's error means to whoever asked: the request is wrong, the key is, or it should be tried again."""
    words, code = said(raw)
    if status in (400, 413, 422) and ("context_length_exceeded" in code or _OVERFLOW.search(words)):
        return _overflow(name, words)
    sentence = f"{name} answered HTTP {status}: {words or 'nothing'}."
    if status == 401:
        return ProviderError(
            f"{sentence} Its key is wrong: give another by `minirllm model setup` or the environment.", 401
        )
    if status == 402 or (status == 429 and _NO_CREDIT.search(f"{code} {words}")):
        return ProviderError(f"{sentence} Its account has no credit left.", 402)
    if status in (403, 404):
        return ProviderError(f"{sentence} Look at the model's name, the base URL and what the key may do.", status)
    if status in (408, 425, 429, 529):
        return RequestError(sentence, status=503)  # not 429: some programs end at once when they read it
    return RequestError(sentence, status=status if 400 <= status < 500 else 502)


def _overflow(name: str, said: str) -> RequestError:
    """With both counts where the provider says them, the limit first as most do; else in its words."""
    counts = [count for match in _COUNT.findall(said) if (count := int(match.replace(",", ""))) >= 64]
    if "tokens > " in said:
        counts.reverse()
    if counts and max(counts) > counts[0]:
        return ContextOverflow(counts[0], max(counts))
    problem = RequestError(f"{name}: {said}.", "messages")
    problem.code = ContextOverflow.code
    return problem


def said(raw: str) -> tuple[str, str]:
    """(message, code) of an error body, whatever its form, on one line."""
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError):
        value = raw
    value = value[0] if isinstance(value, list) and value else value
    inner = value.get("error", value) if isinstance(value, dict) else value
    if isinstance(inner, dict):
        code = f"{inner.get('code') or ''} {inner.get('type') or ''}".strip()
        message = inner.get("message") or inner.get("detail") or json.dumps(inner)
        return " ".join(str(message).split())[:SAID].rstrip("."), code
    return " ".join(str(inner).split())[:SAID].rstrip("."), ""
