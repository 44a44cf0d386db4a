"""From hidden states to logits and to the log-probability of given tokens, without keeping ``[tokens, vocabulary]``.

Owns: the head's arithmetic (fp32, padded rows, soft cap) and its gradient. The sampler and the trainer both come
through here, so their log-probabilities are the same operation. Does not know: where hidden states come from, losses.

The derivative of ``logprob(y) = log_softmax(W h / t)[y]`` is ``(W[y] - p W) / t`` for h: small, and known as soon as p
is. It is computed in the forward pass, so that p, 49,152 numbers a token, need be neither kept nor computed again. The
weights' own gradient, where the head is trained, needs p again. The same holds for the entropy, and for the
divergence from given probabilities.

Legend: N scored tokens, E hidden size, V vocabulary, K tokens that q names.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minirllm import attention, linear

REST = 1e-8  # least probability of what is not named: of nothing, where all is
CHUNK = 256  # rows of logits alive at once: 256 x 49,152 x 4 bytes = 50 MB


class Likely(NamedTuple):
    """Some tokens and their log-probabilities, in place of a whole distribution."""

    id_NK: Tensor  # int64
    logprob_NK: Tensor  # float32


class Head:
    """A linear head, with its bias and final soft cap if the model has them."""

    def __init__(self, linear: nn.Linear, softcap: float | None):
        self.linear, self.softcap = linear, softcap

    def logits(self, hidden_NE: Tensor) -> Tensor:
        """``[N, V]`` in fp32; the product has a multiple of `attention.ROW_MULTIPLE` rows."""
        N = hidden_NE.shape[0]
        padded_NE = F.pad(hidden_NE, (0, 0, 0, -N % attention.ROW_MULTIPLE)).float()
        weight_VE = self.linear.quick() if isinstance(self.linear, linear.Linear) else self.linear.weight.float()
        bias_V = None if self.linear.bias is None else self.linear.bias.float()
        logits_NV = linear.product(padded_NE, weight_VE, bias_V)[:N]
        return logits_NV if self.softcap is None else torch.tanh(logits_NV / self.softcap) * self.softcap

    def score(
        self,
        hidden_NE: Tensor,
        token_N: Tensor,
        temperature_N: Tensor,
        entropy: bool = False,
        likely: Likely | None = None,
    ) -> tuple[Tensor, ...]:
        """Log-probability of each token, differentiable, and entropy in nats, differentiable if asked for; ``[N]``.

        With `likely` also the KL(p || q) in nats, differentiable, of this head's p from the q that `likely` names; all
        other tokens count as one, so it is at most the KL over the vocabulary, and that KL where K is the vocabulary.
        """
        of: list[_Value] = [_Chosen(token_N), _Entropy(entropy)]
        of += [_Divergence(likely)] if likely is not None else []
        weights = self.linear.weight, self.linear.bias
        values: tuple[Tensor, ...] = _Score.apply(hidden_NE, *weights, self, of, temperature_N)
        return values

    @torch.no_grad()
    def likely(self, hidden_NE: Tensor, token_N: Tensor, k: int) -> tuple[Tensor, Likely]:
        """Log-probability of each token at temperature 1, ``[N]``, and the `k` most likely tokens in its place."""
        found, most, ones_N = [], [], torch.ones(len(token_N), device=hidden_NE.device)
        for at in range(0, len(token_N), CHUNK):
            rows = slice(at, at + CHUNK)
            logprob_NV = logprobs(self.logits(hidden_NE[rows]), ones_N[rows])
            found.append(logprob_NV.gather(1, token_N[rows, None])[:, 0])
            most.append(logprob_NV.topk(min(k, logprob_NV.shape[1])))
        likely = Likely(torch.cat([top.indices for top in most]), torch.cat([top.values for top in most]))
        return torch.cat(found), likely


def logprobs(logits_NV: Tensor, temperature_N: Tensor) -> Tensor:
    """Log-softmax after temperature, ``[N, V]``. Temperature 0 reads as 1."""
    divisor_N = torch.where(temperature_N > 0, temperature_N, torch.ones_like(temperature_N))
    return F.log_softmax(logits_NV / divisor_N[:, None], -1)


# ---- functions of a token's distribution, of the tokens in `rows`: their values, [N], and their slopes, [N, V], which
# are their derivatives for the logits over temperature ----


class _Chosen:
    """The log-probability of one token: with y that token, ``[v = y] - p_v``."""

    differentiable = True

    def __init__(self, token_N: Tensor):
        self.token_N = token_N

    def value(self, logprob_NV: Tensor, rows: slice) -> Tensor:
        return logprob_NV.gather(1, self.token_N[rows, None])[:, 0]

    def slope(self, logprob_NV: Tensor, rows: slice) -> Tensor:
        slope_NV = logprob_NV.exp().neg_()
        slope_NV[torch.arange(len(slope_NV), device=slope_NV.device), self.token_N[rows]] += 1
        return slope_NV


class _Entropy:
    """With H the entropy, ``-p (log p + H)``."""

    def __init__(self, differentiable: bool):
        self.differentiable = differentiable

    def value(self, logprob_NV: Tensor, rows: slice) -> Tensor:
        return -(logprob_NV.exp() * logprob_NV).sum(-1)

    def slope(self, logprob_NV: Tensor, rows: slice) -> Tensor:
        p_NV = logprob_NV.exp()
        entropy_N1 = -(p_NV * logprob_NV).sum(-1, keepdim=True)
        return p_NV.mul_(logprob_NV + entropy_N1).neg_()


class _Divergence:
    """KL(p || q), the tokens that q does not name counted as one: of groups g of tokens ``L = sum_g p_g a_g``, with
    ``a_g = log(p_g / q_g)``; ``p_v (a_g - L)``, g the group of v."""

    differentiable = True

    def __init__(self, likely: Likely):
        self.likely = likely

    def _terms(self, logprob_NV: Tensor, rows: slice) -> tuple[Tensor, Tensor, Tensor]:
        """(L [N], a of the named tokens [N, K], of the rest [N])."""
        log_q_NK = self.likely.logprob_NK[rows]
        log_p_NK = logprob_NV.gather(1, self.likely.id_NK[rows])
        rest_p_N, rest_q_N = ((1 - log_NK.exp().sum(1)).clamp(min=REST) for log_NK in (log_p_NK, log_q_NK))
        gap_NK, gap_N = log_p_NK - log_q_NK, rest_p_N.log() - rest_q_N.log()
        return (log_p_NK.exp() * gap_NK).sum(1) + rest_p_N * gap_N, gap_NK, gap_N

    def value(self, logprob_NV: Tensor, rows: slice) -> Tensor:
        return self._terms(logprob_NV, rows)[0]

    def slope(self, logprob_NV: Tensor, rows: slice) -> Tensor:
        value_N, gap_NK, gap_N = self._terms(logprob_NV, rows)
        gap_NV = (gap_N - value_N)[:, None].repeat(1, logprob_NV.shape[1])
        gap_NV.scatter_(1, self.likely.id_NK[rows], gap_NK - value_N[:, None])
        return gap_NV.mul_(logprob_NV.exp())


_Value = _Chosen | _Entropy | _Divergence


def _inner(head: Head, slope_NV: Tensor, logits_NV: Tensor, temperature_N: Tensor) -> Tensor:
    """The derivative for ``W h + b`` of what has `slope_NV` for the logits over temperature; overwrites it."""
    slope_NV /= torch.where(temperature_N > 0, temperature_N, torch.ones_like(temperature_N))[:, None]
    if head.softcap is not None:
        slope_NV *= 1 - (logits_NV / head.softcap) ** 2
    return slope_NV


class _Score(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_NE: Tensor,
        weight_VE: Tensor,
        bias_V: Tensor | None,
        head: Head,
        of: list[_Value],
        temperature_N: Tensor,
    ) -> tuple[Tensor, ...]:
        values, slopes = [], list[list[Tensor]]()
        raised = [one for one in of if one.differentiable]
        for at in range(0, len(hidden_NE), CHUNK):
            rows = slice(at, at + CHUNK)
            logits_NV = head.logits(hidden_NE[rows])
            logprob_NV = logprobs(logits_NV, temperature_N[rows])
            values.append([one.value(logprob_NV, rows) for one in of])
            if ctx.needs_input_grad[0]:
                each = (_inner(head, one.slope(logprob_NV, rows), logits_NV, temperature_N[rows]) for one in raised)
                weight = weight_VE.float()
                slopes.append([linear.input_gradient(slope_NV, weight).to(hidden_NE.dtype) for slope_NV in each])
        ctx.head, ctx.raised, ctx.which = head, raised, [place for place, one in enumerate(of) if one.differentiable]
        ctx.save_for_backward(hidden_NE, temperature_N, *map(torch.cat, zip(*slopes, strict=True)))
        found = tuple(map(torch.cat, zip(*values, strict=True)))
        ctx.mark_non_differentiable(*(value_N for value_N, one in zip(found, of, strict=True) if one not in raised))
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        hidden_NE, temperature_N, *slopes = ctx.saved_tensors
        grads = [gradients[place] for place in ctx.which]
        pairs = zip(grads, slopes, strict=True) if slopes else ()
        each = [grad_N[:, None].to(slope_NE.dtype) * slope_NE for grad_N, slope_NE in pairs]
        grad_hidden_NE = sum(each[1:], each[0]) if each else None
        head, wants_weight, wants_bias = ctx.head, ctx.needs_input_grad[1], ctx.needs_input_grad[2]
        if not (wants_weight or wants_bias):
            return grad_hidden_NE, None, None, None, None, None
        grad_VE, grad_V = torch.zeros_like(head.linear.weight, dtype=torch.float32), None
        for at in range(0, len(hidden_NE), CHUNK):
            rows = slice(at, at + CHUNK)
            logits_NV = head.logits(hidden_NE[rows])
            logprob_NV = logprobs(logits_NV, temperature_N[rows])
            for grad_N, one in zip(grads, ctx.raised, strict=True):
                slope_NV = _inner(head, one.slope(logprob_NV, rows), logits_NV, temperature_N[rows])
                slope_NV *= grad_N[rows, None]
                grad_VE += slope_NV.T @ hidden_NE[rows].float()
                if wants_bias:
                    grad_V = slope_NV.sum(0) + (0 if grad_V is None else grad_V)
        return grad_hidden_NE, grad_VE.to(head.linear.weight.dtype), grad_V, None, None, None
