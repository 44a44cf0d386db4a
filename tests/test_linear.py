"""Linear layers against torch's and peft's own, and a row's bits against those of the row alone."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from minirllm import linear

NEEDS = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")


@pytest.fixture(autouse=True)
def small_weights_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "SMALLEST", 1)


class Net(nn.Module):
    """Two layers, one of them with a bias."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(24, 40), nn.Linear(40, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


def adapted() -> Any:
    torch.manual_seed(1)
    model = get_peft_model(Net(), LoraConfig(r=4, lora_alpha=6, target_modules=["up", "down"])).eval()
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter)
    return model


def outcome(model: Any, x: Tensor) -> list[Tensor]:
    """Output, gradient of the input, gradients of what is trained."""
    leaf = x.clone().requires_grad_(True)
    out = model(leaf)
    (out * torch.arange(out.numel()).view_as(out).cos()).sum().backward()
    return [out.detach(), leaf.grad, *(p.grad for p in model.parameters() if p.requires_grad)]


@pytest.mark.parametrize("make", [Net, adapted], ids=["full", "lora"])
@pytest.mark.parametrize("shape", [(4, 24), (1, 7, 24), (2, 3, 24)])
def test_output_and_every_gradient_equal_torchs(make: Any, shape: tuple[int, ...]) -> None:
    plain, quick = make(), make()
    linear.speed_up(quick)
    torch.manual_seed(2)
    x = torch.randn(shape)
    want, got = outcome(plain, x), outcome(quick, x)
    assert len(got) == len(want)
    assert len(got) >= 5
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        assert torch.equal(quick(x), got[0])  # the way without autograd has the same bits


def test_names_and_state_stay() -> None:
    model = adapted()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    linear.speed_up(model)
    assert {type(m) for m in model.modules()} >= {linear.Adapted, linear.Linear}
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_a_disabled_adapter_is_the_base_model() -> None:
    model, x = adapted(), torch.randn(4, 24)
    linear.speed_up(model)
    assert not torch.allclose(model(x), Net()(x))
    with model.disable_adapter():
        torch.testing.assert_close(model(x), Net()(x))


def test_a_weight_that_changed_is_read_anew() -> None:
    model, x = Net(), torch.randn(4, 24)
    linear.speed_up(model)
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    model(x).square().sum().backward()
    with torch.no_grad():
        before = model(x)
    optimizer.step()
    with torch.no_grad():
        after = model(x)
        assert not torch.equal(after, before)
        model.load_state_dict(Net().state_dict())
        assert torch.equal(model(x), before)
        copied = copy.deepcopy(model)
        copied.up.weight.zero_()
        copied.down.weight.zero_()
        assert copied(x).abs().max() == 0
        assert torch.equal(model(x), before)
    assert torch.equal(model(x), before)  # the way with autograd, too


@NEEDS
def test_small_weights_stay_with_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "SMALLEST", 40 * 16 + 1)
    model = Net()
    linear.speed_up(model)
    assert (type(model.up), type(model.down)) == (linear.Linear, nn.Linear)


@NEEDS
@pytest.mark.parametrize(("inputs", "outputs"), [(576, 192), (576, 1536), (1536, 576)])
def test_a_row_has_the_same_bits_in_any_product(inputs: int, outputs: int) -> None:
    torch.manual_seed(3)
    x_TI, weight_OI = torch.randn(300, inputs), torch.randn(outputs, inputs)
    want_TO = linear.product(x_TI, weight_OI)
    blocked = linear.packed(weight_OI)
    for rows in (2, 3, 4, 8, 31, 64, 129, 256, 300):
        for start in (0, 300 - rows):
            for weight in (weight_OI, blocked):
                got = linear.product(x_TI[start : start + rows], weight)
                assert torch.equal(got, want_TO[start : start + rows]), (rows, start, weight is blocked)


def test_other_types_take_torchs_own_way() -> None:
    model = Net().double()
    linear.speed_up(model)
    assert type(model.up) is nn.Linear
    x, weight = torch.randn(3, 8, dtype=torch.float64), torch.randn(5, 8, dtype=torch.float64)
    assert torch.equal(linear.product(x, weight), nn.functional.linear(x, weight))


@NEEDS
def test_weights_in_each_others_place_keep_packed_copies_of_their_own() -> None:
    model, x = Net(), torch.randn(4, 24)
    linear.speed_up(model)
    own, other = model.up.weight, nn.Parameter(torch.zeros(40, 24), requires_grad=False)
    with torch.no_grad():
        before = model.up(x)
        model.up._parameters["weight"] = other
        assert torch.equal(model.up(x), model.up.bias.expand(4, 40))
        model.up._parameters["weight"] = own
        assert torch.equal(model.up(x), before)
