"""Each role its own algorithm: ``roles = "solver=grpo,judge=reinforce"``; `algorithm` is that of all other names.

Owns: how the option is read, which algorithm a trajectory's name has, that advantage and loss are both its own.
Does not know: trees, models, aggregation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace

import numpy as np
import torch

from minirllm.algorithms import Algorithm, Group, Loss, Tokens, create, distill
from minirllm.config import Config, NoEffect, refuse
from minirllm.errors import ConfigError


def of(config: Config) -> Algorithm:
    """The algorithm of a run. Raises ConfigError when the options name none, or tell of a teacher that has no use."""
    named = names(config)
    if config.algorithm == "distill":
        refuse("distill, whose teacher tells all roles what their tokens are worth", config, "roles")
    else:
        refuse(f"algorithm = {config.algorithm}, `minirllm distill` has it", config, *distill.OPTIONS)
    others = create(config.algorithm)
    return ByRole(others, {role: create(name) for role, name in named.items()}) if named else others


def names(config: Config) -> dict[str, str]:
    """The algorithm's name by the role's. Raises ConfigError when the option cannot be read."""
    found: dict[str, str] = {}
    for part in filter(None, map(str.strip, config.roles.split(","))):
        role, equals, name = (word.strip() for word in part.partition("="))
        if not (equals and role and name):
            raise ConfigError(f"roles is a list as in solver=grpo,judge=reinforce, but {part!r} is no name=algorithm.")
        if role in found:
            raise ConfigError(f"roles names {role!r} twice: keep one.")
        if name == config.algorithm:
            raise ConfigError(f"roles: {part} has no effect, {name} is the algorithm of all names: leave it out.")
        found[role] = name
    return found


def number(name: str, config: Config) -> int:
    """Which algorithm the trajectories of this name have: 0, that of the others, or the place of the name in `roles`
    from 1 on. It is `Group.role` and a value of `Tokens.role_N`."""
    return next((place for place, role in enumerate(names(config), 1) if role == name), 0)


class ByRole:
    """The algorithms of several roles as one. A group is of one role, and so is every token."""

    def __init__(self, others: Algorithm, named: Mapping[str, Algorithm]):
        self.all = [others, *named.values()]

    def validate(self, config: Config) -> None:
        """Raises ConfigError when one of them cannot learn with these options, or an option has no effect in any."""
        refused = [_refused(algorithm, config) for algorithm in self.all]
        for option, error in refused[0].items():
            if all(option in others for others in refused):
                raise NoEffect(option, "any of the algorithms", error.default)

    def advantages(self, groups: Sequence[Group], config: Config) -> list[np.ndarray]:
        """By the algorithm of their role, which is one."""
        assert len({group.role for group in groups}) == 1, "the groups of one role are one batch to its algorithm"
        return self.all[groups[0].role].advantages(groups, config)

    def loss(self, tokens: Tokens, config: Config) -> Loss:
        """Of each token by the algorithm of its role; a metric is 0 for the tokens whose algorithm has none."""
        loss_N, metrics = torch.zeros_like(tokens.logprob_N), dict[str, torch.Tensor]()
        for role, algorithm in enumerate(self.all):
            at_M = torch.nonzero(tokens.role_N == role)[:, 0]
            if len(at_M):
                own_M, values = algorithm.loss(_pick(tokens, at_M), config)
                loss_N = loss_N.index_copy(0, at_M, own_M)
                for name, value_M in values.items():
                    whole_N = metrics.get(name, torch.zeros_like(tokens.advantage_N))
                    metrics[name] = whole_N.index_copy(0, at_M, value_M.to(whole_N.dtype))
        return loss_N, metrics


def _pick(tokens: Tokens, at_M: torch.Tensor) -> Tokens:
    """Those at `at_M` only."""
    columns = {field.name: getattr(tokens, field.name) for field in fields(tokens)}
    return replace(tokens, **{name: value_N[at_M] for name, value_N in columns.items() if value_N is not None})


def _refused(algorithm: Algorithm, config: Config) -> dict[str, NoEffect]:
    """The options that this algorithm does not have and another may. Raises ConfigError for what it needs."""
    refused: dict[str, NoEffect] = {}
    while True:
        try:
            algorithm.validate(config)
            return refused
        except NoEffect as error:
            refused[error.option] = error
            config = replace(config, **{error.option: error.default})
