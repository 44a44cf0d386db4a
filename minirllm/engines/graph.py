"""The decode step as a CUDA graph: small models are bound by kernel launches, and a graph launches once.

Owns: capture, the check against the eager step, replay. Does not know: requests, sampling.

Every shape is static: one token for each slot, attention over the whole capacity. The graph reads the live weights, so
an update in place is seen by the next replay.

Legend: S slots, E hidden size.
"""

from __future__ import annotations

import torch

from minirllm import attention
from minirllm.engines.cache import Decode, SlotCache
from minirllm.errors import EngineError
from minirllm.policy import Policy

WARM_UP = 3  # eager runs before capture: lazy initialisation of libraries must not be captured


class DecodeGraph:
    """``graph(token_S, position_S, write_S) -> hidden_SE``; the result is overwritten by the next call."""

    def __init__(self, policy: Policy, cache: SlotCache):
        """Raises EngineError when the captured step does not reproduce the eager one, unless determinism is off."""
        S, device = cache.slots, policy.device
        self.token_S, self.position_S = (torch.zeros(S, dtype=torch.long, device=device) for _ in range(2))
        self.write_S = torch.full((S,), cache.capacity - 1, device=device)
        slot_S, reach = torch.arange(S, device=device), [(0, S)] * (cache.capacity // attention.TILE)

        def step() -> torch.Tensor:
            layout = Decode(cache, slot_S, self.position_S, self.write_S, reach)
            return policy.hidden(self.token_S, self.position_S, layout)

        side = torch.cuda.Stream(device)
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            for _ in range(WARM_UP):
                eager_SE = step().clone()
        torch.cuda.current_stream(device).wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._hidden_SE = step()
        self._graph.replay()
        if policy.level != "off" and not torch.equal(self._hidden_SE, eager_SE):
            raise EngineError(
                "the decode step captured as a CUDA graph differs from the eager one; use determinism = off"
            )

    def __call__(self, token_S: torch.Tensor, position_S: torch.Tensor, write_S: torch.Tensor) -> torch.Tensor:
        self.token_S.copy_(token_S)
        self.position_S.copy_(position_S)
        self.write_S.copy_(write_S)
        self._graph.replay()
        return self._hidden_SE
