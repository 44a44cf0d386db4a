"""One call to the model over HTTP, for agents that need no client library. Any OpenAI client does the same.

Owns: `chat`. Does not know: sessions, engines, tasks.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import httpx

from minirllm.types import AgentConfig, Message, Step

_tls = functools.cache(httpx.create_ssl_context)  # reads the certificate store: once, not for every call


async def chat(config: AgentConfig, messages: Sequence[Mapping[str, Any]], **params: Any) -> Step:
    """Ask the model; `params` are fields of the Chat Completions body (``max_tokens``, ``temperature``, ``stop`` ...).

    The Step has the answer as `output` (text) and `response`, and the id that joins it to the captured tokens. There is
    no time-out here: the episode's deadline cancels the call. Raises httpx.HTTPStatusError with the server's message.
    """
    body = {"model": config.model, "messages": list(messages), **config.sampling_params, **params}
    async with httpx.AsyncClient(verify=_tls(), trust_env=False, timeout=None) as client:
        reply = await client.post(
            f"{config.base_url}/chat/completions", json=body, headers={"Authorization": f"Bearer {config.api_key}"}
        )
    if reply.is_error:
        raise httpx.HTTPStatusError(
            f"HTTP {reply.status_code}: {reply.text[:500]}", request=reply.request, response=reply
        )
    data = reply.json()
    choice = data["choices"][0]
    text = choice["message"].get("content") or ""
    return Step(
        id=data["id"], input=list(messages), output=text, response=Message("assistant", text),
        finish_reason=choice.get("finish_reason") or "",
    )  # fmt: skip
