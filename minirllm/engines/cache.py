"""The slot cache: one row of key/value memory per sequence, and how one forward's tokens use it.

Owns: the key and value tensors, copies between slots, and the two attention layouts over slots: `Decode` (one new
token for each of several sequences, one batched product) and `Prefill` (consecutive tokens of one sequence).
Does not know: which tokens lie in a slot (`engines.slots`), when to run what (`engines.hf`).

A slot is contiguous and starts at position 0, so a row's keys are its own path in its own coordinates, as exact
attention needs. Memory is zero where nothing was written: a masked key of value NaN would still make 0 x NaN.

Legend: S slots, C positions per slot, K key heads, H query heads, G = H / K, D head size, R rows, W slots from the
first to the last row's, L keys, n tokens of a chunk.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod

import torch

from minirllm import attention
from minirllm.attention import Layout


@dataclass(slots=True)
class Shapes:
    """A layout that only learns what each layer stores: layer -> (key heads and size, value heads and size, dtype)."""

    layers: dict[int, tuple[tuple[int, int], tuple[int, int], torch.dtype]] = field(default_factory=dict)

    def attend(
        self,
        layer: int,
        q_HTD: torch.Tensor,
        k_KTD: torch.Tensor,
        v_KTD: torch.Tensor,
        scaling: float,
        window: int | None,
    ) -> torch.Tensor:
        self.layers[layer] = ((k_KTD.shape[0], k_KTD.shape[2]), (v_KTD.shape[0], v_KTD.shape[2]), k_KTD.dtype)
        return attention.attend_span(q_HTD, k_KTD, v_KTD, scaling, window)

    def bytes_per_position(self) -> int:
        """Keys and values of one token in all layers."""
        return sum((prod(k) + prod(v)) * dtype.itemsize for k, v, dtype in self.layers.values())


class SlotCache:
    """Keys and values ``[S, K, C, D]`` of each layer. All methods run on the device lane."""

    def __init__(self, shapes: Shapes, slots: int, capacity: int, device: torch.device):
        assert capacity % attention.TILE == 0, capacity
        self.slots, self.capacity = slots, capacity
        self.layers = {
            layer: tuple(_zeros((slots, heads, capacity, size), dtype, device) for heads, size in (key, value))
            for layer, (key, value, dtype) in shapes.layers.items()
        }

    def copy(self, source: int, target: int, length: int) -> None:
        """The first `length` positions of one slot into another."""
        for tensors in self.layers.values():
            for x_SKCD in tensors:
                x_SKCD[target, :, :length] = x_SKCD[source, :, :length]

    def swap(self, a: int, b: int, length: int) -> None:
        """Exchange the first `length` positions of two slots."""
        for tensors in self.layers.values():
            for x_SKCD in tensors:
                kept_KLD = x_SKCD[a, :, :length].clone()
                x_SKCD[a, :, :length] = x_SKCD[b, :, :length]
                x_SKCD[b, :, :length] = kept_KLD

    def erase(self, slot: int) -> None:
        """Zeros: what was stored there may not be finite."""
        for tensors in self.layers.values():
            for x_SKCD in tensors:
                x_SKCD[slot] = 0


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros. On the CPU a page of them costs memory only once it is written: most of a slot never is. Huge pages would
    undo that, since each slot touches a little of every one; numpy and torch ask for them."""
    if device.type != "cpu" or not hasattr(mmap, "MAP_ANONYMOUS"):
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, prod(shape) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


