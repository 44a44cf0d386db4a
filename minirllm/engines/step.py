"""One forward of the engine on the device lane: moves in the cache, the packed forward, the head, sampling.

Owns: everything of the engine that touches torch. Does not know: requests, the queue, the event loop.

At the exact level and at off one packed forward holds decoded rows and prompt chunks together. With fixed shapes a
forward is either one token in each slot or one chunk of `prefill_chunk` tokens, and head and sampling always have
`slots` rows.

Legend: T packed tokens, R decoded rows, N sampled rows, E hidden size, S slots, C positions per slot.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from minirllm import attention
from minirllm.attention import Layout, Packed
from minirllm.config import Config
from minirllm.engines.cache import Decode, Prefill, Shapes, SlotCache
from minirllm.engines.graph import DecodeGraph
from minirllm.engines.sampling import Rows, Samples, sample
from minirllm.errors import EngineError
from minirllm.policy import Policy

CPU_SLOTS, MOST_SLOTS = 32, 256
FREE_SHARE = 0.8  # of the free CUDA memory for the cache; the rest is for activations


@dataclass(slots=True)
class Chunk:
    """Consecutive prompt tokens of one slot. `ends`: the last of them is the prompt's last."""

    slot: int
    start: int
    token_n: np.ndarray
    ends: bool


@dataclass(slots=True)
class Step:
    """What to run. A token is sampled for decoded rows (in slot order), then chunks that end, then kept ends."""

    moves: list[tuple[str, tuple[int, ...]]]  # methods of the cache, in order
    slot_R: np.ndarray  # decoded rows
    token_R: np.ndarray
    position_R: np.ndarray
    chunks: list[Chunk]
    kept: list[int]  # slots whose prompt was found whole in the cache: its last hidden state was kept
    rows: Rows  # of the N tokens to sample
    weights: int | None = None  # their version; None: the policy's own


