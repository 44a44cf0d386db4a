"""Golden numbers by hand for every formula, and where gradients flow and where they must not."""

import math

import numpy as np
import pytest
import torch

from minirllm.algorithms import ALGORITHMS, Group, Tokens, create
from minirllm.config import Config
from minirllm.errors import ConfigError

REWARDS = np.array([1.0, 0.0, 0.0, 1.0, 1.0])  # mean 0.6, population std sqrt(0.24)


def losses(name, logprob, old, advantage, sequence=None, **options):
    """(losses, gradients, metrics) of tokens that are one trajectory each, or of those in `sequence`."""
    logprob = torch.tensor(logprob, dtype=torch.float64, requires_grad=True)
    old, advantage = torch.tensor(old, dtype=torch.float64), torch.tensor(advantage, dtype=torch.float64)
    sequence = torch.tensor(range(len(old)) if sequence is None else sequence)
    tokens = Tokens(logprob, old, advantage, sequence, sequence * 0)
    loss, metrics = create(name).loss(tokens, Config(**options))
    loss.sum().backward()
    return loss.detach().tolist(), logprob.grad.tolist(), {key: value.tolist() for key, value in metrics.items()}


def advantages(name, *groups, tokens=None, **options):
    """Of each group, whose trajectories have one token each, or as many as `tokens` says."""
    counts = tokens or [[1] * len(rewards) for rewards in groups]
    pairs = [Group(np.array(rewards), np.array(count)) for rewards, count in zip(groups, counts, strict=True)]
    return [found.tolist() for found in create(name).advantages(pairs, Config(**options))]


def test_grpo_advantages():
    std = math.sqrt(0.24) + 1e-6
    expected = [0.4 / std, -0.6 / std, -0.6 / std, 0.4 / std, 0.4 / std]
    assert advantages("grpo", REWARDS, [0.5]) == [pytest.approx(expected, rel=1e-12), [0.0]]
    assert advantages("grpo", REWARDS, norm_std=False) == [pytest.approx([0.4, -0.6, -0.6, 0.4, 0.4])]
    for name in ("dapo", "gspo", "cispo", "sapo"):
        assert advantages(name, REWARDS) == advantages("grpo", REWARDS)
    for name in ("dr_grpo", "gpg"):
        assert advantages(name, REWARDS) == advantages("grpo", REWARDS, norm_std=False)


def test_rloo_advantage_is_the_reward_minus_the_mean_of_the_others():
    rewards = np.array([1.0, 0.5, 0.0])
    expected = [1.0 - 0.25, 0.5 - 0.5, 0.0 - 0.75]
    assert advantages("rloo", rewards, REWARDS[:1]) == [pytest.approx(expected), [0.0]]


def test_reinforce_advantage_is_the_reward():
    assert advantages("reinforce", REWARDS) == [REWARDS.tolist()]


def test_reinforce_pp_whitens_over_the_tokens_of_the_batch():
    # 4 tokens with reward 1 and 6 with reward 0: mean 0.4, unbiased variance (4 * 0.36 + 6 * 0.16) / 9 = 0.8 / 3
    std = math.sqrt(0.8 / 3 + 1e-8)
    found = advantages("reinforce_pp", [1.0, 0.0], [1.0, 0.0], tokens=[[3, 1], [1, 5]])
    assert found == [pytest.approx([0.6 / std, -0.4 / std])] * 2
    # without group means 0.5 and 0.5: half up for 4 tokens, half down for 6; mean -0.1, variance (1.44 + 0.96) / 9
    found = advantages("reinforce_pp_baseline", [1.0, 0.0], [2.0, 1.0], tokens=[[3, 1], [1, 5]])
    assert found == [pytest.approx([0.6 / std, -0.4 / std])] * 2
    assert advantages("reinforce_pp", [1.0, 1.0], [1.0]) == [[0.0, 0.0], [0.0]]
    assert advantages("reinforce_pp", [1.0, 1.0, 0.0], tokens=[[3, 1, 0]]) == [[0.0] * 3]  # none of its tokens differ
    assert advantages("reinforce_pp_baseline", [1.0, 1.0], [0.0, 0.0]) == [[0.0, 0.0], [0.0, 0.0]]


def test_prpo_normalises_over_all_trajectories_of_the_batch():
    # 1, 0 and 0.5, 0.1: mean 0.4, population variance (0.36 + 0.16 + 0.01 + 0.09) / 4 = 0.155; lengths do not count
    std = math.sqrt(0.155) + 1e-6
    expected = [pytest.approx([0.6 / std, -0.4 / std]), pytest.approx([0.1 / std, -0.3 / std])]
    assert advantages("prpo", [1.0, 0.0], [0.5, 0.1]) == expected
    assert advantages("prpo", [1.0, 0.0], [0.5, 0.1], tokens=[[9, 1], [1, 2]]) == expected
    assert advantages("prpo", [1.0], [0.0, 0.0, 0.0])[0] == [pytest.approx(0.75 / (math.sqrt(0.1875) + 1e-6))]
    assert advantages("prpo") == []