class Decode:
    """One new token for each of R sequences: row r goes to ``write[r]`` of ``slot[r]`` and sees ``0:position[r] + 1``.

    The product runs over the contiguous slots from the first row's to the last row's, idle ones in between included,
    because gathering the rows' keys would cost more than the product. `tiles` bounds the keys. Everything that depends
    on positions is computed on the device, so a forward with this layout can be captured as a CUDA graph.
    """

    def __init__(
        self,
        cache: SlotCache,
        slot_R: torch.Tensor,
        position_R: torch.Tensor,
        write_R: torch.Tensor,
        span: tuple[int, int],
        tiles: int,
    ):
        self.cache, self.position_R, self.keys = cache, position_R, tiles * attention.TILE
        self.first, self.width = span[0], span[1] - span[0] + 1
        self.compact = self.width == len(slot_R)  # rows are in slot order: no idle slot in between
        self.offset_R, self.slot_R, self.write_R = slot_R - self.first, slot_R, write_R
        self._index: dict[int, torch.Tensor] = {}
        self._visible: dict[tuple[int, int | None], torch.Tensor] = {}

    def attend(
        self,
        layer: int,
        q_HTD: torch.Tensor,
        k_KTD: torch.Tensor,
        v_KTD: torch.Tensor,
        scaling: float,
        window: int | None,
    ) -> torch.Tensor:
        (H, R, D), K, W, L = q_HTD.shape, len(k_KTD), self.width, self.keys
        if K not in self._index:
            self._index[K] = self._flat(K)
        seen = []
        for cache_SKCD, new_KRD in zip(self.cache.layers[layer], (k_KTD, v_KTD), strict=True):
            size = new_KRD.shape[-1]
            cache_SKCD.view(-1, size).index_copy_(0, self._index[K], new_KRD.reshape(-1, size))
            seen.append(
                cache_SKCD[self.first : self.first + W, :, :L].view(W * K, L, size)
            )  # no copy: slots are contiguous
        G = H // K
        q_WKGD = q_HTD.new_zeros(W, K, G + -G % attention.ROW_MULTIPLE, D)
        q_RKGD = q_HTD.reshape(K, G, R, D).permute(2, 0, 1, 3)
        if self.compact:
            q_WKGD[:, :, :G] = q_RKGD
        else:
            q_WKGD[self.offset_R, :, :G] = q_RKGD
        out_BGD = attention.tiled(q_WKGD.flatten(0, 1), seen[0], seen[1], self._mask(K, window), scaling)
        out_WKGD = out_BGD.view(W, K, -1, out_BGD.shape[-1])[:, :, :G]
        return (out_WKGD if self.compact else out_WKGD[self.offset_R]).reshape(R, H, -1)

    def _flat(self, K: int) -> torch.Tensor:
        """Where the K x R new keys go in ``[S x K x C]``."""
        head_K1 = torch.arange(K, device=self.slot_R.device)[:, None]
        return ((self.slot_R * K + head_K1) * self.cache.capacity + self.write_R).view(-1)

    def _mask(self, K: int, window: int | None) -> torch.Tensor:
        """Which keys each row sees, ``[W x K, 1, L]``; an idle slot sees its first key."""
        if (K, window) not in self._visible:
            position_W = self.position_R
            if not self.compact:
                position_W = torch.zeros(self.width, dtype=torch.long, device=position_W.device).index_copy(
                    0, self.offset_R, position_W
                )
            key_L = torch.arange(self.keys, device=position_W.device)
            visible_WL = key_L <= position_W[:, None]
            if window is not None:
                visible_WL &= key_L > position_W[:, None] - window
            self._visible[K, window] = visible_WL.repeat_interleave(K, 0)[:, None]
        return self._visible[K, window]


class Prefill:
    """n consecutive tokens of the sequence in `slot`, the first at position `start`."""

    def __init__(self, cache: SlotCache, slot: int, start: int, n: int):
        self.cache, self.slot, self.start, self.end = cache, slot, start, start + n
        self._visible: dict[tuple[int, int | None], torch.Tensor] = {}

    def attend(
        self,
        layer: int,
        q_HTD: torch.Tensor,
        k_KTD: torch.Tensor,
        v_KTD: torch.Tensor,
        scaling: float,
        window: int | None,
    ) -> torch.Tensor:
        (H, n, D), K = q_HTD.shape, len(k_KTD)
        seen = []
        for cache_SKCD, new_KnD in zip(self.cache.layers[layer], (k_KTD, v_KTD), strict=True):
            cache_SKCD[self.slot, :, self.start : self.end] = new_KnD
            seen.append(cache_SKCD[self.slot, :, : self.end + -self.end % attention.TILE])
        G = H // K
        if (G, window) not in self._visible:
            self._visible[G, window] = self._mask(G, window, q_HTD.device)
        visible_RL = self._visible[G, window]
        q_KRD = q_HTD.new_zeros(K, len(visible_RL), D)
        q_KRD[:, : G * n] = q_HTD.reshape(K, G * n, D)
        out_KRD = attention.tiled(q_KRD, seen[0], seen[1], visible_RL, scaling)[:, : G * n]
        return out_KRD.reshape(H, n, -1).transpose(0, 1)

    def _mask(self, G: int, window: int | None, device: torch.device) -> torch.Tensor:
        """Which keys each of G x n query rows sees, ``[R, L]``; padding rows see all."""
        key_L = torch.arange(self.end + -self.end % attention.TILE, device=device)
        query_n1 = torch.arange(self.start, self.end, device=device)[:, None]
        visible_nL = key_L <= query_n1
        if window is not None:
            visible_nL &= key_L > query_n1 - window
        rows = G * (self.end - self.start)
        visible_RL = torch.ones(rows + -rows % attention.ROW_MULTIPLE, len(key_L), dtype=torch.bool, device=device)
        visible_RL[:rows] = visible_nL.repeat(G, 1)
        return visible_RL


class Packed:
    """Several layouts side by side in one forward: each takes its number of tokens, in order."""

    def __init__(self, parts: Sequence[tuple[int, Layout]]):
        self.parts = parts

    def attend(
        self,
        layer: int,
        q_HTD: torch.Tensor,
        k_KTD: torch.Tensor,
        v_KTD: torch.Tensor,
        scaling: float,
        window: int | None,
    ) -> torch.Tensor:
        out, at = [], 0
        for tokens, part in self.parts:
            own = slice(at, at + tokens)
            out.append(part.attend(layer, q_HTD[:, own], k_KTD[:, own], v_KTD[:, own], scaling, window))
            at += tokens
        return torch.cat(out)
