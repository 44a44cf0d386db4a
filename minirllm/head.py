"""From hidden states to logits and to the log-probability of given tokens, without keeping ``[tokens, vocabulary]``.

Owns: the head's arithmetic (fp32, padded rows, soft cap) and its gradient. The sampler and the trainer both come
through here, so their log-probabilities are the same operation. Does not know: where hidden states come from, losses.

The derivative of ``logprob(y) = log_softmax(W h / t)[y]`` is ``(W[y] - p W) / t`` for h: small, and known as soon as p
is. It is computed in the forward pass, so that p, 49,152 numbers a token, need be neither kept nor computed again. The
weights' own gradient, where the head is trained, needs p again.

Legend: N scored tokens, E hidden size, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minirllm import attention, linear

CHUNK = 256  # rows of logits alive at once: 256 x 49,152 x 4 bytes = 50 MB


class Head:
    """A linear head, with its bias and final soft cap if the model has them."""

    def __init__(self, linear: nn.Linear, softcap: float | None):
        self.linear, self.softcap = linear, softcap

    @property
    def weight(self) -> Tensor:
        """``[V, E]``."""
        return self.linear.weight

    @property
    def bias(self) -> Tensor | None:
        """``[V]`` or None."""
        return self.linear.bias

    def logits(self, hidden_NE: Tensor) -> Tensor:
        """``[N, V]`` in fp32; the product has a multiple of `attention.ROW_MULTIPLE` rows."""
        N = hidden_NE.shape[0]
        padded_NE = F.pad(hidden_NE, (0, 0, 0, -N % attention.ROW_MULTIPLE)).float()
        weight_VE = self.linear.quick() if isinstance(self.linear, linear.Linear) else self.weight.float()
        logits_NV = linear.product(padded_NE, weight_VE, None if self.bias is None else self.bias.float())[:N]
        return logits_NV if self.softcap is None else torch.tanh(logits_NV / self.softcap) * self.softcap

    def score(
        self, hidden_NE: Tensor, token_N: Tensor, temperature_N: Tensor, entropy: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Log-probability of each token, differentiable, and entropy in nats, differentiable if asked for; ``[N]``."""
        logprob_N, entropy_N = _Score.apply(hidden_NE, self.weight, self.bias, self, token_N, temperature_N, entropy)
        return logprob_N, entropy_N


def logprobs(logits_NV: Tensor, temperature_N: Tensor) -> Tensor:
    """Log-softmax after temperature, ``[N, V]``. Temperature 0 reads as 1."""
    divisor_N = torch.where(temperature_N > 0, temperature_N, torch.ones_like(temperature_N))
    return F.log_softmax(logits_NV / divisor_N[:, None], -1)


def _slope(head: Head, logits_NV: Tensor, logprob_NV: Tensor, token_N: Tensor, temperature_N: Tensor) -> Tensor:
    """d logprob(token) / d (W h + b), ``[N, V]``; overwrites `logprob_NV`."""
    slope_NV = logprob_NV.exp_().neg_()
    slope_NV[torch.arange(len(token_N), device=token_N.device), token_N] += 1
    return _inner(head, slope_NV, logits_NV, temperature_N)


def _entropy_slope(head: Head, logits_NV: Tensor, logprob_NV: Tensor, temperature_N: Tensor) -> Tensor:
    """d entropy / d (W h + b), ``[N, V]``: with H the entropy, ``-p (log p + H) / t``."""
    p_NV = logprob_NV.exp()
    entropy_N1 = -(p_NV * logprob_NV).sum(-1, keepdim=True)
    return _inner(head, p_NV.mul_(logprob_NV + entropy_N1).neg_(), logits_NV, temperature_N)


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
        token_N: Tensor,
        temperature_N: Tensor,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor]:
        logprob, entropy, slopes = [], [], list[list[Tensor]]()
        for at in range(0, len(token_N), CHUNK):
            rows = slice(at, at + CHUNK)
            logits_NV = head.logits(hidden_NE[rows])
            logprob_NV = logprobs(logits_NV, temperature_N[rows])
            logprob.append(logprob_NV.gather(1, token_N[rows, None])[:, 0])
            entropy.append(-(logprob_NV.exp() * logprob_NV).sum(-1))
            if ctx.needs_input_grad[0]:
                both = [_entropy_slope(head, logits_NV, logprob_NV, temperature_N[rows])] if with_entropy else []
                both.insert(0, _slope(head, logits_NV, logprob_NV, token_N[rows], temperature_N[rows]))
                weight = weight_VE.float()
                slopes.append([linear.input_gradient(slope_NV, weight).to(hidden_NE.dtype) for slope_NV in both])
        ctx.head, ctx.with_entropy = head, with_entropy
        ctx.save_for_backward(hidden_NE, token_N, temperature_N, *map(torch.cat, zip(*slopes, strict=True)))
        entropy_N = torch.cat(entropy)
        if not with_entropy:
            ctx.mark_non_differentiable(entropy_N)
        return torch.cat(logprob), entropy_N

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        hidden_NE, token_N, temperature_N, *slopes = ctx.saved_tensors
        grads = gradients if ctx.with_entropy else gradients[:1]
        pairs = zip(grads, slopes, strict=True) if slopes else ()
        each = [grad_N[:, None].to(slope_NE.dtype) * slope_NE for grad_N, slope_NE in pairs]
        grad_hidden_NE = sum(each[1:], each[0]) if each else None
        head, wants_weight, wants_bias = ctx.head, ctx.needs_input_grad[1], ctx.needs_input_grad[2]
        if not (wants_weight or wants_bias):
            return grad_hidden_NE, None, None, None, None, None, None
        grad_VE, grad_V = torch.zeros_like(head.weight, dtype=torch.float32), None
        for at in range(0, len(token_N), CHUNK):
            rows = slice(at, at + CHUNK)
            logits_NV = head.logits(hidden_NE[rows])
            logprob_NV = logprobs(logits_NV, temperature_N[rows])
            of_entropy = _entropy_slope(head, logits_NV, logprob_NV, temperature_N[rows]) if ctx.with_entropy else None
            slope_NV = grads[0][rows, None] * _slope(head, logits_NV, logprob_NV, token_N[rows], temperature_N[rows])
            if of_entropy is not None:
                slope_NV += grads[1][rows, None] * of_entropy
            grad_VE += slope_NV.T @ hidden_NE[rows].float()
            if wants_bias:
                grad_V = slope_NV.sum(0) + (0 if grad_V is None else grad_V)
        return grad_hidden_NE, grad_VE.to(head.weight.dtype), grad_V, None, None, None, None
