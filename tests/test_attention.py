"""The forest's attention and its hand-written gradient against the textbook: one masked square and autograd."""

import pytest
import torch

from minirllm import attention
from minirllm.attention import ForestLayout, attend_span

H, K, D, SCALING = 6, 2, 16, 0.25
FORESTS = {
    "chain": [[(0, 5)]],
    "one token": [[(0, 1)]],
    "siblings": [[(0, 20)], [(0, 20), (20, 27)], [(0, 20), (27, 28)], [(0, 20), (28, 41)]],
    "two trees, three levels": [
        [(0, 3)],
        [(0, 3), (3, 7)],
        [(0, 3), (3, 7), (7, 9)],
        [(0, 3), (3, 7), (9, 15)],
        [(15, 22)],
    ],
    "several blocks and tiles": [[(0, 600)], [(0, 600), (600, 903)], [(0, 600), (903, 911)]],
    "whole tiles": [[(0, 512)], [(512, 768)]],
}


def inputs(T, grad=True):
    generator = torch.Generator().manual_seed(T)
    return [torch.randn(heads, T, D, generator=generator).requires_grad_(grad) for heads in (H, K, K)]


def textbook(paths, q, k, v, window):
    """Softmax over a T x T square of who is whose ancestor. Returns ``[T, H, D]``."""
    T = q.shape[1]
    position = torch.zeros(T, dtype=torch.long)
    visible = torch.zeros(T, T, dtype=torch.bool)
    for path in paths:
        index = torch.cat([torch.arange(a, b) for a, b in path])
        position[index] = torch.arange(len(index))
        own = slice(*path[-1])
        visible[own, index] = True
    visible &= position[None, :] <= position[:, None]
    if window is not None:
        visible &= position[None, :] > position[:, None] - window
    k, v = (x.repeat_interleave(H // K, 0) for x in (k, v))
    scores = (q @ k.transpose(1, 2) * SCALING).masked_fill(~visible, float("-inf"))
    return (scores.softmax(-1) @ v).transpose(0, 1)


@pytest.mark.parametrize("window", [None, 4, 300])
@pytest.mark.parametrize("name", list(FORESTS))
def test_output_and_gradients_are_those_of_the_textbook(name, window):
    paths = FORESTS[name]
    T = max(path[-1][1] for path in paths)
    q, k, v = inputs(T)
    weight = torch.randn(T, H, D, generator=torch.Generator().manual_seed(1))
    outputs, gradients = [], []
    for out in (ForestLayout(paths).attend(0, q, k, v, SCALING, window), textbook(paths, q, k, v, window)):
        outputs.append(out.detach())
        gradients.append(torch.autograd.grad((out * weight).sum(), (q, k, v)))
    torch.testing.assert_close(*outputs, rtol=1e-5, atol=2e-6)
    for found, wanted in zip(*gradients, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def test_a_node_may_be_any_strided_view():
    """transformers hands over transposed projections: heads are not contiguous."""
    q, k, v = (x.detach().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_() for x in inputs(41))
    out = ForestLayout(FORESTS["siblings"]).attend(0, q, k, v, SCALING, None)
    out.sum().backward()
    assert torch.equal(out, ForestLayout(FORESTS["siblings"]).attend(0, *inputs(41), SCALING, None))
    assert q.grad.shape == q.shape


@pytest.mark.parametrize("n", [1, 3, 256, 257, 300])
def test_the_last_queries_of_a_sequence_get_the_same_bits_alone(n):
    q, k, v = inputs(600, grad=False)
    whole = attend_span(q, k, v, SCALING)
    assert torch.equal(attend_span(q[:, -n:], k, v, SCALING), whole[-n:])


def test_a_branch_gets_the_same_bits_as_the_lone_sequence():
    paths = FORESTS["several blocks and tiles"]
    q, k, v = inputs(911, grad=False)
    forest = ForestLayout(paths).attend(0, q, k, v, SCALING, None)
    for path in paths[1:]:
        index = torch.cat([torch.arange(a, b) for a, b in path])
        alone = ForestLayout([[(0, len(index))]]).attend(0, q[:, index], k[:, index], v[:, index], SCALING, None)
        assert torch.equal(forest[slice(*path[-1])], alone[600:])


def test_nothing_of_the_scores_is_kept_for_backward():
    q, k, v = inputs(600)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: kept.append(tensor.numel()) or tensor, lambda tensor: tensor
    ):
        ForestLayout([[(0, 600)]]).attend(0, q, k, v, SCALING, None)
    assert max(kept) <= H * 600 * D


def test_blocks_cover_the_queries_and_reach_their_own_keys():
    blocks = list(attention.blocks_of(300, 700, 3, None, torch.device("cpu")))
    assert [(start, end) for start, end, _ in blocks] == [(0, 256), (256, 300)]
    assert [mask.shape for _, _, mask in blocks] == [(768, 768), (132, 768)]
    assert (blocks[0][2] == 0).sum(1)[:256].tolist() == list(range(401, 657))
