"""Each role its own algorithm: advantages, losses, gradients and refusals, by hand."""

import math

import pytest
import torch

from minirllm.algorithms import Tokens, create, roles
from minirllm.config import Config
from minirllm.errors import ConfigError
from minirllm.log import explain
from tests.episodes import episode, make, trained

SOLVER_AND_JUDGE = {"algorithm": "grpo", "roles": "judge=reinforce"}


def both(index, solver, judge):
    made = episode("a", index, 0.0, [(7,), (8, 8)], names=["solver", "judge"])
    made.trajectories[0].reward, made.trajectories[1].reward = solver, judge
    return made


def test_the_advantage_is_the_roles_own():
    """The solver's rewards 1 and 0 less their mean; the judge's 0.25 and 0.75 as they are."""
    batch = make([both(0, 1.0, 0.25), both(1, 0.0, 0.75)], **SOLVER_AND_JUDGE)
    tokens, values = trained(batch, "token_T").tolist(), trained(batch, "advantage_T").tolist()
    assert list(zip(tokens, values, trained(batch, "role_T").tolist(), strict=True)) == [
        (7, 0.5, 0), (8, 0.25, 1), (8, 0.25, 1), (7, -0.5, 0), (8, 0.75, 1), (8, 0.75, 1),
    ]  # fmt: skip
    other = make([both(0, 1.0, 0.25), both(1, 0.0, 0.75)], algorithm="reinforce", roles="solver = rloo, judge=grpo")
    found = dict(zip(trained(other, "role_T").tolist(), trained(other, "advantage_T").tolist(), strict=True))
    assert found == {1: -1.0, 2: 0.25}  # the last of each: 0 - 1 of rloo, 0.75 - 0.5 of grpo


def test_whitening_is_over_the_tokens_of_its_role_only():
    """Two judges of two tokens each, rewards 0 and 1: mean 0.5, variance 4 / 4 over 3."""
    batch = make([both(0, 9.0, 0.0), both(1, 5.0, 1.0)], roles="judge=reinforce_pp")
    found = dict(zip(trained(batch, "token_T").tolist(), trained(batch, "advantage_T").tolist(), strict=True))
    assert found == {7: -2.0, 8: pytest.approx(0.5 / math.sqrt(1 / 3 + 1e-8))}


def test_the_loss_of_a_token_is_that_of_its_role():
    """Ratio e^0.5 is above 1.28: for grpo it is clipped and carries no gradient; reinforce's -A log p has no ratio."""
    config = Config(**SOLVER_AND_JUDGE)
    logprob = torch.tensor([-0.5, -0.5, -0.5], dtype=torch.float64, requires_grad=True)
    old, advantage = torch.tensor([-1.0] * 3, dtype=torch.float64), torch.tensor([1.0, 1.0, 2.0], dtype=torch.float64)
    tokens = Tokens(logprob, old, advantage, torch.tensor([0, 1, 1]), torch.tensor([0, 1, 1]))
    loss, metrics = roles.of(config).loss(tokens, config)
    loss.sum().backward()
    assert loss.tolist() == pytest.approx([-1.28, 0.5, 1.0])
    assert logprob.grad.tolist() == [0.0, -1.0, -2.0]
    assert metrics["clip_fraction"].tolist() == [1.0, 0.0, 0.0]
    alone = Tokens(logprob, old, advantage, torch.tensor([0, 1, 1]), torch.tensor([0, 0, 0]))
    assert torch.equal(roles.of(config).loss(alone, config)[0], create("grpo").loss(alone, config)[0])


def test_an_option_must_have_an_effect_in_one_of_the_roles():
    roles.of(config := Config(**SOLVER_AND_JUDGE, clip_low=0.1)).validate(config)
    roles.of(config := Config(algorithm="reinforce", roles="solver=grpo", clip_low=0.1)).validate(config)
    config = Config(algorithm="reinforce", roles="solver=reinforce_pp", norm_std=False)
    with pytest.raises(ConfigError, match=r"^norm_std has no effect with any of the algorithms: leave it at True\.$"):
        roles.of(config).validate(config)
    config = Config(**SOLVER_AND_JUDGE, group_size=1)
    with pytest.raises(ConfigError, match="GRPO learns from the differences within a group"):
        roles.of(config).validate(config)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("judge", "'judge' is no name=algorithm"),
        ("=rloo", "'=rloo' is no name=algorithm"),
        ("judge=rlo", r"There is no algorithm 'rlo' \(did you mean rloo\?\)"),
        ("judge=rloo,judge=dapo", "roles names 'judge' twice"),
        ("judge=grpo", "roles: judge=grpo has no effect, grpo is the algorithm of all names"),
    ],
)
def test_what_cannot_be_read_is_said(text, message):
    with pytest.raises(ConfigError, match=message):
        roles.of(Config(roles=text))


def test_a_role_that_no_trajectory_has_is_said():
    options = {"roles": "judge=reinforce,critic=rloo"}
    row = make([both(0, 1.0, 0.25), both(1, 0.0, 0.75)], **options).metrics
    assert (row["absent/critic"], "absent/judge" in row) == (1.0, False)
    assert "no trajectory named critic, as roles has it" in explain({"step": 1, **row}, 3)
    assert "absent/critic" not in make([episode("a", 0, None)], **options).metrics, "nothing was graded at all"
