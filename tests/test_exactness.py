"""What torch is told for the sake of equal bits; that the probe finds them is tested with the policy and the engine."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from minirllm import exactness


@pytest.fixture
def cuda_settings() -> Iterator[list[tuple[Any, str]]]:
    """Those of the process, all allowed inside, as they were afterwards."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    reduced = [f"allow_{kind}_reduced_precision_reduction" for kind in ("bf16", "fp16")]
    places = [(matmul, name) for name in ("allow_tf32", *reduced)] + [(cudnn, "allow_tf32"), (cudnn, "benchmark")]
    before = [getattr(place, name) for place, name in places]
    for place, name in places:
        setattr(place, name, True)
    yield places
    for (place, name), value in zip(places, before, strict=True):
        setattr(place, name, value)


def test_cuda_settings_are_those_that_do_not_round_or_choose(cuda_settings: list[tuple[Any, str]]) -> None:
    assert all(getattr(place, name) for place, name in cuda_settings)
    exactness.settle()
    assert not any(getattr(place, name) for place, name in cuda_settings)


@pytest.mark.parametrize("wanted", [True, False])
def test_order_is_asked_for_inside_only_also_after_an_error(wanted: bool) -> None:
    inside = []
    with contextlib.suppress(ZeroDivisionError), exactness.ordered(wanted):
        inside.append(torch.are_deterministic_algorithms_enabled())
        raise ZeroDivisionError
    assert inside == [wanted]
    assert not torch.are_deterministic_algorithms_enabled()
