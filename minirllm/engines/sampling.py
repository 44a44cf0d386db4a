"""From logits to sampled tokens: many rows at once, each row's result independent of the other rows.

Owns: the noise, the inverse CDF, truncation (top_k, top_p, min_p), penalties, and when a sequence ends.
Does not know: slots, caches, models. The log-softmax is the trainer's, too.

The noise is counter-based: one uniform number per (request seed, token index), so it depends neither on how many
numbers other requests drew nor on the order they were drawn in.

Legend: R rows, V vocabulary, B blocks of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F

from minirllm.head import logprobs
from minirllm.types import SamplingParams, StopCheck

BLOCK = 256  # vocabulary entries whose probabilities are summed first: few enough for an accurate float32 sum
COLDEST = 1e-6  # below this temperature sampling is greedy: dividing by less overflows float32


@dataclass(slots=True)
class Rows:
    """What sampling needs to know of R rows. Those in `special` ask for more than temperature."""

    temperature_R: np.ndarray  # float32; 0 is greedy
    seed_R: np.ndarray  # uint64, from `key`
    index_R: np.ndarray  # int64, how many tokens the request has sampled before
    special: list[tuple[int, SamplingParams, Sequence[int]]] = field(default_factory=list)  # row, params, sampled ids

    def padded(self, count: int) -> Rows:
        """The same before plain rows up to `count` in all: sums on CUDA depend on how many rows there are."""
        more = (0, count - len(self.seed_R))
        temperature_R = np.pad(self.temperature_R, more, constant_values=1)
        return Rows(temperature_R, np.pad(self.seed_R, more), np.pad(self.index_R, more), self.special)


@dataclass(slots=True)
class Samples:
    """One token per row. `top` holds the most likely (id, logprob) of the rows that asked, best first."""

    token_ids: list[int]
    logprobs: list[float]
    top: dict[int, tuple[tuple[int, float], ...]]


def is_special(params: SamplingParams) -> bool:
    """True when a row needs more than temperature."""
    return truncates(params) or bool(params.presence_penalty or params.frequency_penalty or params.top_logprobs)


def truncates(params: SamplingParams) -> bool:
    """True when sampling leaves out part of the distribution."""
    return params.top_p < 1 or params.top_k > 0 or params.min_p > 0


def effective_temperature(temperature: float) -> float:
    """The temperature that is really used: 0, greedy, for what is too small to divide by."""
    return temperature if temperature >= COLDEST else 0.0


def sample(logits_RV: torch.Tensor, rows: Rows) -> Samples:
    """One token per row, with its log-probability under the distribution it was sampled from.

    Penalties change the logits, then comes temperature, then truncation with renormalisation. A greedy row takes the
    largest logit; its log-probability is that of the distribution at temperature 1. Writes into `logits_RV`.
    """
    device = logits_RV.device
    _penalise(logits_RV, rows)
    temperature_R = torch.from_numpy(rows.temperature_R).to(device)
    logprob_RV = logprobs(logits_RV, temperature_R)
    for row, params, _ in rows.special:
        if truncates(params) and rows.temperature_R[row] > 0:
            logprob_RV[row] = truncate(logprob_RV[row], params)
    uniform_R = torch.from_numpy(uniform(rows.seed_R, rows.index_R)).to(device)
    token_R = invert_cdf(logprob_RV, uniform_R)
    if not rows.temperature_R.all():
        token_R = torch.where(temperature_R > 0, token_R, logits_RV.argmax(-1))
    logprob_R = logprob_RV.gather(1, token_R[:, None])[:, 0]
    top = {
        row: most_likely(logprob_RV[row], params.top_logprobs) for row, params, _ in rows.special if params.top_logprobs
    }
    return Samples(token_R.tolist(), logprob_R.tolist(), top)


def key(seed: int) -> int:
    """A request's seed, any integer, as the 64-bit key of its noise."""
    return int(_mix(np.array([seed & (2**64 - 1)], np.uint64))[0])


