"""The guards every test runs under do bite."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from blockbuster import BlockingError

from minirllm import config


async def test_a_call_of_the_package_that_blocks_the_event_loop_fails(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("steps = 3")
    with pytest.raises(BlockingError):
        config.load(tmp_path / "run.toml")


async def test_the_test_itself_may_block(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    assert (tmp_path / "file").read_text() == "x"


def test_off_the_loop_anything_may_block(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("steps = 3")
    assert config.load(tmp_path / "run.toml").steps == 3


def test_a_warning_is_an_error() -> None:
    with pytest.raises(UserWarning, match="careful"):
        warnings.warn("careful", stacklevel=1)


def test_torch_has_one_thread() -> None:
    assert torch.get_num_threads() == 1
