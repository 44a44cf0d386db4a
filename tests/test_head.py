"""The head's own gradient against autograd's, and its numbers by hand."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minirllm import head


def naive(hidden: Tensor, linear: nn.Linear, softcap: float | None, tokens: Tensor, temperature: Tensor) -> Tensor:
    logits = linear(hidden)
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    return F.log_softmax(logits / temperature[:, None], -1).gather(1, tokens[:, None])[:, 0]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("rows", [1, 7, head.CHUNK + 3])
def test_value_and_every_gradient_equal_autograd(bias: bool, softcap: float | None, rows: int) -> None:
    torch.manual_seed(0)
    linear = torch.nn.Linear(16, 48, bias=bias)
    hidden, weight = torch.randn(rows, 16), torch.randn(rows)
    tokens, temperature = torch.randint(0, 48, (rows,)), torch.rand(rows) + 0.5
    gradients = []
    for score in (naive, lambda h, lin, cap, y, t: head.Head(lin, cap).score(h, y, t)[0]):
        linear.zero_grad()
        leaf = hidden.clone().requires_grad_(True)
        value = score(leaf, linear, softcap, tokens, temperature)
        (value * weight).sum().backward()
        gradients.append([value.detach(), leaf.grad, *(p.grad for p in linear.parameters())])
    for want, got in zip(*gradients, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_uniform_logits_by_hand() -> None:
    linear = torch.nn.Linear(16, 8, bias=False)
    torch.nn.init.zeros_(linear.weight)
    logprob, entropy = head.Head(linear, None).score(torch.ones(2, 16), torch.tensor([0, 3]), torch.tensor([1.0, 0.5]))
    assert logprob.tolist() == pytest.approx([-math.log(8)] * 2)
    assert entropy.tolist() == pytest.approx([math.log(8)] * 2)
    assert not entropy.requires_grad


def test_two_tokens_by_hand_with_temperature() -> None:
    logits = torch.tensor([[1.0, 0.0]])
    want = 1 / (1 + math.exp(-1 / 0.5))
    assert head.logprobs(logits, torch.tensor([0.5])).exp()[0, 0].item() == pytest.approx(want)
    assert head.logprobs(logits, torch.tensor([0.0])).exp()[0, 0].item() == pytest.approx(1 / (1 + math.exp(-1)))


def test_a_frozen_head_gets_no_gradient() -> None:
    linear = torch.nn.Linear(16, 48).requires_grad_(False)
    hidden = torch.randn(3, 16, requires_grad=True)
    head.Head(linear, None).score(hidden, torch.tensor([1, 2, 3]), torch.ones(3))[0].sum().backward()
    assert hidden.grad is not None
    assert linear.weight.grad is None