def test_roles_are_batches_of_their_own_and_the_whole_batch_is_seen_at_once():
    assert advantages("reinforce_pp", [1.0], [0.0]) != advantages("reinforce_pp", [1.0]) + advantages(
        "reinforce_pp", [0.0]
    )


@pytest.mark.parametrize("name", sorted(ALGORITHMS.keys() - {"reinforce"}))
@pytest.mark.parametrize("rewards", [[0.1] * 7, [1.0, 1.0], [0.0], [0.3]])
def test_equal_rewards_and_a_lone_reward_give_exact_zeros(name, rewards):
    assert advantages(name, rewards) == [[0.0] * len(rewards)]


CLIPPED = ["grpo", "dr_grpo", "dapo", "rloo", "prpo", "reinforce_pp", "reinforce_pp_baseline", "gspo"]


@pytest.mark.parametrize("name", CLIPPED)  # gspo: of trajectories of one token
def test_clipped_surrogate_by_hand(name):
    ratio = [1.0, 1.1, 1.5, 0.5, 1.5, 0.5]
    advantage = [2.0, 1.0, 1.0, 1.0, -1.0, -1.0]
    loss, gradient, metrics = losses(name, np.log(ratio), [0.0] * 6, advantage, clip_low=0.2, clip_high=0.28)
    assert loss == pytest.approx([-2.0, -1.1, -1.28, -0.5, 1.5, 0.8])
    # d(-rA)/d logprob = -rA; 0 where clipped: a good token gone too far up, a bad one too far down
    assert gradient == pytest.approx([-2.0, -1.1, 0.0, -0.5, 1.5, 0.0])
    assert metrics["clip_fraction"] == [0, 0, 1, 0, 0, 1]


def test_dual_clip_bounds_what_a_bad_token_costs():
    ratio, advantage = [1.5, 5.0, 5.0], [-1.0, -1.0, 1.0]
    loss, gradient, metrics = losses("grpo", np.log(ratio), [0.0] * 3, advantage, dual_clip=3.0)
    assert loss == pytest.approx([1.5, 3.0, -1.28])
    assert gradient == pytest.approx([1.5, 0.0, 0.0])
    assert metrics["dual_clip_fraction"] == [0, 1, 0]
    assert losses("grpo", np.log(ratio), [0.0] * 3, advantage)[1] == pytest.approx([1.5, 5.0, 0.0])


def test_gspo_clips_a_trajectory_as_a_whole():
    # ratios 1.5 and 0.96: geometric mean 1.2 (inside), then 2.25 and 1.0: 1.5 (above 1.28)
    ratio, sequence = [1.5, 0.96, 2.25, 1.0], [0, 0, 1, 1]
    loss, gradient, metrics = losses("gspo", np.log(ratio), [0.0] * 4, [1.0, 1.0, 2.0, 2.0], sequence=sequence)
    assert loss == pytest.approx([-1.2, -1.2, -2.56, -2.56])
    assert gradient == pytest.approx([-1.2, -1.2, 0.0, 0.0])
    assert metrics["clip_fraction"] == [0, 0, 1, 1]


def test_gspo_summed_over_a_trajectory_is_the_objective_of_the_paper():
    """Equation 5: ``min(s A, clip(s) A)`` with s the length-normalised ratio, differentiated as it stands."""
    old = torch.tensor([-1.0, -2.0, -0.5], dtype=torch.float64)
    logprob = torch.tensor([-0.9, -2.2, -0.4], dtype=torch.float64, requires_grad=True)
    ratio = torch.exp((logprob - old).mean())
    torch.minimum(ratio * 0.7, ratio.clamp(0.8, 1.28) * 0.7).backward()
    _, gradient, _ = losses("gspo", logprob.tolist(), old.tolist(), [0.7] * 3, sequence=[0, 0, 0])
    assert [value / 3 for value in gradient] == pytest.approx((-logprob.grad).tolist())  # each token weighs 1 / length


def test_cispo_weighs_every_token_and_drops_none():
    ratio, advantage = [1.0, 1.5, 0.5, 1.5], [2.0, 1.0, 1.0, -1.0]
    loss, gradient, metrics = losses("cispo", np.log(ratio), [0.0] * 4, advantage, clip_low=0.2, clip_high=0.28)
    assert gradient == pytest.approx([-2.0, -1.28, -0.8, 1.28])
    assert loss == pytest.approx([0.0, -1.28 * math.log(1.5), -0.8 * math.log(0.5), 1.28 * math.log(1.5)])
    assert metrics["clip_fraction"] == [0, 1, 1, 1]


