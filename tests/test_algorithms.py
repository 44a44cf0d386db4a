"""Golden numbers by hand for every formula, and where gradients flow and where they must not."""

import math

import numpy as np
import pytest
import torch

from minirllm.algorithms import ALGORITHMS, create
from minirllm.config import Config
from minirllm.errors import ConfigError

REWARDS = np.array([1.0, 0.0, 0.0, 1.0, 1.0])  # mean 0.6, population std sqrt(0.24)


def losses(name, logprob, old, advantage, reference=None, **options):
    logprob = torch.tensor(logprob, dtype=torch.float64, requires_grad=True)
    reference = None if reference is None else torch.tensor(reference, dtype=torch.float64)
    old, advantage = torch.tensor(old, dtype=torch.float64), torch.tensor(advantage, dtype=torch.float64)
    loss, metrics = create(name).loss(logprob, old, advantage, reference, Config(**options))
    loss.sum().backward()
    return loss.detach().tolist(), logprob.grad.tolist(), {key: value.tolist() for key, value in metrics.items()}


def test_grpo_advantages():
    std = math.sqrt(0.24) + 1e-6
    got = create("grpo").advantages(REWARDS, Config())
    assert got == pytest.approx([0.4 / std, -0.6 / std, -0.6 / std, 0.4 / std, 0.4 / std], rel=1e-12)
    assert create("grpo").advantages(REWARDS, Config(norm_std=False)) == pytest.approx([0.4, -0.6, -0.6, 0.4, 0.4])


def test_rloo_advantage_is_the_reward_minus_the_mean_of_the_others():
    rewards = np.array([1.0, 0.5, 0.0])
    expected = [1.0 - 0.25, 0.5 - 0.5, 0.0 - 0.75]
    assert create("rloo").advantages(rewards, Config()) == pytest.approx(expected)


def test_reinforce_advantage_is_the_reward():
    assert create("reinforce").advantages(REWARDS, Config()).tolist() == REWARDS.tolist()


@pytest.mark.parametrize("name", ["grpo", "rloo"])
@pytest.mark.parametrize("rewards", [[0.1] * 7, [1.0, 1.0], [0.0], [0.3]])
def test_equal_rewards_and_a_lone_reward_give_exact_zeros(name, rewards):
    assert create(name).advantages(np.array(rewards), Config()).tolist() == [0.0] * len(rewards)


@pytest.mark.parametrize("name", ["grpo", "rloo"])
def test_clipped_surrogate_by_hand(name):
    ratio = [1.0, 1.1, 1.5, 0.5, 1.5, 0.5]
    advantage = [2.0, 1.0, 1.0, 1.0, -1.0, -1.0]
    loss, gradient, metrics = losses(name, np.log(ratio), [0.0] * 6, advantage, clip_low=0.2, clip_high=0.28)
    assert loss == pytest.approx([-2.0, -1.1, -1.28, -0.5, 1.5, 0.8])
    # d(-rA)/d logprob = -rA; 0 where clipped: a good token gone too far up, a bad one too far down
    assert gradient == pytest.approx([-2.0, -1.1, 0.0, -0.5, 1.5, 0.0])
    assert metrics["clip_fraction"] == [0, 0, 1, 0, 0, 1]


def test_at_ratio_one_every_algorithm_has_the_policy_gradient():
    for name in ALGORITHMS:
        _, gradient, _ = losses(name, [-0.5, -2.0], [-0.5, -2.0], [3.0, -1.0])
        assert gradient == pytest.approx([-3.0, 1.0]), name


def test_reinforce_ignores_the_ratio():
    loss, gradient, metrics = losses("reinforce", [-0.5, -2.0], [-4.0, 0.0], [2.0, -1.0])
    assert loss == [1.0, -2.0]
    assert gradient == [-2.0, 1.0]
    assert metrics == {}


@pytest.mark.parametrize("name", list(ALGORITHMS))
def test_kl_is_k3_and_pulls_to_the_reference(name):
    loss, gradient, metrics = losses(
        name, [-1.0, -1.0, -1.0], [-1.0] * 3, [0.0] * 3, [-1.0 + math.log(2), -1.0, -1.0 - math.log(2)], kl_beta=0.5
    )
    k3 = [2 - math.log(2) - 1, 0.0, 0.5 + math.log(2) - 1]
    assert metrics["kl_reference"] == pytest.approx(k3)
    assert loss == pytest.approx([0.5 * value for value in k3])
    assert gradient == pytest.approx(
        [0.5 * (1 - 2), 0.0, 0.5 * (1 - 0.5)]
    )  # beta (1 - e^d): downhill is towards the reference


@pytest.mark.parametrize("name", ["grpo", "rloo"])
def test_group_of_one_is_refused(name):
    with pytest.raises(ConfigError, match="nothing can be learned with group_size = 1"):
        create(name).validate(Config(group_size=1))
    create(name).validate(Config(group_size=2))


def test_reinforce_takes_a_group_of_one():
    create("reinforce").validate(Config(group_size=1))


def test_create_by_path_and_by_wrong_name():
    assert type(create("minirllm.algorithms.rloo:RLOO")) is type(create("rloo"))
    for name, words in [
        ("grop", "did you mean grpo"),
        ("no_such_module:X", "no_such_module"),
        ("math:nothing", "nothing"),
        ("math:pi", "validate"),
    ]:
        with pytest.raises(ConfigError, match=words):
            create(name)
