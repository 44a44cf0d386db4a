"""Completions (the raw text dialect): JSON to `ModelRequest`, `ModelReply` to JSON and server-sent events.

Owns: the fields of this dialect, in both directions. Does not know: HTTP, sessions, templates, torch.
One prompt per request, as text or as token ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from minirllm.dialects import fields as read
from minirllm.dialects import openai, response_format
from minirllm.dialects.fields import Fields
from minirllm.dialects.openai import COUNT, TokenText, error
from minirllm.errors import RequestError
from minirllm.types import Delta, ModelReply, ModelRequest, SampledToken

__all__ = ["COUNT", "ROUTES", "Stream", "error", "parse", "response"]

ROUTES: tuple[str, ...] = ("/v1/completions",)

_UNSUPPORTED: dict[str, Any] = {"suffix": "", "echo": False, "prompt_embeds": None}
_INSTEAD = {"echo": "put the prompt before the answer yourself"}


def parse(body: Any, route: str = ROUTES[0]) -> ModelRequest:
    """The request in the one internal form. Raises RequestError naming the field."""
    fields = Fields(body)
    fields.refuse(_UNSUPPORTED, _INSTEAD)
    top_logprobs = fields.integer("logprobs", 0, read.MAX_TOP_LOGPROBS)
    params, asked = read.sampling(fields, top_logprobs or 0)
    return ModelRequest(
        prompt=_prompt(fields),
        params=params,
        asked=asked,
        n=read.choices(fields),
        stream=fields.flag("stream"),
        include_usage=read.stream_options(fields),
        logprobs=top_logprobs is not None,
        return_token_ids=fields.flag("return_token_ids"),
        response_format=response_format.parse(fields),
    )


def _prompt(fields: Fields) -> str | list[int]:
    """Text or token ids; a list that holds one prompt is that prompt."""
    prompt = fields.get("prompt")
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        if len(prompt) > 1:
            raise RequestError(
                "prompt: several prompts in one request are not supported here, send one request each.", "prompt"
            )
        prompt = prompt[0]
    if not prompt or not (isinstance(prompt, str) or (isinstance(prompt, list) and read.is_ids(prompt))):
        raise fields.wrong("prompt", "a non-empty text or list of token ids")
    return prompt


def response(reply: ModelReply, request: ModelRequest, token_text: TokenText) -> dict[str, Any]:
    """The whole answer as JSON."""
    choices = []
    for choice in reply.choices:
        entry: dict[str, Any] = {
            "index": choice.index,
            "text": choice.message.content,
            "logprobs": _logprobs(openai.sampled(choice.completion), request, token_text, 0),
            "finish_reason": choice.finish_reason,
        }
        if request.return_token_ids:
            entry |= {"token_ids": choice.completion.token_ids, "prompt_token_ids": reply.prompt_ids}
        choices.append(entry)
    return openai.answer("text_completion", choices, reply, request)


def _logprobs(
    tokens: Sequence[SampledToken], request: ModelRequest, token_text: TokenText, offset: int
) -> dict[str, Any] | None:
    """`offset`: where the first token starts in the answer's text, in characters."""
    if not (request.logprobs or request.return_token_ids):
        return None
    texts = [token_text(token.id) for token in tokens]
    tops = [{token_text(i): openai.finite(logprob) for i, logprob in token.top} for token in tokens]
    return {
        "tokens": texts,
        "token_logprobs": [openai.finite(token.logprob) for token in tokens],
        "top_logprobs": tops if request.params.top_logprobs else None,
        "text_offset": list(accumulate(map(len, texts[:-1]), initial=offset))[: len(texts)],
    }


class Stream(openai.Stream):
    """A streamed completion."""

    object = "text_completion"

    def __init__(self, request: ModelRequest, token_text: TokenText, model: str):
        super().__init__(request, token_text, model)
        self.offsets = [0] * request.n  # characters of the tokens streamed so far, per choice

    def first(self, index: int) -> dict[str, Any]:
        return self.piece(Delta(index))

    def piece(self, delta: Delta) -> dict[str, Any]:
        entry: dict[str, Any] = {"index": delta.index, "text": delta.text, "logprobs": None, "finish_reason": None}
        if delta.tokens:
            entry["logprobs"] = _logprobs(delta.tokens, self.request, self.token_text, self.offsets[delta.index])
            self.offsets[delta.index] += sum(len(self.token_text(token.id)) for token in delta.tokens)
            if self.request.return_token_ids:
                entry["token_ids"] = [token.id for token in delta.tokens]
        return entry

    def place_prompt(self, event: dict[str, Any], ids: list[int]) -> None:
        event["prompt_token_ids"] = ids
        for choice in event["choices"]:
            choice["prompt_token_ids"] = ids
