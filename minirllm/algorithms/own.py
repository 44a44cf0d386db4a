"""An algorithm of the user's: what it raises, or returns wrong, is named in one sentence.

Owns: what its loss must be. Does not know: formulas. What its advantages must be is known where they are shared out
(grouping.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from minirllm.config import Config
from minirllm.errors import ConfigError, TaskError, Users

if TYPE_CHECKING:
    from minirllm.algorithms import Group, Loss, Tokens


class Own:
    """The algorithm at `name`, checked."""

    def __init__(self, name: str, found: Any):
        """`found`: an object, or a class of such. Raises ConfigError when it has not all methods of an algorithm."""
        self.name = name
        with Users(f"algorithm {name}: ", kind=ConfigError):
            self.algorithm = found() if isinstance(found, type) else found
        for method in ("validate", "advantages", "loss"):
            if not callable(getattr(self.algorithm, method, None)):
                raise ConfigError(f"Algorithm {name!r} has no method {method}(); see minirllm.algorithms.Algorithm.")

    def validate(self, config: Config) -> None:
        """As it does."""
        with Users(f"validate of algorithm {self.name}: ", kind=ConfigError):
            self.algorithm.validate(config)

    def advantages(self, groups: Sequence[Group], config: Config) -> list[np.ndarray]:
        """As it has them."""
        found: list[np.ndarray] = self.algorithm.advantages(groups, config)
        return found

    def loss(self, tokens: Tokens, config: Config) -> Loss:
        """Its loss of each token, with a gradient, and its metrics, without one. Raises TaskError for anything else."""
        with Users(f"loss of algorithm {self.name}: "):
            found = self.algorithm.loss(tokens, config)
        match found:
            case (torch.Tensor() as loss_N, Mapping() as metrics):
                values = {"its loss": loss_N, **{f"its metric {name!r}": value for name, value in metrics.items()}}
            case _:
                raise self._wrong(f"a loss and a dict of metrics were to be returned, got {_kind(found)}")
        for what, value_N in values.items():
            if not isinstance(value_N, torch.Tensor) or value_N.shape != tokens.logprob_N.shape:
                shape = f"the shape {tuple(tokens.logprob_N.shape)}, a value for a token"
                raise self._wrong(f"{what} must be a tensor of {shape}, got {_kind(value_N)}")
        if torch.is_grad_enabled() and tokens.logprob_N.requires_grad and not loss_N.requires_grad:
            raise self._wrong("its loss has no gradient, so nothing would be learned: make it of tokens.logprob_N")
        return loss_N, {name: value_N.detach() for name, value_N in metrics.items()}

    def _wrong(self, what: str) -> TaskError:
        return TaskError(f"loss of algorithm {self.name}: {what}.")


def _kind(value: Any) -> str:
    return f"one of {tuple(value.shape)}" if isinstance(value, torch.Tensor) else f"{value!r:.80}"
