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

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from transformers import AttentionInterface

IMPLEMENTATION = "minirllm"  # the name under which transformers finds `_attention`
TILE = 256
ROW_MULTIPLE = 4


class Layout(Protocol):
    """Which keys each of the T packed tokens attends to."""

    def attend(
        self,
        layer: int,
        q_HTD: torch.Tensor,
        k_KTD: torch.Tensor,
        v_KTD: torch.Tensor,
        scaling: float,
        window: int | None,
    ) -> torch.Tensor:
        """Returns ``[T, H, D]``. `window` is the sliding window of this layer, in tokens, or None."""


def tiled(
    q_BRD: torch.Tensor, k_BLD: torch.Tensor, v_BLD: torch.Tensor, visible_BRL: torch.Tensor, scaling: float
) -> torch.Tensor:
    """Softmax attention; L is a multiple of TILE, R of ROW_MULTIPLE, `visible` broadcasts to ``[B, R, L]``."""
    scores_BRL = torch.matmul(q_BRD, k_BLD.transpose(1, 2)) * scaling
    weights_BRL = F.softmax(scores_BRL.masked_fill(~visible_BRL, float("-inf")), -1, dtype=torch.float32).to(
        v_BLD.dtype
    )
    out_BRD = torch.matmul(weights_BRL[..., :TILE], v_BLD[:, :TILE])
    for at in range(TILE, k_BLD.shape[1], TILE):
        out_BRD = out_BRD + torch.matmul(weights_BRL[..., at : at + TILE], v_BLD[:, at : at + TILE])
    return out_BRD


def attend_span(
    q_HnD: torch.Tensor, k_KLD: torch.Tensor, v_KLD: torch.Tensor, scaling: float, window: int | None = None
) -> torch.Tensor:
    """n consecutive queries over the L keys of their path, the last n being their own. Returns ``[n, H, D]``."""
    (H, n, D), (K, L, _) = q_HnD.shape, k_KLD.shape
    rows = H // K * n
    key_L, query_n1 = (
        torch.arange(L + -L % TILE, device=q_HnD.device),
        torch.arange(L - n, L, device=q_HnD.device)[:, None],
    )
    visible_nL = key_L <= query_n1
    if window is not None:
        visible_nL = visible_nL & (key_L > query_n1 - window)
    visible_RL = F.pad(
        visible_nL.repeat(H // K, 1), (0, 0, 0, -rows % ROW_MULTIPLE), value=True
    )  # a pad row must see something
    q_KRD = F.pad(q_HnD.reshape(K, rows, D), (0, 0, 0, -rows % ROW_MULTIPLE))
    k_KLD, v_KLD = F.pad(k_KLD, (0, 0, 0, -L % TILE)), F.pad(v_KLD, (0, 0, 0, -L % TILE))
    out_KRD = tiled(q_KRD, k_KLD, v_KLD, visible_RL, scaling)[:, :rows]
    return out_KRD.reshape(H, n, D).transpose(0, 1)


class ForestLayout:
    """Node i covers tokens ``start[i]:end[i]``; its path is the spans of its ancestors and itself, root first."""

    def __init__(self, paths: Sequence[Sequence[tuple[int, int]]]):
        self.paths = paths

    def attend(
        self,
        layer: int,
        q_HTD: torch.Tensor,
        k_KTD: torch.Tensor,
        v_KTD: torch.Tensor,
        scaling: float,
        window: int | None,
    ) -> torch.Tensor:
        out = []
        for path in self.paths:
            start, end = path[-1]
            k_KLD = torch.cat([k_KTD[:, a:b] for a, b in path], 1)
            v_KLD = torch.cat([v_KTD[:, a:b] for a, b in path], 1)
            out.append(attend_span(q_HTD[:, start:end], k_KLD, v_KLD, scaling, window))
        return torch.cat(out)


def _attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    scaling: float,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers calls, with ``[1, heads, T, D]``. The layout travels as a keyword through the model."""
    layout: Layout = kwargs["layout"]
    out_THD = layout.attend(module.layer_idx, query[0], key[0], value[0], scaling, kwargs.get("sliding_window"))
    return out_THD[None], None


AttentionInterface.register(IMPLEMENTATION, _attention)
