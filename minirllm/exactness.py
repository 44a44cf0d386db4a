"""The start-up probe: does this machine compute a token's logits to the same bits whatever else is in the forward?

Owns: the choice of `attention.ROW_MULTIPLE`, which it measures on the very model that will be used (nothing is assumed
from the CPU's name), and what torch must be told to add in one order. Does not know: the engine, training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from minirllm import attention

ROW_MULTIPLES = (4, 8, 16)  # tried in this order; larger ones cost more padding
PROMPT, BRANCHES = attention.TILE + 21, (9, 1, 2, 5, 14)  # token counts: the prompt crosses a tile edge

Forward = Callable[[Tensor, Tensor, attention.Layout], Tensor]  # (token_T, position_T, layout) -> hidden [T, E]
Head = Callable[[Tensor], Tensor]  # hidden [N, E] -> logits [N, V]


class _Past:
    """One sequence, whose keys and values are kept from forward to forward."""

    def __init__(self) -> None:
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}  # by layer

    def attend(
        self, layer: int, q_HTD: Tensor, k_KTD: Tensor, v_KTD: Tensor, scaling: float, window: int | None
    ) -> Tensor:
        if layer in self.kept:
            k_KTD, v_KTD = (torch.cat(pair, 1) for pair in zip(self.kept[layer], (k_KTD, v_KTD), strict=True))
        self.kept[layer] = k_KTD, v_KTD
        return attention.attend_span(q_HTD, k_KTD, v_KTD, scaling, window)


@torch.no_grad()
def is_exact(forward: Forward, head: Head, vocab_size: int, device: torch.device) -> bool:
    """True when a sequence has the same bits alone, in a forest, and decoded token by token beside others."""
    generator = torch.Generator().manual_seed(0)
    prompt, *branches = [
        torch.randint(0, vocab_size, (n,), generator=generator).to(device) for n in (PROMPT, *BRANCHES)
    ]
    alone = []
    for branch in branches:
        ids = torch.cat([prompt, branch])
        alone.append(
            forward(ids, torch.arange(len(ids), device=device), attention.ForestLayout([[(0, len(ids))]]))[PROMPT:]
        )
    hidden_NE = torch.cat(alone)
    logits_NV = head(hidden_NE)
    if any(not torch.equal(head(hidden_NE[:n]), logits_NV[:n]) for n in range(1, len(hidden_NE))):
        return False

    spans, at = [], PROMPT
    for branch in branches:
        spans.append((at, at + len(branch)))
        at += len(branch)
    positions = torch.cat([torch.arange(PROMPT), *[torch.arange(PROMPT, PROMPT + len(b)) for b in branches]]).to(device)
    layout = attention.ForestLayout([[(0, PROMPT)], *[[(0, PROMPT), span] for span in spans]])
    forest = forward(torch.cat([prompt, *branches]), positions, layout)
    if any(not torch.equal(forest[a:b], want) for (a, b), want in zip(spans, alone, strict=True)):
        return False

    pasts = [_Past() for _ in branches]  # each sequence's prompt in two chunks, then all of them one token at a time
    for past in pasts:
        for chunk in (slice(0, 100), slice(100, PROMPT)):
            forward(prompt[chunk], torch.arange(chunk.start, chunk.stop, device=device), past)
    for step in range(max(BRANCHES)):
        rows = [i for i, branch in enumerate(branches) if step < len(branch)]
        ids, cached = torch.stack([branches[i][step] for i in rows]), attention.Packed([(1, pasts[i]) for i in rows])
        hidden = forward(ids, torch.full((len(rows),), PROMPT + step, device=device), cached)
        if any(not torch.equal(hidden[n], alone[i][step]) for n, i in enumerate(rows)):
            return False
    return True


def find_row_multiple(forward: Forward, head: Head, vocab_size: int, device: torch.device) -> int | None:
    """The smallest of `ROW_MULTIPLES` that is exact, set in `attention`; None (the first one is set) if none is."""
    for multiple in ROW_MULTIPLES:
        attention.ROW_MULTIPLE = multiple
        if is_exact(forward, head, vocab_size, device):
            return multiple
    attention.ROW_MULTIPLE = ROW_MULTIPLES[0]
    return None


def settle() -> None:
    """CUDA, for the whole process: no TF32, sums in pieces (split-K) in fp32, no kernels chosen by timing. What is left
    to choose by is the shape, which is fixed; ``CUBLAS_WORKSPACE_CONFIG`` is set before torch is loaded."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    torch.backends.cudnn.benchmark = False


@contextmanager
def ordered(wanted: bool) -> Iterator[None]:
    """Inside, torch adds up in one order, or raises where it cannot. By default the gradient of an indexing adds what
    belongs to one row by atomics, in any order, on CUDA and on a CPU with two threads."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(wanted)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # we read what we wrote
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