def uniform(seed_R: np.ndarray, index_R: np.ndarray) -> np.ndarray:
    """float64 in [0, 1) for each (key, token index): SplitMix64 (Steele, Lea and Flood 2014), read at any place."""
    state = seed_R + (index_R.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    return (_mix(state) >> np.uint64(11)) * 2.0**-53


def _mix(state: np.ndarray) -> np.ndarray:
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


def invert_cdf(logprob_RV: torch.Tensor, uniform_R: torch.Tensor) -> torch.Tensor:
    """The first token whose cumulative probability exceeds uniform x total. Never one of probability 0.

    In two levels, blocks and then inside one block, in float64: a float32 running sum over 50,000 entries is 1e-6 off.
    """
    prob_RV, pad = logprob_RV.exp(), -logprob_RV.shape[1] % BLOCK
    prob_RBb = (F.pad(prob_RV, (0, pad)) if pad else prob_RV).view(len(prob_RV), -1, BLOCK)  # padding copies, even by 0
    block_RB = prob_RBb.sum(-1).double()
    target_R1, block_R1 = _first_above(block_RB, uniform_R[:, None] * block_RB.sum(-1, keepdim=True))
    inside_Rb = prob_RBb[torch.arange(len(prob_RBb), device=prob_RBb.device), block_R1[:, 0]].double()
    _, token_R1 = _first_above(inside_Rb, target_R1)
    return (block_R1 * BLOCK + token_R1)[:, 0]


def _first_above(weight_RN: torch.Tensor, target_R1: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(what of the target is left at the start of an entry, its index [R, 1]): the first whose running sum exceeds the
    target, or, where rounding leaves none, the last of positive weight."""
    sum_RN = weight_RN.cumsum(-1)
    last_R1 = weight_RN.shape[1] - 1 - (weight_RN.flip(-1) > 0).to(torch.uint8).argmax(-1, keepdim=True)
    index_R1 = torch.minimum((sum_RN <= target_R1).sum(-1, keepdim=True), last_R1)
    return target_R1 - (sum_RN - weight_RN).gather(1, index_R1), index_R1


def truncate(logprob_V: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """top_k, then top_p of what is left, then min_p; renormalised. Ties at the edge and the likeliest token stay in.

    top_p is nucleus sampling (Holtzman et al. 2020): the fewest tokens whose probabilities reach top_p. min_p keeps
    tokens at least min_p times as likely as the likeliest (Nguyen et al. 2024).
    """
    sorted_V = logprob_V.sort(descending=True).values
    floor = sorted_V[min(params.top_k or len(sorted_V), len(sorted_V)) - 1]
    if params.top_p < 1:
        prob_V = torch.where(sorted_V >= floor, sorted_V, float("-inf")).softmax(-1).double()
        before_V = prob_V.cumsum(-1) - prob_V
        floor = torch.maximum(floor, sorted_V[max(int((before_V < params.top_p).sum()) - 1, 0)])
    if params.min_p > 0:
        floor = torch.maximum(floor, torch.minimum(sorted_V[0], sorted_V[0] + float(np.log(params.min_p))))
    return F.log_softmax(torch.where(logprob_V >= floor, logprob_V, float("-inf")), -1)


def most_likely(logprob_V: torch.Tensor, count: int) -> tuple[tuple[int, float], ...]:
    """The `count` most likely (id, logprob), best first; fewer when fewer have a probability."""
    best = logprob_V.topk(min(count, len(logprob_V)))
    return tuple((i, p) for i, p in zip(best.indices.tolist(), best.values.tolist(), strict=True) if p > float("-inf"))


def _penalise(logits_RV: torch.Tensor, rows: Rows) -> None:
    """Subtract presence_penalty once, frequency_penalty per occurrence, from tokens sampled before, as OpenAI does."""
    for row, params, sampled in rows.special:
        if sampled and (params.presence_penalty or params.frequency_penalty):
            ids, counts = np.unique(np.asarray(sampled, np.int64), return_counts=True)
            penalty = (params.presence_penalty + params.frequency_penalty * counts).astype(np.float32)
            logits_RV[row, torch.from_numpy(ids).to(logits_RV.device)] -= torch.from_numpy(penalty).to(logits_RV.device)


class Ending:
    """When one sequence ends: an end id, a text stop, or as many tokens as are asked for, or there is `room` for."""

    def __init__(self, params: SamplingParams, eos_ids: frozenset[int], room: int, stop: StopCheck | None):
        self.ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else eos_ids)
        self.limit, self.stop = room if params.max_tokens is None else min(room, params.max_tokens), stop

    def reason(self, sampled: Sequence[int]) -> Literal["stop", "length"] | None:
        """Why the sequence ends with these sampled ids, or None."""
        if sampled[-1] in self.ids or (self.stop is not None and self.stop(sampled)):
            return "stop"
        return "length" if len(sampled) >= self.limit else None
