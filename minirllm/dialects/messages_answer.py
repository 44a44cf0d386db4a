"""Messages (Anthropic's dialect): `ModelReply` to JSON and server-sent events, errors as its clients know them.

Owns: the fields of an answer. Does not know: how a request is read, HTTP, sessions.
"""

from __future__ import annotations

import uuid
from typing import Any

from minirllm.dialects import openai
from minirllm.dialects.fields import sayable
from minirllm.dialects.openai import TokenText
from minirllm.errors import ContextOverflow, RequestError
from minirllm.types import Choice, Delta, ModelReply, ModelRequest, ToolCall

_ERRORS = {
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    409: "conflict_error",
    410: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}
_STOPS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def error(problem: RequestError) -> dict[str, Any]:
    """The error body. Agents know by its exact words that a conversation has become too long."""
    message = problem.message
    if isinstance(problem, ContextOverflow):
        message = f"prompt is too long: {problem.got} tokens > {problem.limit} maximum"
    kind = _ERRORS.get(problem.status, "api_error" if problem.status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": message}, "request_id": f"req_{uuid.uuid4().hex}"}


def counted(tokens: int) -> dict[str, Any]:
    """The answer of the route that counts."""
    return {"input_tokens": tokens}


def response(reply: ModelReply, request: ModelRequest, token_text: TokenText) -> dict[str, Any]:
    """The whole answer as JSON."""
    (choice,) = reply.choices
    message, content = choice.message, []
    if message.reasoning:
        content.append({"type": "thinking", "thinking": message.reasoning, "signature": _id(reply.id)})
    if message.content:
        content.append({"type": "text", "text": message.content})
    content += [{**_tool_use(call), "input": sayable(call.arguments)} for call in message.tool_calls]
    body = {**_header(reply.id, reply.model), "content": content, **_end(choice), "usage": _usage(reply)}
    if request.return_token_ids:
        body["prompt_token_ids"] = reply.prompt_ids
    return {**body, **_extras(reply, request, token_text)}


def _id(reply_id: str) -> str:
    """``msg_`` and the call id."""
    return f"msg_{reply_id.rpartition('-')[2]}"


def _header(reply_id: str, model: str) -> dict[str, Any]:
    return {"id": _id(reply_id), "type": "message", "role": "assistant", "model": model}


def _tool_use(call: ToolCall) -> dict[str, Any]:
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}


def _end(choice: Choice) -> dict[str, Any]:
    """Why the answer ended."""
    if choice.finish_reason == "stop" and choice.stop:
        return {"stop_reason": "stop_sequence", "stop_sequence": choice.stop}
    return {"stop_reason": _STOPS[choice.finish_reason], "stop_sequence": None}


def _usage(reply: ModelReply) -> dict[str, int]:
    """Token counts. `input_tokens` are those of the prompt that no cache held."""
    used = reply.usage
    return _tokens(used.prompt - used.cached, used.cached, used.sampled)


def _tokens(fresh: int, cached: int, sampled: int) -> dict[str, int]:
    return {
        "input_tokens": fresh,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": sampled,
    }


def _extras(reply: ModelReply, request: ModelRequest, token_text: TokenText) -> dict[str, Any]:
    """Fields that Anthropic does not have, only when there is something to say."""
    (choice,) = reply.choices
    said = openai.extras(reply, request)
    if choice.message.malformed:
        said["malformed_tool_call"] = True
    if request.return_token_ids:
        said["token_ids"] = choice.completion.token_ids
    if request.logprobs or request.return_token_ids:
        said["logprobs"] = {"content": openai.token_logprobs(openai.sampled(choice.completion), token_text)}
    return said


def frame(event: dict[str, Any]) -> str:
    """One server-sent event, named by its type."""
    return f"event: {event['type']}\n{openai.frame(event)}"


class Stream(openai.AnswerStream):
    """One streamed answer: thinking, text and tool calls as content blocks, one after another.

    A tool call is sent when the answer is complete: only then is it sure to be a call.
    Log-probabilities and token ids come whole with `message_delta`.
    """

    def __init__(self, request: ModelRequest, token_text: TokenText, model: str):
        super().__init__(request, token_text, model)
        self.index = 0  # of the block that is open, or of the next one
        self.open = ""  # its kind; "" between blocks

    def start(self) -> list[str]:
        """The message, empty, and a first ping."""
        message = _header(self.reply_id, self.model) | {
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _tokens(len(self.prompt_ids), 0, 0),
        }
        if self.request.return_token_ids:
            message["prompt_token_ids"] = list(self.prompt_ids)
        return [frame({"type": "message_start", "message": message}), *self.keep_alive()]

    def keep_alive(self) -> list[str]:
        return [frame({"type": "ping"})]

    def events(self, delta: Delta) -> list[str]:
        return self._piece("thinking", delta.reasoning) + self._piece("text", delta.text)

    def finish(self, reply: ModelReply) -> list[str]:
        (choice,) = reply.choices
        rest = self.sent[0].rest(choice)
        frames = self._piece("thinking", rest.reasoning) + self._piece("text", rest.text) + self._close()
        for call in choice.message.tool_calls:
            frames += self._begin(_tool_use(call))
            frames += [self._delta({"type": "input_json_delta", "partial_json": call.arguments}), *self._close()]
        end = {"type": "message_delta", "delta": _end(choice), "usage": _usage(reply)}
        return [
            *frames,
            frame(end | _extras(reply, self.request, self.token_text)),
            frame({"type": "message_stop"}),
        ]

    def fail(self, problem: RequestError) -> list[str]:
        return [frame(error(problem))]

    def _piece(self, kind: str, text: str) -> list[str]:
        """Text of a block of this kind, which is begun if another one, or none, is open."""
        if not text:
            return []
        begun: list[str] = []
        if self.open != kind:
            empty = {"type": kind, kind: ""} | ({"signature": ""} if kind == "thinking" else {})
            begun = [*self._close(), *self._begin(empty)]
        return [*begun, self._delta({"type": f"{kind}_delta", kind: text})]

    def _begin(self, block: dict[str, Any]) -> list[str]:
        self.open = block["type"]
        return [frame({"type": "content_block_start", "index": self.index, "content_block": block})]

    def _delta(self, delta: dict[str, Any]) -> str:
        return frame({"type": "content_block_delta", "index": self.index, "delta": delta})

    def _close(self) -> list[str]:
        """End the open block, a thinking block with its signature: clients send it back only with one."""
        if not self.open:
            return []
        signed = self.open == "thinking"
        frames = [self._delta({"type": "signature_delta", "signature": _id(self.reply_id)})] if signed else []
        frames.append(frame({"type": "content_block_stop", "index": self.index}))
        self.index, self.open = self.index + 1, ""
        return frames
