"""The head's own gradient against autograd's, and its numbers by hand."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minirllm import head

Score = Callable[[Tensor], tuple[Tensor, ...]]  # of hidden states: values of each row


def distribution(hidden: Tensor, linear: nn.Linear, softcap: float | None, temperature: Tensor) -> Tensor:
    logits = linear(hidden)
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    return F.log_softmax(logits / temperature[:, None], -1)


def naive(hidden: Tensor, linear: nn.Linear, softcap: float | None, tokens: Tensor, temperature: Tensor) -> Tensor:
    return distribution(hidden, linear, softcap, temperature).gather(1, tokens[:, None])[:, 0]


def assert_alike(naively: Score, ours: Score, hidden: Tensor, linear: nn.Linear) -> None:
    """The same values, and the same gradients of a weighted sum of them."""
    found, weights = [], torch.randn(len(naively(hidden)), len(hidden))
    for score in (naively, ours):
        linear.zero_grad()
        leaf = hidden.clone().requires_grad_(True)
        values = torch.stack(score(leaf))
        (values * weights).sum().backward()
        found.append([values.detach(), leaf.grad, *(p.grad for p in linear.parameters())])
    for want, got in zip(*found, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("rows", [1, 7, head.CHUNK + 3])
def test_value_and_every_gradient_equal_autograd(bias: bool, softcap: float | None, rows: int) -> None:
    torch.manual_seed(0)
    linear = torch.nn.Linear(16, 48, bias=bias)
    hidden, tokens, temperature = torch.randn(rows, 16), torch.randint(0, 48, (rows,)), torch.rand(rows) + 0.5
    assert_alike(
        lambda h: (naive(h, linear, softcap, tokens, temperature),),
        lambda h: head.Head(linear, softcap).score(h, tokens, temperature)[:1],
        hidden,
        linear,
    )


def naive_entropy(hidden: Tensor, linear: nn.Linear, softcap: float | None, temperature: Tensor) -> Tensor:
    logprob = distribution(hidden, linear, softcap, temperature)
    return -(logprob.exp() * logprob).sum(-1)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("rows", [1, head.CHUNK + 3])
def test_gradients_of_logprob_and_entropy_together_equal_autograd(bias: bool, softcap: float | None, rows: int) -> None:
    torch.manual_seed(0)
    linear = torch.nn.Linear(16, 48, bias=bias)
    hidden, tokens, temperature = torch.randn(rows, 16), torch.randint(0, 48, (rows,)), torch.rand(rows) + 0.5
    assert_alike(
        lambda h: (naive(h, linear, softcap, tokens, temperature), naive_entropy(h, linear, softcap, temperature)),
        lambda h: head.Head(linear, softcap).score(h, tokens, temperature, entropy=True),
        hidden,
        linear,
    )


def test_entropy_gradient_by_hand() -> None:
    """Two tokens, logits z and 0 at temperature 1/2: p = sigmoid(2 z), dH/dz = -2 p (1 - p) log(p / (1 - p))."""
    linear = torch.nn.Linear(1, 2, bias=False)
    linear.weight.data = torch.tensor([[1.0], [0.0]])
    hidden = torch.tensor([[0.7]], requires_grad=True)
    entropy = head.Head(linear, None).score(hidden, torch.tensor([0]), torch.tensor([0.5]), entropy=True)[1]
    entropy.sum().backward()
    p = 1 / (1 + math.exp(-1.4))
    assert entropy.item() == pytest.approx(-p * math.log(p) - (1 - p) * math.log(1 - p), rel=1e-5)
    assert hidden.grad is not None
    assert hidden.grad.item() == pytest.approx(-2 * p * (1 - p) * 1.4, rel=1e-5)


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


def rest_and_named(log_NV: Tensor, ids_NK: Tensor) -> tuple[Tensor, Tensor]:
    """Probabilities of the named tokens, and of all others together."""
    return log_NV.gather(1, ids_NK).exp(), 1 - log_NV.gather(1, ids_NK).exp().sum(1)


def diverging(hidden: Tensor, linear: nn.Linear, softcap: float | None, likely: head.Likely, heat: Tensor) -> Tensor:
    none = torch.zeros(len(hidden), dtype=torch.int64)
    return head.Head(linear, softcap).score(hidden, none, heat, likely=likely)[2]


def naive_divergence(
    hidden: Tensor, linear: nn.Linear, softcap: float | None, likely: head.Likely, temperature: Tensor
) -> Tensor:
    p, rest_p = rest_and_named(distribution(hidden, linear, softcap, temperature), likely.id_NK)
    q = likely.logprob_NK.exp()
    value = (p * (p.log() - likely.logprob_NK)).sum(1)
    rest_q = 1 - q.sum(1)
    return value if likely.id_NK.shape[1] == 48 else value + rest_p * (rest_p.log() - rest_q.log())


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("k", [1, 5, 48])
def test_a_divergence_and_every_gradient_of_it_equal_autograd(softcap: float | None, k: int) -> None:
    torch.manual_seed(0)
    rows = head.CHUNK + 3
    linear = torch.nn.Linear(16, 48, bias=True)
    hidden, temperature = torch.randn(rows, 16), torch.rand(rows) + 0.5
    top = F.log_softmax(torch.randn(rows, 48), -1).topk(k)
    likely = head.Likely(top.indices, top.values)
    assert_alike(
        lambda h: (naive_divergence(h, linear, softcap, likely, temperature),),
        lambda h: (diverging(h, linear, softcap, likely, temperature),),
        hidden,
        linear,
    )


def test_a_divergence_by_hand() -> None:
    """p = (1/2, 1/4, 1/4). q names the first with 1/4: KL of (1/2, 1/2) from (1/4, 3/4). q names all: the whole KL."""
    linear = torch.nn.Linear(1, 3, bias=False)
    with torch.no_grad():
        linear.weight.copy_(torch.tensor([[math.log(2.0)], [0.0], [0.0]]))
    q = torch.tensor([[0.25, 0.25, 0.5]]).log()
    named = head.Likely(torch.tensor([[0]]), q[:, :1])
    found = diverging(torch.ones(1, 1), linear, None, named, torch.ones(1))
    assert found.item() == pytest.approx(0.5 * math.log(2) + 0.5 * math.log(2 / 3), rel=1e-5)
    every = head.Likely(torch.tensor([[0, 1, 2]]), q)
    found = diverging(torch.ones(1, 1), linear, None, every, torch.ones(1))
    assert found.item() == pytest.approx(0.5 * math.log(2) + 0.25 * math.log(0.5), rel=1e-5)


def test_the_likeliest_tokens_and_the_one_that_was_taken() -> None:
    linear = torch.nn.Linear(1, 3, bias=False)
    with torch.no_grad():
        linear.weight.copy_(torch.tensor([[0.0], [math.log(2.0)], [0.0]]))
    logprob, likely = head.Head(linear, None).likely(torch.ones(1, 1), torch.tensor([2]), 1)
    assert (logprob.item(), likely.id_NK.tolist()) == (pytest.approx(math.log(0.25)), [[1]])
    assert likely.logprob_NK.item() == pytest.approx(math.log(0.5))
