"""Gemini (generateContent): `ModelReply` to JSON and server-sent events, errors as its clients know them.

Owns: the fields of an answer. Does not know: how a request is read, HTTP, sessions.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from minirllm.dialects import openai
from minirllm.dialects.fields import sayable
from minirllm.dialects.openai import TokenText
from minirllm.errors import ContextOverflow, RequestError
from minirllm.types import Choice, Completion, Delta, ModelReply, ModelRequest, ToolCall

_STATUS = {
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    408: "DEADLINE_EXCEEDED",
    409: "ABORTED",
    410: "NOT_FOUND",
    429: "RESOURCE_EXHAUSTED",
    503: "UNAVAILABLE",
    504: "DEADLINE_EXCEEDED",
}
_REASONS = {"stop": "STOP", "length": "MAX_TOKENS", "tool_calls": "STOP"}


def error(problem: RequestError) -> dict[str, Any]:
    """The error body. Overflow is said as Google says it."""
    message = problem.message
    if isinstance(problem, ContextOverflow):
        message = (
            f"The input token count ({problem.got}) exceeds the maximum number of tokens allowed ({problem.limit})."
        )
    status = _STATUS.get(problem.status, "INTERNAL" if problem.status >= 500 else "INVALID_ARGUMENT")
    return {"error": {"code": problem.status, "message": message, "status": status}}


def counted(tokens: int) -> dict[str, Any]:
    """The answer of the route that counts."""
    return {"totalTokens": tokens, "promptTokensDetails": [{"modality": "TEXT", "tokenCount": tokens}]}


def response(reply: ModelReply, request: ModelRequest, token_text: TokenText) -> dict[str, Any]:
    """The whole answer as JSON."""
    candidates = []
    for choice in reply.choices:
        message = choice.message
        parts = _texts(message.reasoning, message.content, request) + [_call(call) for call in message.tool_calls]
        candidates.append(_candidate(choice.index, parts) | _end(choice, request, token_text))
    return {"candidates": candidates, **_header(reply.id, reply.model), **_told(reply, request)}


def _header(reply_id: str, model: str) -> dict[str, Any]:
    return {"modelVersion": model, "responseId": reply_id.rpartition("-")[2]}


def _texts(reasoning: str, content: str, request: ModelRequest) -> list[dict[str, Any]]:
    """Parts for the pieces that there are. Thoughts are said only where they were asked for."""
    thought = [{"text": reasoning, "thought": True}] if reasoning and request.notes["thoughts"] else []
    return thought + ([{"text": content}] if content else [])


def _call(call: ToolCall) -> dict[str, Any]:
    return {"functionCall": {"id": call.id, "name": call.name, "args": sayable(call.arguments)}}


def _candidate(index: int, parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One candidate; never without a part, since clients take the first."""
    return {"content": {"parts": list(parts) or [{"text": ""}], "role": "model"}, "index": index}


def _end(choice: Choice, request: ModelRequest, token_text: TokenText) -> dict[str, Any]:
    """Why it ended, and what the tokens were, when asked."""
    end: dict[str, Any] = {"finishReason": _REASONS[choice.finish_reason]}
    if choice.message.malformed:
        end["malformedToolCall"] = True
    if request.logprobs:
        end["logprobsResult"] = _logprobs(choice.completion, token_text)
    return end


def _logprobs(completion: Completion, token_text: TokenText) -> dict[str, Any]:
    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        return {"token": token_text(token_id), "tokenId": token_id, "logProbability": openai.finite(logprob)}

    tokens = openai.sampled(completion)
    return {
        "chosenCandidates": [entry(token.id, token.logprob) for token in tokens],
        "topCandidates": [{"candidates": [entry(i, logprob) for i, logprob in token.top]} for token in tokens],
    }


def _told(reply: ModelReply, request: ModelRequest) -> dict[str, Any]:
    """Token counts, and what Google does not have."""
    used = reply.usage
    usage = {
        "promptTokenCount": used.prompt,
        "candidatesTokenCount": used.sampled,
        "totalTokenCount": used.prompt + used.sampled,
        "cachedContentTokenCount": used.cached,
    }
    return {"usageMetadata": usage, **openai.extras(reply, request)}


class Stream(openai.AnswerStream):
    """One streamed answer, in chunks of the form of a whole one; the last of a candidate says why it ended.

    A tool call is sent when the answer is complete: only then is it sure to be a call.
    """

    def start(self) -> list[str]:
        """An empty chunk, so that the client knows that there will be an answer."""
        return self.keep_alive()

    def keep_alive(self) -> list[str]:
        return [self._chunk([_candidate(0, [])])]

    def events(self, delta: Delta) -> list[str]:
        parts = _texts(delta.reasoning, delta.text, self.request)
        return [self._chunk([_candidate(delta.index, parts)])] if parts else []

    def finish(self, reply: ModelReply) -> list[str]:
        self.accepted(reply.id, reply.prompt_ids)
        frames = []
        for choice in reply.choices:
            rest = self.sent[choice.index].rest(choice)
            parts = _texts(rest.reasoning, rest.text, self.request) + [_call(c) for c in choice.message.tool_calls]
            last = _candidate(choice.index, parts) | _end(choice, self.request, self.token_text)
            frames.append(self._chunk([last], _told(reply, self.request) if choice is reply.choices[-1] else {}))
        return frames

    def fail(self, problem: RequestError) -> list[str]:
        """An error after the answer has begun: bare JSON, by which Google's clients know it, and no event."""
        return [json.dumps(error(problem)) + "\n"]

    def _chunk(self, candidates: list[dict[str, Any]], told: dict[str, Any] | None = None) -> str:
        return openai.frame({"candidates": candidates, **_header(self.reply_id, self.model), **(told or {})})