class Runner:
    """Owns the cache's memory. Made and called on the device lane only."""

    @torch.no_grad()
    def __init__(self, policy: Policy, config: Config, max_context: int):
        """Allocate. On CUDA the number of slots follows the memory that is free now: `stack` runs the largest training
        batch before. Raises EngineError when this cache does not keep the policy's level."""
        self.policy, self.chunk, self.fixed = policy, config.prefill_chunk, policy.static_shapes
        device, shapes = policy.device, Shapes()
        position_T = torch.arange(4, device=device)
        hidden_TE = policy.hidden(position_T, position_T, shapes)
        assert shapes.layers, f"the model was not loaded with attn_implementation={attention.IMPLEMENTATION!r}"
        whole = max_context + (-max_context % self.chunk if self.fixed else 0)  # the last chunk is padded, too
        self.capacity = whole + -whole % attention.TILE
        self.slots = config.slots or CPU_SLOTS
        if not config.slots and device.type == "cuda":
            self.slots = affordable(torch.cuda.mem_get_info(device)[0], shapes.bytes_per_position() * self.capacity)
        self.cache = SlotCache(shapes, self.slots, self.capacity, device)
        self.end_SE = torch.zeros(self.slots, hidden_TE.shape[-1], dtype=hidden_TE.dtype, device=device)  # of prompts
        self.graph = DecodeGraph(policy, self.cache) if self.fixed and device.type == "cuda" else None
        if policy.level == "exact":
            self._check_exact()
        elif policy.level == "fixed":
            self._check_fixed()

    def _check_exact(self) -> None:
        """The policy's probe found exact arithmetic: if that does not hold for the slot cache, too, do not start."""
        policy, slots = self.policy, sorted({0, min(2, self.slots - 1)})
        n = min(attention.TILE + 7, self.capacity)
        token_T = torch.arange(n, device=policy.device) * 7 % policy.vocab_size
        position_T = torch.arange(n, device=policy.device)
        want_TE = policy.hidden(token_T, position_T, attention.ForestLayout([[(0, n)]]))
        same = True
        for start, end in ((0, n // 3), (n // 3, n - 4)):
            layout = Packed([(end - start, Prefill(self.cache, slot, start, end - start)) for slot in slots])
            token, position = (x[start:end].repeat(len(slots)) for x in (token_T, position_T))
            got_TE = policy.hidden(token, position, layout)
            same = same and torch.equal(got_TE, want_TE[start:end].repeat(len(slots), 1))
        for at in range(n - 4, n):
            token, position = (x[at : at + 1].repeat(len(slots)) for x in (token_T, position_T))
            reach = [(slots[0], slots[-1] + 1)] * (at // attention.TILE + 1)
            got_TE = policy.hidden(
                token, position, Decode(self.cache, self._on_device(np.array(slots)), position, position, reach)
            )
            same = same and torch.equal(got_TE, want_TE[[at] * len(slots)])
        if not same:
            raise EngineError("exact arithmetic does not hold for the engine's cache here: use determinism = fixed")

    def _check_fixed(self) -> None:
        """A sequence's next logits, alone in the first slot and in the last among rows that reach to the end."""
        last, n = self.slots - 1, min(attention.TILE + 7, self.capacity - 2)
        token_n, slot_S = np.arange(n) * 7 % self.policy.vocab_size, np.arange(self.slots)
        prompt = Prefill(self.cache, 0, 0, n)
        self.policy.hidden(self._on_device(token_n), self._on_device(np.arange(n)), Packed([(n, prompt)]))
        alone_1E = self._decode_all_slots(np.array([0]), np.array([1]), np.array([n]))
        self.cache.copy(0, last, n)
        position_S = np.where(slot_S == last, n, self.capacity - 2)
        among_SE = self._decode_all_slots(slot_S, np.where(slot_S == last, 1, slot_S + 2), position_S)
        alone_SV = self.policy.logits(F.pad(alone_1E, (0, 0, 0, last)))
        if not torch.equal(alone_SV[0], self.policy.logits(among_SE)[last]):
            raise EngineError("rows of one forward are not independent on this device: use determinism = off")

    @torch.no_grad()
    def run(self, step: Step) -> Samples | None:
        """None when nothing is to be sampled: every chunk is the middle of a prompt."""
        with self.policy.weights_of(step.weights):
            return self._run(step)

    def _run(self, step: Step) -> Samples | None:
        for method, slots in step.moves:
            getattr(self.cache, method)(*slots)
            if method == "copy":
                self.end_SE[slots[1]] = self.end_SE[slots[0]]
            elif method == "swap":
                self.end_SE[list(slots[:2])] = self.end_SE[[slots[1], slots[0]]]
        if self.fixed and len(step.slot_R):
            hidden_NE = self._decode_all_slots(step.slot_R, step.token_R, step.position_R)
        elif step.chunks or len(step.slot_R):
            hidden_NE = self._packed(step)
        else:
            hidden_NE = self.end_SE[:0]
        hidden_NE = torch.cat([hidden_NE, self.end_SE[step.kept]])
        N = len(hidden_NE)
        if N == 0:
            return None
        rows = step.rows
        if self.fixed:
            hidden_NE, rows = F.pad(hidden_NE, (0, 0, 0, self.slots - N)), rows.padded(self.slots)
        return sample(self.policy.logits(hidden_NE), rows)

    def _packed(self, step: Step) -> torch.Tensor:
        """One forward over rows and chunks. Returns hidden states ``[N, E]`` of the rows and of the prompts that end
        here, and keeps the latter."""
        tokens, positions, rows = [step.token_R], [step.position_R], len(step.slot_R)
        parts: list[tuple[int, Layout]] = []
        if rows:
            slot_R, position_R = self._on_device(step.slot_R), self._on_device(step.position_R)
            reach = [
                (int(slots[0]), int(slots[-1]) + 1)
                for start in range(0, int(step.position_R.max()) + 1, attention.TILE)
                for slots in [step.slot_R[step.position_R >= start]]
            ]
            parts.append((rows, Decode(self.cache, slot_R, position_R, position_R, reach)))
        picked, at = list(range(rows)), rows
        for chunk in step.chunks:
            count = len(chunk.token_n)
            length = self.chunk if self.fixed else count
            tokens.append(np.pad(chunk.token_n, (0, length - count)))
            positions.append(np.arange(chunk.start, chunk.start + length))
            parts.append((length, Prefill(self.cache, chunk.slot, chunk.start, length)))
            if chunk.ends:
                picked.append(at + count - 1)
            at += length
        token_T, position_T = self._on_device(np.concatenate(tokens)), self._on_device(np.concatenate(positions))
        hidden_NE = self.policy.hidden(token_T, position_T, Packed(parts))[picked]
        if len(picked) > rows:
            self.end_SE[[chunk.slot for chunk in step.chunks if chunk.ends]] = hidden_NE[rows:]
        return hidden_NE

    def _decode_all_slots(self, slot_R: np.ndarray, token_R: np.ndarray, position_R: np.ndarray) -> torch.Tensor:
        """Every slot is a row. Idle ones write where no sequence ever reads: a window's last token is never stored."""
        S, C = self.slots, self.capacity
        token_S, position_S, write_S = np.zeros(S, np.int64), np.zeros(S, np.int64), np.full(S, C - 1)
        token_S[slot_R], position_S[slot_R], write_S[slot_R] = token_R, position_R, position_R
        token, position, write = self._on_device(token_S), self._on_device(position_S), self._on_device(write_S)
        if self.graph is not None:
            return self.graph(token, position, write)[slot_R]
        reach = [(0, S)] * (int(position_S.max()) // attention.TILE + 1)
        layout = Decode(self.cache, self._on_device(np.arange(S)), position, write, reach)
        return self.policy.hidden(token, position, layout)[slot_R]

    def _on_device(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self.policy.device)


def affordable(free: int, slot: int) -> int:
    """How many slots of `slot` bytes fit the `free` bytes of a device, activations left aside."""
    return max(1, min(MOST_SLOTS, int(FREE_SHARE * free) // slot))
