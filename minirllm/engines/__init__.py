"""Engines: tokens in, tokens and logprobs out. Pick one by name from `ENGINES`, or as ``module:attr``.

Owns: the protocol. Engines know no text, no HTTP, no session.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from minirllm.types import Completion, SampledToken, SamplingParams, StopCheck


class Sampler(Protocol):
    """All that a session asks of an engine."""

    max_context: int  # prompt + completion, in tokens
    vocab_size: int  # prompt ids are below this; sessions check it

    async def generate(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        seed: int,
        *,
        stop: StopCheck | None = None,
        on_token: Callable[[SampledToken], None] | None = None,
        weights: int | None = None,
    ) -> Completion:
        """Sample until a stop token, `stop`, or `params.max_tokens` (clamped to the window; None = the window).

        `weights` is the version of kept weights to sample from (None: the policy's own). `on_token` is called on the
        event loop for each token in order. Cancelling the awaiting task frees the row at once. Raises ContextOverflow
        before any work when the prompt leaves no room, EngineError when closed.
        """


class Engine(Sampler, Protocol):
    """A completion is a function of (weights, prompt ids, params, seed) and of nothing else."""

    async def start(self) -> None:
        """Allocate, probe, begin serving."""

    async def close(self) -> None:
        """End; requests in flight raise EngineError."""

    def weights_changed(self) -> None:
        """The policy's own weights were updated in place: drop the prefixes cached of them, and of weights that are
        kept no more. Called on the loop, between generations of the policy's own weights."""


ENGINES: dict[str, str] = {
    "hf": "minirllm.engines.hf:HFEngine",
    "scripted": "minirllm.engines.scripted:ScriptedEngine",
}
