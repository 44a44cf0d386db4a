"""Who answers at the endpoint: the model in this process, or an outside provider. The rest of the path is the same.

Owns: that choice, how a provider's endpoint starts and ends, and serving until interrupted. Does not know: tasks, torch
(where a provider answers it is not even imported).
"""

from __future__ import annotations

import asyncio
import functools
import importlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from minirllm import providers, watchdog
from minirllm.config import Config
from minirllm.conversation import matcher
from minirllm.errors import ConfigError
from minirllm.providers.session import ProviderSession
from minirllm.providers.upstream import connected
from minirllm.server import Endpoint, Server
from minirllm.sessions import Sessions

SAMPLING = "the provider's: seeds are passed on, and nothing is promised of what they do"


class Served(Protocol):
    """What is served, whoever answers. `base_url` is without ``/v1``; `facts` name at least the ``model``."""

    sessions: Sessions
    base_url: str
    facts: dict[str, Any]


@dataclass
class Proxy:
    """An endpoint where a provider answers."""

    sessions: Sessions
    base_url: str
    facts: dict[str, Any]


@asynccontextmanager
async def serving(
    config: Config,
    *,
    weights: Path | None = None,
    address: tuple[str, int] = ("127.0.0.1", 0),
    open_key: str | None = None,
    admin_key: str = "",
) -> AsyncIterator[Served]:
    """Start the endpoint that `config` asks for, and stop it at the end; the options are those of `stack.serving`.

    Raises UserError of every kind that this can do.
    """
    if not config.outside:
        stack = importlib.import_module("minirllm.stack")
        keys = {"open_key": open_key, "admin_key": admin_key}
        async with stack.serving(config, weights=weights, address=address, **keys) as local:
            yield local
        return
    if weights is not None:
        raise ConfigError("A checkpoint is of a model in this process: leave it out, or leave out the provider.")
    provider = await asyncio.to_thread(providers.find, config)
    async with connected(provider) as upstream:
        sessions = Sessions(
            upstream,
            kind=ProviderSession,
            default_max_tokens=config.max_tokens if open_key is None else None,
            default_temperature=config.eval_temperature if open_key is None else 1.0,
            max_calls=config.max_calls,
            max_tokens_total=config.max_session_tokens or None,
            max_streams=config.max_streams,
            matcher=matcher(config.matcher),
        )
        shared = None if open_key is None else functools.partial(sessions.create_open, open_key)
        facts = {"model": provider.model, "provider": provider.name, "base_url": provider.base_url}
        server = Server(Endpoint(sessions, provider.model, shared, admin_key, config.max_body))
        try:
            yield Proxy(sessions, await server.start(*address), {**facts, "sampling": SAMPLING})
        finally:
            await server.close()


def serve(
    config: Config,
    *,
    address: tuple[str, int],
    keys: tuple[str, str],
    checkpoint: Path | None,
    ready: Callable[[str, str], None],
) -> None:
    """Serve until interrupted; `ready` hears the base URL (without ``/v1``) and the model's name once it answers.

    `keys`: the one that clients send, and the one for the admin routes (empty: there are none).
    """

    async def forever() -> None:
        open_key, admin_key = keys
        async with serving(
            config, weights=checkpoint, address=address, open_key=open_key, admin_key=admin_key
        ) as endpoint:
            ready(endpoint.base_url, endpoint.facts["model"])
            await asyncio.Event().wait()

    watchdog.run(forever())
