"""The one attention function: exact per token, whatever else is in the batch.

Owns: how queries meet keys. Every forward of this project is packed, ``[1, T]`` tokens with no padding between
sequences, and hands the model a *layout* (keyword ``layout=``) that says which keys each token sees. Training gives a
`ForestLayout` (a token attends to its ancestors in the token tree), the engine a layout over its slot cache.
Does not know: sampling, losses, text, HTTP.

Three rules make a token's output the same bits in a decode step, a prefill chunk, a lone sequence and a forest
(measured in docs/architecture.md):

1. keys are the contiguous ancestor path of the query, in the sequence's own coordinates, never a masked T x T square;
2. keys are padded to whole tiles of `TILE` and the inner product over keys is accumulated tile by tile, because BLAS
   splits a long inner dimension by its length;
3. the number of query rows in a product is a multiple of `ROW_MULTIPLE`: BLAS has other kernels for thin products.

Legend: T tokens, H query heads, K key/value heads, G = H / K, D head size, L keys, B batched products, R rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface

IMPLEMENTATION = "minirllm"  # the name under which transformers finds `_attention`
TILE = 128
ROW_MULTIPLE = 4
BLOCK = 256  # queries whose scores are held at once


class Layout(Protocol):
    """Which keys each of the T packed tokens attends to."""

    def attend(
        self, layer: int, q_HTD: Tensor, k_KTD: Tensor, v_KTD: Tensor, scaling: float, window: int | None
    ) -> Tensor:
        """Returns ``[T, H, D]``. `window` is the sliding window of this layer, in tokens, or None."""


def additive(visible: Tensor) -> Tensor:
    """0 for a visible key, -inf for another. Adding these is 30 times faster than filling by a boolean (CPU)."""
    return torch.where(visible, 0.0, float("-inf"))


def weigh(q_BRD: Tensor, k_BLD: Tensor, mask_BRL: Tensor, scaling: float) -> Tensor:
    """The attention weights, ``[B, R, L]`` in fp32: softmax over the keys that the `additive` mask leaves."""
    scores_BRL = torch.matmul(q_BRD * scaling, k_BLD.transpose(1, 2))
    return F.softmax(scores_BRL.add_(mask_BRL), -1, dtype=torch.float32)


def tiled(q_BRD: Tensor, k_BLD: Tensor, v_BLD: Tensor, mask_BRL: Tensor, scaling: float) -> Tensor:
    """Softmax attention, L a multiple of TILE, R of ROW_MULTIPLE. `mask` is `additive`."""
    weights_BRL = weigh(q_BRD, k_BLD, mask_BRL, scaling).to(v_BLD.dtype)
    out_BRD = torch.matmul(weights_BRL[..., :TILE], v_BLD[:, :TILE])
    for at in range(TILE, k_BLD.shape[1], TILE):
        out_BRD = out_BRD + torch.matmul(weights_BRL[..., at : at + TILE], v_BLD[:, at : at + TILE])
    return out_BRD


def attend_span(q_HnD: Tensor, k_KLD: Tensor, v_KLD: Tensor, scaling: float, window: int | None = None) -> Tensor:
    """n consecutive queries over the L keys of their path, the last n of which are theirs. Returns ``[n, H, D]``."""
    (H, n, _), (K, L, _) = q_HnD.shape, k_KLD.shape
    blocks = blocks_of(n, L, H // K, window, q_HnD.device)
    return attend_blocks(q_HnD, _whole_tiles(k_KLD, [(0, L)]), _whole_tiles(v_KLD, [(0, L)]), blocks, scaling)


def attend_blocks(q_HnD: Tensor, k_KLD: Tensor, v_KLD: Tensor, blocks: Iterable[Block], scaling: float) -> Tensor:
    H, K, out = len(q_HnD), len(k_KLD), []
    for start, end, mask_RL in blocks:
        keys = slice(0, mask_RL.shape[1])
        out_KRD = tiled(_rows(q_HnD[:, start:end], K), k_KLD[:, keys], v_KLD[:, keys], mask_RL, scaling)
        out.append(_heads(out_KRD, H, end - start).transpose(0, 1))
    return torch.cat(out)


Block = tuple[int, int, Tensor]  # first query, end, additive mask [R, whole tiles that the block reaches into]


def blocks_of(n: int, L: int, G: int, window: int | None, device: torch.device) -> Iterator[Block]:
    """The last n of L tokens as queries, in blocks.

    A block bounds the scores alive at once, and leaves out the tiles of its future, which would add exact zeros.
    """
    for start in range(0, n, BLOCK):
        end = min(n, start + BLOCK)
        reach = L - n + end  # keys that the block's last query sees
        key_L = torch.arange(reach + -reach % TILE, device=device)
        query_b1 = torch.arange(L - n + start, reach, device=device)[:, None]
        visible_bL = key_L <= query_b1
        if window is not None:
            visible_bL = visible_bL & (key_L > query_b1 - window)
        pad = -(G * (end - start)) % ROW_MULTIPLE
        yield start, end, F.pad(additive(visible_bL).repeat(G, 1), (0, 0, 0, pad))  # a pad row sees every key


def _rows(x_HnD: Tensor, K: int) -> Tensor:
    """``[H, n, D]`` as ``[K, R, D]``: query heads of one key head one below the other, R padded to a row multiple."""
    x_KRD = x_HnD.reshape(K, -1, x_HnD.shape[-1])
    pad = -x_KRD.shape[1] % ROW_MULTIPLE
    return F.pad(x_KRD, (0, 0, 0, pad)) if pad else x_KRD


def _heads(x_KRD: Tensor, H: int, n: int) -> Tensor:
    """The inverse of `_rows`."""
    return x_KRD[:, : H // len(x_KRD) * n].reshape(H, n, -1)


def _whole_tiles(x_KTD: Tensor, path: Sequence[tuple[int, int]]) -> Tensor:
    """The tokens of a path one after the other, zeros up to a whole tile. No copy when they lie like that already."""
    length = sum(end - start for start, end in path)
    if len(path) == 1 and length % TILE == 0:
        return x_KTD[:, path[0][0] : path[0][1]]
    return torch.cat(
        [*(x_KTD[:, a:b] for a, b in path), x_KTD.new_zeros(len(x_KTD), -length % TILE, x_KTD.shape[-1])], 1
    )


class ForestLayout:
    """Node i covers tokens ``start[i]:end[i]``; its path is the spans of its ancestors and itself, root first."""

    def __init__(self, paths: Sequence[Sequence[tuple[int, int]]]):
        self.paths = paths
        self._blocks: dict[tuple[int, int, int, int | None], list[Block]] = {}

    def blocks(self, path: Sequence[tuple[int, int]], G: int, window: int | None, device: torch.device) -> list[Block]:
        """Those of the last node of `path`; made once for all layers, both passes and nodes of one shape."""
        (start, end), L = path[-1], sum(end - start for start, end in path)
        if (end - start, L, G, window) not in self._blocks:
            self._blocks[end - start, L, G, window] = list(blocks_of(end - start, L, G, window, device))
        return self._blocks[end - start, L, G, window]

    def attend(
        self, layer: int, q_HTD: Tensor, k_KTD: Tensor, v_KTD: Tensor, scaling: float, window: int | None
    ) -> Tensor:
        return _Forest.apply(q_HTD, k_KTD, v_KTD, self, scaling, window)


class Packed:
    """Several layouts side by side in one forward: each takes its number of tokens, in order. Rows behind them only pad
    the forward, and get zeros."""

    def __init__(self, parts: Sequence[tuple[int, Layout]]):
        self.parts = parts

    def attend(
        self, layer: int, q_HTD: Tensor, k_KTD: Tensor, v_KTD: Tensor, scaling: float, window: int | None
    ) -> Tensor:
        out, at = [], 0
        for tokens, part in self.parts:
            own = slice(at, at + tokens)
            out.append(part.attend(layer, q_HTD[:, own], k_KTD[:, own], v_KTD[:, own], scaling, window))
            at += tokens
        return torch.cat([*out, out[0].new_zeros(q_HTD.shape[1] - at, *out[0].shape[1:])])


class _Forest(torch.autograd.Function):
    """`attend_span` for every node, and its gradient one block at a time.

    Backward recomputes the weights instead of keeping them: memory is O(T), not O(T x keys), and a node's gradients are
    added in place where its path lies, instead of one T-long array per node and span.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q_HTD: Tensor,
        k_KTD: Tensor,
        v_KTD: Tensor,
        layout: ForestLayout,
        scaling: float,
        window: int | None,
    ) -> Tensor:
        ctx.save_for_backward(q_HTD, k_KTD, v_KTD)
        ctx.rest = layout, scaling, window
        out_THD = q_HTD.new_empty(q_HTD.shape[1], len(q_HTD), v_KTD.shape[2])
        for path in layout.paths:
            node, blocks = slice(*path[-1]), layout.blocks(path, len(q_HTD) // len(k_KTD), window, q_HTD.device)
            k_KLD, v_KLD = _whole_tiles(k_KTD, path), _whole_tiles(v_KTD, path)
            out_THD[node] = attend_blocks(q_HTD[:, node], k_KLD, v_KLD, blocks, scaling)
        return out_THD

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (q_HTD, k_KTD, v_KTD), (layout, scaling, window) = ctx.saved_tensors, ctx.rest
        dout_HTD = gradients[0].transpose(0, 1)
        dq_HTD, dk_KTD, dv_KTD = torch.empty_like(q_HTD), torch.zeros_like(k_KTD), torch.zeros_like(v_KTD)
        H, K = len(q_HTD), len(k_KTD)
        for path in layout.paths:
            first = path[-1][0]
            k_KLD, v_KLD = _whole_tiles(k_KTD, path), _whole_tiles(v_KTD, path)
            dk_KLD, dv_KLD = torch.zeros_like(k_KLD), torch.zeros_like(v_KLD)
            for start, end, mask_RL in layout.blocks(path, H // K, window, q_HTD.device):
                keys, at = slice(0, mask_RL.shape[1]), slice(first + start, first + end)
                q_KRD, dout_KRD = _rows(q_HTD[:, at], K), _rows(dout_HTD[:, at], K)
                weights_KRL = weigh(q_KRD, k_KLD[:, keys], mask_RL, scaling)
                dv_KLD[:, keys] += torch.matmul(weights_KRL.to(v_KLD.dtype).transpose(1, 2), dout_KRD)
                dweights_KRL = torch.matmul(dout_KRD, v_KLD[:, keys].transpose(1, 2)).float()
                dscores_KRL = torch._softmax_backward_data(dweights_KRL, weights_KRL, -1, torch.float32).to(q_KRD.dtype)
                dq_HTD[:, at] = _heads(torch.matmul(dscores_KRL, k_KLD[:, keys]), H, end - start) * scaling
                dk_KLD[:, keys] += torch.matmul(dscores_KRL.transpose(1, 2), q_KRD * scaling)
            offset = 0
            for start, end in path:
                dk_KTD[:, start:end] += dk_KLD[:, offset : offset + end - start]
                dv_KTD[:, start:end] += dv_KLD[:, offset : offset + end - start]
                offset += end - start
        return dq_HTD, dk_KTD, dv_KTD, None, None, None


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    scaling: float,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """What transformers calls, with ``[1, heads, T, D]``. The layout travels as a keyword through the model."""
    if kwargs.get("s_aux") is not None:
        raise ValueError("its attention has sinks, which this attention does not do")
    layout: Layout = kwargs["layout"]
    out_THD = layout.attend(module.layer_idx, query[0], key[0], value[0], scaling, kwargs.get("sliding_window"))
    return out_THD[None], None


AttentionInterface.register(IMPLEMENTATION, _attention)
