"""The loss of a token, whatever the algorithm: its policy gradient, corrected, plus KL, minus an entropy bonus.

Owns: importance corrections, estimates of the KL to the base model and how its weight is steered, how these terms add
up, which of their options contradict each other.
Does not know: models, trees, how the losses of tokens add up (batch.py).

A correction is for tokens that another policy sampled than the one that is trained: older weights, or other arithmetic.
Three policies are told apart: the *sampler*, whose log-probabilities were captured; the *proximal* one, which is the
trained one as the update begins and is what ratios and clips are relative to; and the policy now. A token's policy
gradient is weighed by ``w = proximal / sampler``, without a gradient of its own, kept below a cap (C = correction_cap):

- ``token``: ``min(w, C)`` (truncated importance sampling, Ionides 2008, doi 10.1198/106186008X320456).
- ``sequence``: ``min(product of w over its trajectory, C)``, the same for all tokens of a trajectory.
- ``mask``: ``w`` where ``1 / C <= w <= C``, else 0 (IcePop, arXiv 2510.18855): such a token teaches nothing, but still
  counts where the loss is a mean.

Without a correction the sampler is the proximal policy, too: captured log-probabilities are the old ones.

Legend: N trained tokens of a micro-batch. Value n is about token n.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from minirllm.algorithms import Algorithm, Loss, Tokens, per_sequence_sum
from minirllm.config import Config, refuse
from minirllm.errors import ConfigError


def correction(config: Config) -> str:
    """Which correction is made: ``auto`` is each token's where older weights sample, and else none. None, too, where a
    teacher's distribution is the target: that loss is not of the token that was sampled."""
    if config.correction != "auto":
        return config.correction
    return "token" if config.lag and not config.teacher_top_k else "off"


def in_loss(config: Config) -> bool:
    """Is the KL a term of the loss?"""
    return config.kl_beta > 0 and config.kl_in == "loss"


def in_reward(config: Config) -> bool:
    """Is the KL taken from the reward?"""
    return config.kl_beta > 0 and config.kl_in == "reward"


def without_reward(config: Config) -> bool:
    """Do tokens teach something whatever their advantage, even 0?"""
    return in_loss(config) or config.entropy_bonus > 0


def validate(config: Config) -> None:
    """Raises ConfigError for options of the loss that have no effect with the others."""
    if config.kl_beta == 0:
        refuse("kl_beta = 0", config, "kl_in", "kl_estimator", "kl_target")
    if correction(config) == "off":
        refuse(f"correction = {config.correction}", config, "correction_cap")
    elif config.inner_epochs == config.mini_batches == 1:
        what = f"correction = {correction(config)} and one optimizer step to a batch, whose ratio is 1"
        refuse(what, config, "clip_low", "clip_high", "dual_clip")
    for wrong, sentence in (
        (
            config.kl_estimator == "k1" and config.kl_in == "loss",
            "kl_estimator = k1 teaches nothing as a loss, its gradient is zero on average: set kl_in = reward, or k3.",
        ),
        (
            0 < config.dual_clip <= 1,
            f"dual_clip must be above 1, or 0 for off, got {config.dual_clip:g}.",
        ),
        (
            config.overlong_buffer > config.max_tokens,
            f"overlong_buffer is a part of max_tokens = {config.max_tokens}, got {config.overlong_buffer}: lower it.",
        ),
        (
            config.mini_batches > config.batch_size,
            f"mini_batches are made of whole tasks, of which batch_size = {config.batch_size} gives a step no more, "
            f"got {config.mini_batches}: lower it.",
        ),
        (
            correction(config) == "sequence" and config.packing == "paths",
            "correction = sequence needs all tokens of a trajectory side by side: set packing = forest.",
        ),
    ):
        if wrong:
            raise ConfigError(sentence)


def loss(
    algorithm: Algorithm,
    tokens: Tokens,
    config: Config,
    proximal_N: torch.Tensor | None = None,
    reference_N: torch.Tensor | None = None,
    entropy_N: torch.Tensor | None = None,
) -> Loss:
    """The loss of each token ``[N]``, to be minimised, and values per token ``[N]``, detached, for the metrics.

    The old log-probabilities in `tokens` are the captured ones. Without those of the proximal policy it has not moved
    yet. Those of the reference, the frozen base model, are given exactly when the KL is in the loss. The entropy is
    given, with a gradient, exactly when there is a bonus on it.
    """
    captured_N = tokens.old_N
    if correction(config) != "off":
        tokens = replace(tokens, old_N=tokens.logprob_N.detach() if proximal_N is None else proximal_N)
    loss_N, metrics = algorithm.loss(tokens, config)
    if correction(config) != "off":
        weight_N, figures = corrections(tokens.old_N - captured_N, tokens.sequence_N, config)
        loss_N, metrics = weight_N * loss_N, metrics | figures
    if reference_N is not None:
        kl_N = kl(reference_N - tokens.logprob_N, config)
        loss_N, metrics = loss_N + config.kl_beta * kl_N, metrics | {"kl_reference": kl_N.detach()}
    if entropy_N is not None:
        loss_N = loss_N - config.entropy_bonus * entropy_N
    return loss_N, metrics


def corrections(gap_N: torch.Tensor, sequence_N: torch.Tensor, config: Config) -> Loss:
    """The weight of each token's policy gradient, given ``gap = log(proximal / sampler)``; the module has the formulas.

    The metrics are that weight and which tokens the cap touched."""
    if correction(config) == "sequence":
        gap_N = per_sequence_sum(gap_N, sequence_N)
    free_N, cap = torch.exp(gap_N), config.correction_cap
    if correction(config) == "mask":
        weight_N = torch.where((free_N < 1 / cap) | (free_N > cap), 0.0, free_N)
    else:
        weight_N = free_N.clamp(max=cap)
    return weight_N, {"correction": weight_N, "correction_capped": (weight_N != free_N).float()}


def kl(difference_N: torch.Tensor, config: Config) -> torch.Tensor:
    """An estimate per token of KL(policy || reference), of d = reference - logprob.

    k3 is ``e^d - d - 1``, never negative and unbiased (arXiv 2402.03300, eq. 4); k2 is ``d^2 / 2``, biased, and its
    gradient is that of the true KL; k1 is ``-d``, unbiased, and negative as often as not. (Its gradient is zero on
    average: as a loss it would teach nothing.)
    """
    match config.kl_estimator:
        case "k1":
            return -difference_N
        case "k2":
            return difference_N.square() / 2
    return torch.exp(difference_N) - difference_N - 1


def steered(beta: float, measured: float, target: float) -> float:
    """The KL's weight for the next update, after one that measured so much of it (arXiv 1909.08593, section 2.2): up to
    2 % more where it was above the target, up to 2 % less where below."""
    return beta * (1 + 0.1 * min(0.2, max(-0.2, measured / target - 1)))
