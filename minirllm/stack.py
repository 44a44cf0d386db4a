"""One process's worth of parts, wired: model, policy, engine, renderer, sessions, endpoint.

Owns: the order in which they start and end, and the manifest facts about them. Does not know: tasks, training.
"""

from __future__ import annotations

import asyncio
import datetime
import functools
import gc
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from minirllm import attention, checkpoint, models
from minirllm.config import Config, find
from minirllm.conversation import matcher
from minirllm.engines import ENGINES, Engine
from minirllm.errors import ConfigError, Users
from minirllm.policy import Policy
from minirllm.renderer import Renderer
from minirllm.server import Endpoint, Server
from minirllm.sessions import Sessions
from minirllm.trainer import rehearse
from minirllm.types import Episode


async def untaught(episodes: Sequence[Episode]) -> dict[str, float]:
    """Where nobody teaches, episodes have what agents and evaluators gave them."""
    return {}


@dataclass
class Stack:
    """What a run stands on. `base_url` is the endpoint's, without ``/v1``."""

    policy: Policy
    engine: Engine
    renderer: Renderer
    sessions: Sessions
    base_url: str
    facts: dict[str, Any]  # for the manifest
    teach: Callable[[Sequence[Episode]], Awaitable[dict[str, float]]] = untaught  # advantages; figures for the metrics


@asynccontextmanager
async def serving(
    config: Config,
    *,
    say: Callable[[str], None] | None = None,
    weights: Path | None = None,
    address: tuple[str, int] = ("127.0.0.1", 0),
    open_key: str | None = None,
    admin_key: str = "",
    training: bool = False,
) -> AsyncIterator[Stack]:
    """Load, start and, at the end, stop everything. `weights` is a checkpoint, or a run whose newest one is taken.
    `open_key` also serves calls outside any session to its bearers; `admin_key` opens the admin routes to its own;
    `training` leaves memory for it on a device where the engine would take what is free.

    Raises ModelError, ConfigError, CheckpointError, or UserError when the port is taken.
    """
    loaded, policy, engine, renderer = await asyncio.to_thread(load, config, weights, say)
    model_id = loaded.name.rstrip("/").rpartition("/")[2]
    sessions = Sessions(
        engine,
        renderer,
        model_id,
        default_max_tokens=config.max_tokens,
        default_temperature=config.eval_temperature,
        max_calls=config.max_calls,
        max_tokens_total=config.max_session_tokens or None,
        max_streams=config.max_streams,
        matcher=matcher(config.matcher),
    )
    shared = None if open_key is None else functools.partial(sessions.create_open, open_key)
    server = Server(Endpoint(sessions, model_id, shared, admin_key, config.max_body))
    try:
        if training and policy.device.type == "cuda":
            await policy.run(rehearse, policy, config)
        await engine.start()
        gc.freeze()  # what is there now stays to the end; each walk of the collector over it stops the loop for 0.3 s
        base_url = await server.start(*address)
        yield Stack(policy, engine, renderer, sessions, base_url, facts(loaded, policy, renderer))
    finally:
        gc.unfreeze()
        await server.close()
        await engine.close()
        await asyncio.to_thread(policy.close)


def facts(loaded: models.LoadedModel, policy: Policy, renderer: Renderer) -> dict[str, Any]:
    """What a manifest says of a model in memory."""
    return {
        "model": loaded.name,
        "model_revision": loaded.revision,
        "template_hash": renderer.template.sha256,
        "level": policy.level,
        "row_multiple": attention.ROW_MULTIPLE,
        "threads": policy.threads,
        "device": str(policy.device),
        "tool_syntax": renderer.template.syntax,
        "template_notes": list(renderer.notes),
        "tool_calls_read_back": not renderer.problem,
    }


def load(
    config: Config, weights: Path | None = None, say: Callable[[str], None] | None = None
) -> tuple[models.LoadedModel, Policy, Engine, Renderer]:
    """Model, policy, engine (not started) and renderer. Takes seconds: call it off the event loop."""
    device = config.device if config.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device = cuda, but this torch sees no CUDA device; use device = cpu or auto.")
    # all parameters trained: small updates would vanish in bf16; adapters are fp32 anyway
    loaded = models.load(config.model, device, None if config.lora_rank else torch.float32, say)
    policy = Policy(loaded.model, loaded.tokenizer, config)
    if weights is not None:
        policy.load_weights(_checkpoint(weights))
    try:
        today = datetime.date.fromisoformat(config.date) if config.date else None
    except ValueError:
        raise ConfigError(f"date must be like 2026-01-31, got {config.date!r}.") from None
    renderer = Renderer(
        loaded.tokenizer, config.history, sorted(policy.eos_ids), today=today, tool_syntax=config.tool_syntax
    )
    if renderer.problem and say is not None:
        say(renderer.problem)
    policy.eos_ids |= renderer.eos_ids  # the template's end of turn, whether or not the model's files name it
    made = find("engine", config.engine, ENGINES)
    with Users(f"engine {config.engine}: "):
        engine: Engine = made(policy, config)
        renderer.limit = engine.max_context
    return loaded, policy, engine, renderer


def _checkpoint(folder: Path) -> Path:
    """`folder` itself when it is a checkpoint, else the newest whole one of the run in it. Raises CheckpointError."""
    if not (folder / "checkpoints").is_dir():
        checkpoint.verify(folder)
        return folder
    return checkpoint.of_run(folder)
