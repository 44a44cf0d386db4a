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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor

from minirllm import attention


@dataclass(slots=True)
class Shapes:
    """A layout that only learns what each layer stores: layer -> (key heads and size, value heads and size, dtype)."""

    layers: dict[int, tuple[tuple[int, int], tuple[int, int], torch.dtype]] = field(default_factory=dict)

    def attend(
        self, layer: int, q_HTD: Tensor, k_KTD: Tensor, v_KTD: Tensor, scaling: float, window: int | None
    ) -> Tensor:
        self.layers[layer] = ((k_KTD.shape[0], k_KTD.shape[2]), (v_KTD.shape[0], v_KTD.shape[2]), k_KTD.dtype)
        return attention.attend_span(q_HTD, k_KTD, v_KTD, scaling, window)

    def bytes_per_position(self) -> int:
        """Keys and values of one token in all layers."""
        return sum((prod(k) + prod(v)) * dtype.itemsize for k, v, dtype in self.layers.values())


class SlotCache:
    """Of each layer, keys ``[S, K, D, C]`` and values ``[S, K, C, D]``. All methods run on the device lane.

    Keys lie transposed: the product with one token's queries is then 1.6 times as fast, and has the same bits.
    """

    def __init__(self, shapes: Shapes, slots: int, capacity: int, device: torch.device):
        assert capacity % attention.TILE == 0, capacity
        self.slots, self.capacity, self.device = slots, capacity, device
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}
        for layer, ((K, D), (_, value_size), dtype) in shapes.layers.items():
            self.keys[layer] = _zeros((slots, K, D, capacity), dtype, device)
            self.values[layer] = _zeros((slots, K, capacity, value_size), dtype, device)

    def copy(self, source: int, target: int, length: int) -> None:
        """The first `length` positions of one slot into another."""
        for from_, to in zip(self._parts(source, length), self._parts(target, length), strict=True):
            to.copy_(from_)

    def swap(self, a: int, b: int, length: int) -> None:
        """Exchange the first `length` positions of two slots."""
        for x, y in zip(self._parts(a, length), self._parts(b, length), strict=True):
            kept = x.clone()
            x.copy_(y)
            y.copy_(kept)

    def erase(self, slot: int) -> None:
        """Zeros: what was stored there may not be finite."""
        for x in self._parts(slot, self.capacity):
            x.zero_()

    def _parts(self, slot: int, length: int) -> Iterator[Tensor]:
        for layer, keys_SKDC in self.keys.items():
            yield keys_SKDC[slot, :, :, :length]
            yield self.values[layer][slot, :, :length]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
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

    Attention runs tile by tile of keys, each over the contiguous slots ``reach[tile]`` from the first to the last that
    has keys there, idle and shorter ones in between included: gathering the rows would cost more than the product.
    Everything that depends on positions is computed on the device, so a forward can be captured as a CUDA graph.
    """

    def __init__(
        self,
        cache: SlotCache,
        slot_R: Tensor,
        position_R: Tensor,
        write_R: Tensor,
        reach: Sequence[tuple[int, int]],
    ):
        self.cache, self.slot_R, self.position_R, self.write_R = cache, slot_R, position_R, write_R
        self.first, self.width = reach[0][0], reach[0][1] - reach[0][0]
        self.reach = [(a - self.first, b - self.first) for a, b in reach]
        self.compact = self.width == len(slot_R)  # rows are in slot order: no idle slot in between
        self.offset_R = slot_R - self.first
        self._masks: dict[int | None, Tensor] = {}

    def attend(
        self, layer: int, q_HTD: Tensor, k_KTD: Tensor, v_KTD: Tensor, scaling: float, window: int | None
    ) -> Tensor:
        """The arithmetic of `attention.tiled`, to the bit."""
        (H, R, D), K, W = q_HTD.shape, len(k_KTD), self.width
        keys_SKDC, values_SKCD = self.cache.keys[layer], self.cache.values[layer]
        keys_SKDC[self.slot_R, :, :, self.write_R] = k_KTD.transpose(0, 1)
        values_SKCD[self.slot_R, :, self.write_R] = v_KTD.transpose(0, 1)
        own = slice(self.first, self.first + W)
        keys_BDC, values_BCD = keys_SKDC[own].flatten(0, 1), values_SKCD[own].flatten(0, 1)  # views, B = W x K
        G = H // K
        q_WKGD = q_HTD.new_zeros(W, K, G + -G % attention.ROW_MULTIPLE, D)
        q_WKGD[slice(None) if self.compact else self.offset_R, :, :G] = q_HTD.view(K, G, R, D).permute(2, 0, 1, 3)
        weights_BGL = self._weigh(q_WKGD * scaling, keys_BDC, window).to(values_BCD.dtype)
        out_BGD = torch.bmm(weights_BGL[:, :, : attention.TILE], values_BCD[:, : attention.TILE])
        for tile, (a, b) in enumerate(self.reach[1:], 1):
            keys, rows = slice(tile * attention.TILE, (tile + 1) * attention.TILE), slice(a * K, b * K)
            out_BGD[rows] += torch.bmm(weights_BGL[rows, :, keys], values_BCD[rows, keys])
        out_WKGD = out_BGD.view(W, K, -1, out_BGD.shape[-1])[:, :, :G]
        return (out_WKGD if self.compact else out_WKGD[self.offset_R]).reshape(R, H, -1)

    def _weigh(self, q_WKGD: Tensor, keys_BDC: Tensor, window: int | None) -> Tensor:
        """Softmax over the visible keys, ``[B, G, L]``."""
        W, K, G, D = q_WKGD.shape
        q_BGD, L = q_WKGD.view(W * K, G, D), len(self.reach) * attention.TILE
        if window not in self._masks:
            self._masks[window] = self._mask(L, window)
        scores_BGL = self._masks[window].expand(W, K * G, L).contiguous().view(W * K, G, L)
        for tile, (a, b) in enumerate(self.reach):
            keys, rows = slice(tile * attention.TILE, (tile + 1) * attention.TILE), slice(a * K, b * K)
            scores_BGL[rows, :, keys] += torch.bmm(q_BGD[rows], keys_BDC[rows, :, keys])
        return F.softmax(scores_BGL, -1, dtype=torch.float32)

    def _mask(self, L: int, window: int | None) -> Tensor:
        """``[W, 1, L]``, to add: which keys each row sees. An idle slot sees its first key."""
        position_W = self.position_R
        if not self.compact:
            position_W = torch.zeros(self.width, dtype=torch.long, device=position_W.device)
            position_W = position_W.index_copy(0, self.offset_R, self.position_R)
        key_L = torch.arange(L, device=position_W.device)
        visible_WL = key_L <= position_W[:, None]
        if window is not None:
            visible_WL &= key_L > position_W[:, None] - window
        return attention.additive(visible_WL)[:, None]


class Prefill:
    """n consecutive tokens of the sequence in `slot`, the first at position `start`."""

    def __init__(self, cache: SlotCache, slot: int, start: int, n: int):
        self.cache, self.slot, self.own = cache, slot, slice(start, start + n)
        self._blocks: dict[int | None, list[attention.Block]] = {}

    def attend(
        self, layer: int, q_HTD: Tensor, k_KTD: Tensor, v_KTD: Tensor, scaling: float, window: int | None
    ) -> Tensor:
        (H, n, _), K = q_HTD.shape, len(k_KTD)
        keys_KDC, values_KCD = self.cache.keys[layer][self.slot], self.cache.values[layer][self.slot]
        keys_KDC[:, :, self.own] = k_KTD.transpose(1, 2)
        values_KCD[:, self.own] = v_KTD
        if window not in self._blocks:
            self._blocks[window] = list(attention.blocks_of(n, self.own.stop, H // K, window, q_HTD.device))
        return attention.attend_blocks(q_HTD, keys_KDC.transpose(1, 2), values_KCD, self._blocks[window], scaling)
