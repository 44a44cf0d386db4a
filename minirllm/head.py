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

    def score(self, hidden_NE: Tensor, token_N: Tensor, temperature_N: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probability of each token, differentiable, and entropy in nats, not; ``[N]`` each."""
        logprob_N, entropy_N = _Score.apply(hidden_NE, self.weight, self.bias, self, token_N, temperature_N)
        return logprob_N, entropy_N


def logprobs(logits_NV: Tensor, temperature_N: Tensor) -> Tensor:
    """Log-softmax after temperature, ``[N, V]``. Temperature 0 reads as 1."""
    divisor_N = torch.where(temperature_N > 0, temperature_N, torch.ones_like(temperature_N))
    return F.log_softmax(logits_NV / divisor_N[:, None], -1)


def _slope(head: Head, logits_NV: Tensor, logprob_NV: Tensor, token_N: Tensor, temperature_N: Tensor) -> Tensor:
    """d logprob(token) / d (W h + b), ``[N, V]``; overwrites `logprob_NV`."""
    slope_NV = logprob_NV.exp_().neg_()
    slope_NV[torch.arange(len(token_N), device=token_N.device), token_N] += 1
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
    ) -> tuple[Tensor, Tensor]:
        logprob, entropy, slope = [], [], []
        for at in range(0, len(token_N), CHUNK):
            rows = slice(at, at + CHUNK)
            logits_NV = head.logits(hidden_NE[rows])
            logprob_NV = logprobs(logits_NV, temperature_N[rows])
            logprob.append(logprob_NV.gather(1, token_N[rows, None])[:, 0])
            entropy.append(-(logprob_NV.exp() * logprob_NV).sum(-1))
            if ctx.needs_input_grad[0]:
                slope_NV = _slope(head, logits_NV, logprob_NV, token_N[rows], temperature_N[rows])
                slope.append(linear.input_gradient(slope_NV, weight_VE.float()).to(hidden_NE.dtype))
        ctx.head = head
        ctx.save_for_backward(hidden_NE, token_N, temperature_N, torch.cat(slope) if slope else None)
        entropy_N = torch.cat(entropy)
        ctx.mark_non_differentiable(entropy_N)
        return torch.cat(logprob), entropy_N

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        grad_N = gradients[0]
        hidden_NE, token_N, temperature_N, slope_NE = ctx.saved_tensors
        grad_hidden_NE = None if slope_NE is None else grad_N[:, None].to(slope_NE.dtype) * slope_NE
        head, wants_weight, wants_bias = ctx.head, ctx.needs_input_grad[1], ctx.needs_input_grad[2]
        if not (wants_weight or wants_bias):
            return grad_hidden_NE, None, None, None, None, None
        grad_VE, grad_V = torch.zeros_like(head.weight, dtype=torch.float32), None
        for at in range(0, len(token_N), CHUNK):
            rows = slice(at, at + CHUNK)
            logits_NV = head.logits(hidden_NE[rows])
            logprob_NV = logprobs(logits_NV, temperature_N[rows])
            slope_NV = grad_N[rows, None] * _slope(head, logits_NV, logprob_NV, token_N[rows], temperature_N[rows])
            grad_VE += slope_NV.T @ hidden_NE[rows].float()
            if wants_bias:
                grad_V = slope_NV.sum(0) + (0 if grad_V is None else grad_V)
        return grad_hidden_NE, grad_VE.to(head.weight.dtype), grad_V, None, None, None
