"""What is added to an algorithm's loss: numbers by hand, gradients, and what refuses what."""

import math

import pytest
import torch

from minirllm.algorithms import ALGORITHMS, Tokens, create
from minirllm.algorithms.objective import correction, kl, loss, steered, validate
from minirllm.config import Config
from minirllm.errors import ConfigError


def objective(
    name, logprob, captured, advantage, sequence=None, proximal=None, reference=None, entropy=None, **options
):
    """(losses, gradients, metrics) of tokens that are one trajectory each, or of those in `sequence`."""

    def column(values):
        return None if values is None else torch.tensor(values, dtype=torch.float64)

    leaf = column(logprob).requires_grad_(True)
    which = torch.tensor(range(len(logprob)) if sequence is None else sequence)
    tokens = Tokens(leaf, column(captured), column(advantage), which, which * 0)
    loss_N, metrics = loss(create(name), tokens, Config(**options), column(proximal), column(reference), entropy)
    loss_N.sum().backward()
    return loss_N.detach().tolist(), leaf.grad.tolist(), {key: value.tolist() for key, value in metrics.items()}


@pytest.mark.parametrize("name", list(ALGORITHMS))
def test_kl_is_k3_and_pulls_to_the_reference(name):
    reference = [-1.0 + math.log(2), -1.0, -1.0 - math.log(2)]
    loss, gradient, metrics = objective(name, [-1.0] * 3, [-1.0] * 3, [0.0] * 3, reference=reference, kl_beta=0.5)
    k3 = [2 - math.log(2) - 1, 0.0, 0.5 + math.log(2) - 1]
    assert metrics["kl_reference"] == pytest.approx(k3)
    assert loss == pytest.approx([0.5 * value for value in k3])
    # beta (1 - e^d): downhill is towards the reference
    assert gradient == pytest.approx([0.5 * (1 - 2), 0.0, 0.5 * (1 - 0.5)])


def test_k2_is_half_the_square():
    options = {"kl_beta": 0.5, "kl_estimator": "k2"}
    loss, gradient, _ = objective("grpo", [-1.0], [-1.0], [0.0], reference=[-1.5], **options)
    assert loss == pytest.approx([0.5 * 0.5**2 / 2])
    assert gradient == pytest.approx([0.5 * 0.5])  # beta (logprob - reference): downhill is towards the reference


def test_what_the_reward_may_be_charged_with_by_hand():
    difference = torch.tensor([math.log(2), 0.0, -math.log(2)], dtype=torch.float64)  # reference - logprob
    found = {name: kl(difference, Config(kl_estimator=name)).tolist() for name in ("k1", "k2", "k3")}
    assert found["k1"] == pytest.approx([-math.log(2), 0.0, math.log(2)])
    assert found["k2"] == pytest.approx([math.log(2) ** 2 / 2, 0.0, math.log(2) ** 2 / 2])
    assert found["k3"] == pytest.approx([1 - math.log(2), 0.0, math.log(2) - 0.5])


def test_the_weight_of_the_kl_is_steered_by_at_most_two_percent():
    assert steered(0.5, 0.011, 0.01) == pytest.approx(0.5 * 1.01)
    assert steered(0.5, 1.0, 0.01) == pytest.approx(0.5 * 1.02)
    assert steered(0.5, 0.0, 0.01) == pytest.approx(0.5 * 0.98)
    assert steered(0.5, 0.01, 0.01) == 0.5


def test_an_entropy_bonus_lowers_the_loss_by_the_entropy():
    entropy = torch.tensor([2.0, 0.5], dtype=torch.float64, requires_grad=True)
    loss, gradient, _ = objective("grpo", [-1.0] * 2, [-1.0] * 2, [1.0, -1.0], entropy=entropy, entropy_bonus=0.1)
    assert loss == pytest.approx([-1.0 - 0.2, 1.0 - 0.05])
    assert gradient == pytest.approx([-1.0, 1.0])
    assert entropy.grad.tolist() == pytest.approx([-0.1, -0.1])


CAPTURED = [0.0] * 5
MOVED = [1.0, 1.5, 3.0, 0.5, 0.2]  # policy over sampler


