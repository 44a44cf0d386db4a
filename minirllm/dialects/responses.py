"""Responses: JSON to `ModelRequest`, `ModelReply` to JSON and server-sent events; answers asked for again by id.

Owns: the fields of this dialect, in both directions. Does not know: HTTP, sessions, templates, torch.
What a request refers to (`previous_response_id`, item references) is looked up in the answers kept for its session; an
answer is kept unless `store` is false.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from minirllm.dialects import fields as read
from minirllm.dialects import response_format
from minirllm.dialects.fields import Fields
from minirllm.dialects.kept import Kept
from minirllm.dialects.openai import Counted, TokenText, error
from minirllm.dialects.responses_items import Tools, items_of, messages_of
from minirllm.dialects.responses_stream import Stream
from minirllm.errors import RequestError
from minirllm.types import Message, ModelReply, ModelRequest, SamplingParams

__all__ = ["COUNT", "KEPT", "ROUTES", "Stream", "error", "parse", "recall", "response"]

ROUTES: tuple[str, ...] = ("/v1/responses",)
COUNT: Counted = {
    "/v1/responses/input_tokens": lambda tokens: {"object": "response.input_tokens", "input_tokens": tokens},
}
ONE, ITEMS = "/v1/responses/{id}", "/v1/responses/{id}/input_items"
KEPT: tuple[tuple[str, str], ...] = (("GET", ONE), ("DELETE", ONE), ("GET", ITEMS))

LOGPROBS = "message.output_text.logprobs"
_UNSUPPORTED: dict[str, Any] = {"background": False, "conversation": None, "prompt": None, "n": 1}
_INSTEAD = {
    "background": "ask with stream instead",
    "conversation": "use previous_response_id, or send the items again",
    "prompt": "send instructions and input",
}
#: Sent back as they came, with what stands there when nothing came. What the model does depends on none of them.
_ECHO: dict[str, Any] = {
    "max_tool_calls": None,
    "parallel_tool_calls": True,
    "prompt_cache_key": None,
    "safety_identifier": None,
    "service_tier": "default",
    "truncation": "disabled",
    "user": None,
}


def parse(body: Any, route: str = ROUTES[0], kept: Kept | None = None) -> ModelRequest:
    """The request in the one internal form. Raises RequestError naming the field."""
    fields = Fields(body)
    fields.refuse(_UNSUPPORTED, _INSTEAD)
    tools = Tools([*fields.list("tools", read.MAX_TOOLS), *_additional(fields)])
    tool_choice, shown = _tool_choice(fields, tools)
    top_logprobs = fields.integer("top_logprobs", 0, read.MAX_TOP_LOGPROBS) or 0
    params, asked = read.sampling(fields, top_logprobs, {"max_tokens": "max_output_tokens"})
    store = fields.get("store") is None or fields.flag("store")
    return ModelRequest(
        messages=_messages(fields, tools, kept),
        tools=shown,
        tool_choice=tool_choice,
        params=params,
        asked=asked,
        stream=fields.flag("stream"),
        logprobs=bool(top_logprobs) or LOGPROBS in fields.list("include"),
        return_token_ids=fields.flag("return_token_ids"),
        response_format=_format(fields),
        notes={"tools": tools, "echo": _echo(fields, params, store), "kept": kept if store else None},
    )


def _messages(fields: Fields, tools: Tools, kept: Kept | None) -> list[Message]:
    """Instructions, what was said before, and the input. Instructions of an earlier request are its own."""
    given = fields.get("input")
    items = [{"role": "user", "content": given}] if isinstance(given, str) else fields.list("input", read.MAX_MESSAGES)
    said = messages_of(items, tools, lambda id: _output_item(kept, id))
    if not said:
        raise RequestError("input must be a text or a list with at least one message.", "input")
    instructions, previous = fields.text("instructions"), fields.text("previous_response_id")
    before = _conversation(kept, previous) if previous else []
    return [*([Message("system", instructions)] if instructions else []), *before, *said]


def _additional(fields: Fields) -> list[Any]:
    """Tools that stand in the input."""
    items = fields.get("input")
    found = [item for item in items if isinstance(item, dict)] if isinstance(items, list) else []
    return [tool for item in found if item.get("type") == "additional_tools" for tool in Fields(item).list("tools")]


def _tool_choice(fields: Fields, tools: Tools) -> tuple[str | dict[str, Any], list[dict[str, Any]]]:
    """(the choice in the internal form, the tools that the model is told of)."""
    choice = fields.get("tool_choice")
    if choice is None or choice in ("auto", "none"):
        return choice or "auto", tools.shown
    if not tools.shown:
        raise RequestError("tool_choice asks for a tool, but tools is empty.", "tool_choice")
    if choice == "required":
        return "required", tools.shown
    form = Fields(choice, "tool_choice") if isinstance(choice, dict) else Fields({}, "tool_choice")
    if form.get("type") == "allowed_tools":
        allowed = [Fields(value, f"{form.path('tools')}[{i}]") for i, value in enumerate(form.list("tools"))]
        mode = form.get("mode") or "auto"
        if mode not in ("auto", "required"):
            raise form.wrong("mode", "auto or required")
        return mode, tools.only({_named(tool, tools) for tool in allowed})
    if form.get("type") not in ("function", "custom"):
        raise fields.wrong("tool_choice", "auto, none, required, or a tool by its type (function, custom) and name")
    return {"type": "function", "function": {"name": _named(form, tools)}}, tools.shown


def _named(form: Fields, tools: Tools) -> str:
    name = tools.name(read.name(form), form.text("namespace"))
    if name not in tools.known:
        raise RequestError(f"tool_choice names {read.shown(name)}, which is not in tools.", "tool_choice")
    return name


def _format(fields: Fields) -> dict[str, Any] | None:
    """``text.format``."""
    text = fields.get("text")
    value = None if text is None else Fields(text, "text").get("format")
    return None if value is None else response_format.checked(Fields(value, "text.format"))


def _echo(fields: Fields, params: SamplingParams, store: bool) -> dict[str, Any]:
    def given(name: str, default: Any) -> Any:
        value = fields.get(name)
        return default if value is None else value

    metadata = Fields(given("metadata", {}), "metadata").values
    reasoning = Fields(given("reasoning", {}), "reasoning").values
    text = {"format": {"type": "text"}, **{k: v for k, v in given("text", {}).items() if v is not None}}
    return {
        **{name: given(name, default) for name, default in _ECHO.items()},
        "background": False,
        "instructions": fields.text("instructions") or None,
        "max_output_tokens": fields.get("max_output_tokens"),
        "metadata": metadata,
        "previous_response_id": fields.text("previous_response_id") or None,
        "reasoning": {"effort": None, "summary": None, **reasoning},
        "store": store,
        "temperature": params.temperature,
        "text": text,
        "tool_choice": given("tool_choice", "auto"),
        "tools": fields.list("tools"),
        "top_logprobs": params.top_logprobs,
        "top_p": params.top_p,
    }


def response(reply: ModelReply, request: ModelRequest, token_text: TokenText) -> dict[str, Any]:
    """The whole answer as JSON."""
    stream = Stream(request, token_text, reply.model)
    stream.body["created_at"] = reply.created
    stream.finish(reply)
    return stream.body


# ---- answers that are kept ----


def recall(method: str, route: str, id: str, query: Mapping[str, str], kept: Kept) -> dict[str, Any]:
    """What the routes of KEPT answer."""
    body = kept.body(id)
    if body is None:
        raise RequestError(f"Response with id {id[:100]!r} not found.", status=404)
    if method == "DELETE":
        kept.forget(id)
        return {"id": id, "object": "response", "deleted": True}
    if route == ITEMS:
        return _page(_input_items(id, body, kept), Fields(dict(query)))
    if query.get("stream") == "true":
        raise RequestError("stream is not supported here: ask for the whole response.", "stream")
    return body


def _input_items(id: str, body: Mapping[str, Any], kept: Kept) -> list[dict[str, Any]]:
    said = _without_instructions(body, kept.conversation(id))[:-1]
    return items_of(said, Tools(body["tools"]), f"{id.removeprefix('resp_')}_in")


def _page(items: list[dict[str, Any]], query: Fields) -> dict[str, Any]:
    """A part of the list: the newest first, unless `order` is asc; `limit` of them, `after` an id."""
    limit = query.get("limit") or "20"
    if not (limit.isdecimal() and 1 <= int(limit[:9]) <= 100):
        raise query.wrong("limit", "an integer of at least 1 and at most 100")
    ordered = items if query.get("order") == "asc" else items[::-1]
    ids = [item["id"] for item in ordered]
    start = ids.index(query.get("after")) + 1 if query.get("after") in ids else 0
    page = ordered[start : start + int(limit)]
    ends = {"first_id": page[0]["id"] if page else None, "last_id": page[-1]["id"] if page else None}
    return {"object": "list", "data": page, **ends, "has_more": start + len(page) < len(items)}


def _conversation(kept: Kept | None, id: str) -> list[Message]:
    """What was said up to a kept answer and with it."""
    body = kept.body(id) if kept is not None else None
    if kept is None or body is None:
        problem = RequestError(f"Previous response with id {id[:100]!r} not found.", "previous_response_id")
        problem.code = "previous_response_not_found"
        raise problem
    return _without_instructions(body, kept.conversation(id))


def _without_instructions(body: Mapping[str, Any], messages: list[Message]) -> list[Message]:
    return messages[1:] if body["instructions"] else messages


def _output_item(kept: Kept | None, id: str) -> dict[str, Any] | None:
    """An item that a kept answer gave, by its id, which holds the answer's."""
    body = kept.body(f"resp_{id.split('_')[1]}") if kept is not None and id.count("_") == 2 else None
    return next((item for item in body["output"] if item["id"] == id), None) if body else None