def test_sapo_fades_a_token_out_on_both_sides():
    """tau 1 for good tokens, 1.05 for bad ones; the slope of 4 sigmoid(tau (r - 1)) / tau is 4 p (1 - p)."""
    ratio, advantage = [1.0, 2.0, 0.5, 2.0], [2.0, 1.0, 1.0, -1.0]
    loss, gradient, metrics = losses("sapo", np.log(ratio), [0.0] * 4, advantage)
    p = [1 / (1 + math.exp(-tau * (r - 1))) for r, tau in zip(ratio, [1, 1, 1, 1.05], strict=True)]
    assert loss == pytest.approx([-4.0, -4 * p[1], -4 * p[2], 4 / 1.05 * p[3]])
    slopes = [4 * value * (1 - value) for value in p]
    assert gradient == pytest.approx([-2.0, -2.0 * slopes[1], -0.5 * slopes[2], 2.0 * slopes[3]])
    assert metrics["gate"] == pytest.approx(slopes)
    assert slopes[0] == 1 > slopes[2] > slopes[1] > slopes[3]


def test_at_ratio_one_every_algorithm_has_the_policy_gradient():
    for name in ALGORITHMS:
        _, gradient, _ = losses(name, [-0.5, -2.0], [-0.5, -2.0], [3.0, -1.0])
        assert gradient == pytest.approx([-3.0, 1.0]), name


@pytest.mark.parametrize("name", ["reinforce", "gpg"])
def test_reinforce_and_gpg_ignore_the_ratio(name):
    loss, gradient, metrics = losses(name, [-0.5, -2.0], [-4.0, 0.0], [2.0, -1.0])
    assert loss == [1.0, -2.0]
    assert gradient == [-2.0, 1.0]
    assert metrics == {}


NEEDS = {"dr_grpo": {"loss_aggregation": "constant"}}


@pytest.mark.parametrize("name", sorted(ALGORITHMS.keys() - {"reinforce", "reinforce_pp", "prpo", "distill"}))
def test_group_of_one_is_refused(name):
    with pytest.raises(ConfigError, match="nothing can be learned with group_size = 1"):
        create(name).validate(Config(group_size=1))
    create(name).validate(Config(group_size=2, **NEEDS.get(name, {})))


def test_without_a_group_baseline_a_group_of_one_will_do():
    create("reinforce").validate(Config(group_size=1))
    create("reinforce_pp").validate(Config(group_size=1))
    create("prpo").validate(Config(group_size=1))
    create("distill").validate(Config(group_size=1, teacher="teacher"))


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("dr_grpo", {}, "loss_aggregation is token: set loss_aggregation = constant"),
        ("dr_grpo", {"norm_std": False, "loss_aggregation": "constant"}, "norm_std has no effect with dr_grpo"),
        ("dapo", {"clip_high": 0.2}, "clip_high above clip_low"),
        ("dapo", {"loss_aggregation": "sequence"}, "loss_aggregation = token"),
        ("dapo", {"kl_beta": 0.1}, "kl_beta = 0"),
        ("dapo", {"norm_std": False}, "norm_std = true"),
        ("gspo", {"packing": "paths"}, "packing = forest"),
        ("cispo", {"dual_clip": 3.0}, "dual_clip has no effect with cispo"),
        ("rloo", {"norm_std": False}, "norm_std has no effect with rloo"),
        ("reinforce", {"clip_low": 0.1}, "clip_low has no effect with reinforce: leave it at 0.2"),
        ("reinforce_pp", {"norm_std": False}, "norm_std has no effect"),
        ("prpo", {"norm_std": False}, "norm_std has no effect with prpo"),
        ("gpg", {"norm_std": False}, "norm_std has no effect with gpg"),
        ("gpg", {"clip_high": 0.3}, "clip_high has no effect with gpg"),
        ("sapo", {"clip_low": 0.1}, "clip_low has no effect with sapo"),
    ],
)
def test_options_that_do_nothing_or_contradict_are_refused(name, options, words):
    with pytest.raises(ConfigError, match=words):
        create(name).validate(Config(**options))


def test_create_by_path_and_by_wrong_name():
    assert type(create("minirllm.algorithms.rloo:RLOO").algorithm) is type(create("rloo"))
    for name, words in [
        ("grop", "did you mean grpo"),
        ("no_such_module:X", "no_such_module"),
        ("math:nothing", "nothing"),
        ("math:pi", "validate"),
    ]:
        with pytest.raises(ConfigError, match=words):
            create(name)