@pytest.mark.parametrize(
    ("kind", "weights", "capped"),
    [
        ("token", [1.0, 1.5, 2.0, 0.5, 0.2], [0, 0, 1, 0, 0]),
        ("mask", [1.0, 1.5, 0.0, 0.5, 0.0], [0, 0, 1, 0, 1]),
        # trajectories of tokens 0 to 2 and 3 to 4: 4.5, and 0.1
        ("sequence", [2.0, 2.0, 2.0, 0.1, 0.1], [1, 1, 1, 0, 0]),
    ],
)
@pytest.mark.parametrize("name", list(ALGORITHMS))
def test_corrections_by_hand(name, kind, weights, capped):
    """In the first pass the policy is the proximal one, so its ratio is 1 and nothing is clipped."""
    options = {"sequence": [0, 0, 0, 1, 1], "correction": kind, "correction_cap": 2.0}
    _, gradient, metrics = objective(
        name, [math.log(r) for r in MOVED], CAPTURED, [1.0, 1.0, 1.0, -1.0, 2.0], **options
    )
    assert metrics["correction"] == pytest.approx(weights)
    assert metrics["correction_capped"] == capped
    assert gradient == pytest.approx([-weights[0], -weights[1], -weights[2], weights[3], -2 * weights[4]])
    assert not any(metrics.get("clip_fraction", []))


def test_in_later_passes_the_ratio_is_to_the_proximal_policy():
    """Sampler 0.2, proximal 0.3, now 0.33 and 0.45: weight 1.5, ratios 1.1 and 1.5, the second one clipped."""
    now, proximal, captured = ([math.log(p) for p in ps] for ps in ([0.33, 0.45], [0.3, 0.3], [0.2, 0.2]))
    loss, gradient, metrics = objective("grpo", now, captured, [1.0, 1.0], proximal=proximal, correction="token")
    assert loss == pytest.approx([-1.5 * 1.1, -1.5 * 1.28])
    assert gradient == pytest.approx([-1.5 * 1.1, 0.0])
    assert metrics["clip_fraction"] == [0, 1]
    uncorrected = objective("grpo", now, captured, [1.0, 1.0], proximal=proximal, correction="off")
    assert uncorrected[0] == pytest.approx([-1.28, -1.28])  # 1.65 and 2.25 times what the sampler gave them
    assert "correction" not in uncorrected[2]


def test_a_correction_weighs_the_policy_gradient_and_not_the_kl():
    options = {"reference": [math.log(2)], "kl_beta": 0.5, "correction": "token", "correction_cap": 4.0}
    loss, gradient, _ = objective("grpo", [math.log(3)], [0.0], [1.0], **options)
    difference = math.log(2) - math.log(3)
    assert loss == pytest.approx([-3.0 + 0.5 * (2 / 3 - difference - 1)])
    assert gradient == pytest.approx([-3.0 + 0.5 * (1 - 2 / 3)])


def test_without_a_word_each_token_is_corrected_where_older_weights_sample() -> None:
    chosen = [correction(Config(lag=lag, correction=name)) for name in ("auto", "off", "mask") for lag in (0, 1)]
    assert chosen == ["off", "token", "off", "off", "mask", "mask"]
    validate(Config(lag=1, correction_cap=3.0))


def test_the_kl_to_a_teachers_distribution_is_not_weighed_by_the_token_that_was_sampled() -> None:
    config = Config(lag=1, algorithm="distill", teacher="base", teacher_top_k=4)
    now, divergence = torch.tensor([-1.0, -2.0]), torch.tensor([0.5, 0.25])
    tokens = Tokens(now, now - 1, now * 0, torch.arange(2), torch.arange(2) * 0, divergence)
    assert loss(create("distill"), tokens, config)[0].tolist() == [0.5, 0.25]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kl_estimator": "k2"}, "kl_estimator has no effect with kl_beta = 0"),
        ({"kl_in": "reward"}, "kl_in has no effect with kl_beta = 0"),
        ({"kl_target": 0.01}, "kl_target has no effect with kl_beta = 0"),
        ({"kl_beta": 0.1, "kl_estimator": "k1"}, "kl_estimator = k1 teaches nothing as a loss"),
        ({"dual_clip": 0.5}, "dual_clip must be above 1, or 0 for off"),
        ({"overlong_buffer": 500, "max_tokens": 256}, "overlong_buffer is a part of max_tokens = 256, got 500"),
        ({"mini_batches": 9}, "of which batch_size = 8 gives a step no more, got 9"),
        ({"correction_cap": 3.0}, "correction_cap has no effect with correction = auto"),
        ({"clip_low": 0.1, "lag": 1}, "clip_low has no effect with correction = token and one optimizer step"),
        ({"clip_high": 0.3, "correction": "mask"}, "clip_high has no effect with correction = mask and one optimizer"),
        ({"dual_clip": 3.0, "lag": 2}, "dual_clip has no effect with correction = token and one optimizer step"),
        ({"correction_cap": 3.0, "correction": "off"}, "correction_cap has no effect with correction = off"),
        ({"correction": "sequence", "packing": "paths"}, "correction = sequence needs all tokens of a trajectory"),
    ],
)
def test_options_of_the_loss_without_effect_are_refused(options: dict, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        validate(Config(**options))
