"""Products of activations with weights: the fastest kernel that gives a row the same bits whatever the other rows are.

Owns: the forward and backward of every linear layer, with its LoRA adapter if it has one. Does not know: models,
attention, losses.

On the CPU in fp32 these are oneDNN's inner products instead of MKL's: at the 4 to 32 rows of a decode step they take
0.4 to 0.6 of the time, and from 2 rows on a row's bits depend neither on the other rows nor on the number of threads
(docs/architecture.md). Where no gradient is wanted of a weight, a copy in oneDNN's own blocked layout takes its place:
the same bits, and another quarter. Small weights, such as an adapter's, stay with MKL, which starts sooner.

Legend: T tokens, I input size, O output size, R rank; leading dimensions of activations are kept.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from peft.tuners import lora
from torch import Tensor, nn

SMALLEST = 50_000  # numbers in a weight that oneDNN multiplies with
LONGEST = 1024  # numbers that it adds up in a gradient


def available(weight: Tensor) -> bool:
    """Whether oneDNN multiplies with this weight."""
    fits = weight.device.type == "cpu" and weight.dtype == torch.float32 and weight.numel() >= SMALLEST
    return fits and torch.backends.mkldnn.is_available()


def product(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias``, ``[..., O]``, without gradient. `weight` may be `packed`."""
    if weight_OI.layout == torch.strided and not available(weight_OI):  # a packed one has another layout
        return F.linear(x_TI, weight_OI, bias_O)
    out_TO: Tensor = torch.ops.mkldnn._linear_pointwise(x_TI, weight_OI, bias_O, "none", [], "")
    return out_TO


def input_gradient(grad_TO: Tensor, weight_OI: Tensor) -> Tensor:
    """``grad @ weight``. MKL adds up long sums, in blocks and so more exactly: oneDNN adds number after number."""
    return grad_TO @ weight_OI if len(weight_OI) > LONGEST else product(grad_TO, weight_OI.t())


def packed(weight_OI: Tensor) -> Tensor:
    """A copy in the layout that oneDNN computes in."""
    blocked: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight_OI)
    return blocked


def speed_up(model: nn.Module) -> None:
    """Let every linear layer and every LoRA layer of `model` compute as above; names and parameters stay."""
    modules = list(model.modules())
    for module in modules:
        if type(module) is nn.Linear and available(module.weight):
            module.__class__ = Linear
    for module in modules:
        if type(module) is lora.Linear and type(module.base_layer) is Linear:
            module.__class__ = Adapted


class Linear(nn.Linear):
    """`nn.Linear`, computed by oneDNN."""

    def quick(self) -> Tensor:
        """The weight to compute with: itself while it learns, else its `packed` copy, which it keeps until a change in
        place: each counts up the weight's version."""
        weight_OI: Any = self.weight
        if weight_OI.requires_grad and torch.is_grad_enabled():
            return self.weight
        of, blocked_OI = getattr(weight_OI, "_blocked", (-1, self.weight))
        if of != weight_OI._version:
            blocked_OI = packed(weight_OI.detach())
            weight_OI._blocked = weight_OI._version, blocked_OI
        return blocked_OI

    def forward(self, input: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return product(input, self.quick(), self.bias)
        out: Tensor = _Linear.apply(input, self.weight, self.bias, self.quick())
        return out


class Adapted(lora.Linear):
    """peft's LoRA layer in one step: ``x @ weight.T + bias + scaling x @ A.T @ B.T``."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        base: Linear = self.base_layer
        if self.disable_adapters:
            return base(x)
        (name,) = self.active_adapters
        factors = self.lora_A[name].weight, self.lora_B[name].weight, self.scaling[name]
        if not torch.is_grad_enabled():  # without the price of an autograd function
            return _adapted(x, base.quick(), base.bias, *factors)[0]
        out: Tensor = _Adapted.apply(x, base.weight, base.bias, base.quick(), *factors)
        return out


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, quick_OI: Tensor) -> Tensor:
        ctx.save_for_backward(x_TI if weight_OI.requires_grad else None, weight_OI)
        return product(x_TI, quick_OI, bias_O)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (grad_TO,), (x_TI, weight_OI) = gradients, ctx.saved_tensors
        wants_input, wants_weight, wants_bias, _ = ctx.needs_input_grad
        grad_TI = input_gradient(grad_TO, weight_OI) if wants_input else None
        grad_OI = grad_TO.flatten(0, -2).t() @ x_TI.flatten(0, -2) if wants_weight else None
        return grad_TI, grad_OI, grad_TO.flatten(0, -2).sum(0) if wants_bias else None, None


def _adapted(
    x_TI: Tensor, quick_OI: Tensor, bias_O: Tensor | None, a_RI: Tensor, b_OR: Tensor, scaling: float
) -> tuple[Tensor, Tensor]:
    """The layer's output, and ``x @ A.T`` with leading dimensions flattened."""
    out_TO = product(x_TI, quick_OI, bias_O)
    thin_TR = x_TI.flatten(0, -2) @ a_RI.t()
    out_TO.flatten(0, -2).addmm_(thin_TR, b_OR.t(), alpha=scaling)
    return out_TO, thin_TR


class _Adapted(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TI: Tensor,
        weight_OI: Tensor,
        bias_O: Tensor | None,
        quick_OI: Tensor,
        a_RI: Tensor,
        b_OR: Tensor,
        scaling: float,
    ) -> Tensor:
        out_TO, thin_TR = _adapted(x_TI, quick_OI, bias_O, a_RI, b_OR, scaling)
        ctx.save_for_backward(x_TI, thin_TR, weight_OI, a_RI, b_OR)
        ctx.scaling = scaling
        return out_TO

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x_TI, thin_TR, weight_OI, a_RI, b_OR = ctx.saved_tensors
        assert not any(ctx.needs_input_grad[1:3]), "beside an adapter the weight is frozen"
        rows_TI, grad_TO = x_TI.flatten(0, -2), gradients[0].flatten(0, -2)
        thin_grad_TR = (grad_TO @ b_OR).mul_(ctx.scaling)
        grad_TI = None
        if ctx.needs_input_grad[0]:
            grad_TI = input_gradient(grad_TO, weight_OI).addmm_(thin_grad_TR, a_RI).view_as(x_TI)
        grad_a_RI = thin_grad_TR.t() @ rows_TI
        grad_b_OR = (grad_TO.t() @ thin_TR).mul_(ctx.scaling)
        return grad_TI, None, None, None, grad_a_RI, grad_b_OR, None
