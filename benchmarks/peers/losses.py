"""Losses and advantages beside TRL's and verl's own functions, on random inputs, in an environment of its own.

    python benchmarks/peers/losses.py --out benchmarks/baselines/peers_losses.json

Of every case the largest difference of any number: advantages, or the loss and its gradient for each log-probability,
over `SEEDS` random batches in float64. Owns: the random batches, how our options are named by the peers. A case that a
peer defines otherwise is compared after the one change that its name tells; docs/algorithms.md has the list.
"""

from __future__ import annotations

import argparse
import json
import logging
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import trl
import verl
from datasets import Dataset
from verl.trainer.ppo import core_algos, rollout_corr_helper
from verl.workers.config import ActorConfig

from minirllm import head
from minirllm.algorithms import Group, Tokens, create, objective
from minirllm.config import Config
from minirllm.models import tiny

SEEDS, GROUPS, SIZE, LONGEST, VOCABULARY = 10, 4, 5, 9, 32
BOUND = 1e-6
Numbers = list[torch.Tensor]
CLIPS = {"clip_low": 0.2, "clip_high": 0.28}


@dataclass
class Sample:
    """A batch of B trajectories in groups, padded to T tokens."""

    reward_B: np.ndarray
    mask_BT: torch.Tensor
    logprob_BT: torch.Tensor
    old_BT: torch.Tensor
    captured_BT: torch.Tensor  # of a sampler that is neither
    reference_BT: torch.Tensor
    advantage_B: torch.Tensor
    entropy_BT: torch.Tensor

    @property
    def groups(self) -> list[Group]:
        """As our algorithms take them."""
        counts = self.mask_BT.sum(1).numpy().astype(np.int64)
        return [Group(self.reward_B[k : k + SIZE], counts[k : k + SIZE]) for k in range(0, len(counts), SIZE)]

    @property
    def verl(self) -> dict[str, Any]:
        """As verl's advantages take them: the reward at a trajectory's last token."""
        rewards_BT = torch.zeros_like(self.mask_BT)
        rewards_BT[torch.arange(len(rewards_BT)), self.mask_BT.sum(1).long() - 1] = torch.from_numpy(self.reward_B)
        index = np.repeat(np.arange(GROUPS), SIZE)
        return {"token_level_rewards": rewards_BT, "response_mask": self.mask_BT, "index": index}


def sample(seed: int) -> Sample:
    """Rewards of every group differ, and some are 0."""
    random = torch.Generator().manual_seed(seed)
    B = GROUPS * SIZE
    length_B = torch.randint(1, LONGEST + 1, (B,), generator=random)
    length_B[0] = LONGEST
    mask_BT = (torch.arange(LONGEST) < length_B[:, None]).double()
    reward_B = torch.randint(0, 4, (B,), generator=random).double() / 3
    reward_B[::SIZE], reward_B[1::SIZE] = 0, 1

    def near(values_BT: torch.Tensor, spread: float) -> torch.Tensor:
        return values_BT + spread * torch.randn(B, LONGEST, generator=random, dtype=torch.float64)

    logprob_BT = near(torch.full((B, LONGEST), -2.0, dtype=torch.float64), 0.5)
    others = [near(logprob_BT, spread) for spread in (0.4, 0.5, 0.3)]
    advantage_B = torch.randn(B, generator=random, dtype=torch.float64)
    entropy_BT = torch.rand(B, LONGEST, generator=random, dtype=torch.float64)
    return Sample(reward_B.numpy(), mask_BT, logprob_BT, *others, advantage_B, entropy_BT)


# ---- ours ----


def advantages(name: str, s: Sample, **options: Any) -> Numbers:
    """Of each trajectory."""
    return [torch.from_numpy(np.concatenate(create(name).advantages(s.groups, Config(**options))))]


def loss(name: str, s: Sample, proximal: bool = False, **options: Any) -> Numbers:
    """The loss of the batch and its gradient; with `proximal` the captured log-probabilities are another policy's."""
    config, at = Config(max_tokens=LONGEST, **options), s.mask_BT.bool()
    leaf = s.logprob_BT.clone().requires_grad_(True)
    sequence_N = torch.nonzero(at)[:, 0]
    count_N = s.mask_BT.sum(1)[sequence_N]
    old_N = (s.captured_BT if proximal else s.old_BT)[at]
    tokens = Tokens(leaf[at], old_N, s.advantage_B[sequence_N], sequence_N, sequence_N * 0)
    reference_N = s.reference_BT[at] if objective.in_loss(config) else None
    entropy_N = s.entropy_BT[at] if config.entropy_bonus else None
    loss_N, _ = objective.loss(create(name), tokens, config, s.old_BT[at] if proximal else None, reference_N, entropy_N)
    weight_N = {  # the three formulas of batch.py
        "token": 1 / s.mask_BT.sum(),
        "sequence": 1 / (len(at) * count_N),
        "constant": 1 / (len(at) * LONGEST),
    }[config.loss_aggregation]
    total = (weight_N * loss_N).sum()
    total.backward()
    assert leaf.grad is not None
    return [total.detach(), leaf.grad]


# ---- theirs ----


def verl_loss(mode: str, s: Sample, aggregation: str, weights: torch.Tensor | None = None, **clips: float) -> Numbers:
    """verl's policy loss."""
    config = ActorConfig(strategy="fsdp", rollout_n=SIZE, ppo_micro_batch_size_per_gpu=1, use_dynamic_bsz=True, **clips)
    leaf = s.logprob_BT.clone().requires_grad_(True)
    advantage_BT = s.advantage_B[:, None].expand_as(leaf)
    function = core_algos.get_policy_loss_fn(mode)
    total, _ = function(s.old_BT, leaf, advantage_BT, s.mask_BT, aggregation, config, weights)
    total.backward()
    assert leaf.grad is not None
    return [total.detach(), leaf.grad]


def verl_advantages(name: str, s: Sample, **options: Any) -> Numbers:
    """verl's, of each trajectory."""
    given = s.verl
    function = core_algos.get_adv_estimator_fn(name)
    return [function(**given, **options)[0][:, 0]]


def verl_weights(s: Sample, level: str, threshold: str) -> torch.Tensor:
    """verl's importance weights."""
    gap_BT = s.old_BT - s.captured_BT
    return rollout_corr_helper.compute_rollout_correction_weights(gap_BT, s.mask_BT, level, threshold)[0]


class Trl:
    """A real GRPOTrainer of a tiny model, whose log-probabilities are replaced by the batch's."""

    def __init__(self, folder: str):
        self.folder = folder
        self.made: dict[str, Any] = {}

    def trainer(self, options: dict[str, Any]) -> Any:
        """One for each set of options."""
        key = json.dumps(options, sort_keys=True)
        if key not in self.made:
            model, tokenizer = tiny.build(seed=0)
            fixed = {"use_cpu": True, "bf16": False, "report_to": [], "save_strategy": "no", "disable_tqdm": True}
            sizes = {"per_device_train_batch_size": SIZE, "num_generations": SIZE, "max_completion_length": LONGEST}
            self.made[key] = trl.GRPOTrainer(
                model=model,
                reward_funcs=lambda completions, **kwargs: [0.0] * len(completions),
                args=trl.GRPOConfig(output_dir=self.folder, **fixed, **sizes, **options),
                train_dataset=Dataset.from_list([{"prompt": "a"}] * SIZE),
                processing_class=tokenizer,
            )
            self.made[key].model.eval()  # no accumulation over micro-batches
        return self.made[key]

    def loss(self, s: Sample, weights: torch.Tensor | None = None, beta: float = 0.0, **options: Any) -> Numbers:
        """TRL's loss."""
        trainer = self.trainer({"beta": 0.0, **options})
        trainer.beta = beta  # set here, so that no reference model is looked for
        leaf = s.logprob_BT.clone().requires_grad_(True)
        trainer._get_per_token_logps_and_entropies = lambda *args, **kwargs: (leaf, s.entropy_BT, None)
        trainer.use_vllm, trainer.vllm_importance_sampling_correction = weights is not None, weights is not None
        ids = torch.zeros(leaf.shape, dtype=torch.long)
        inputs = {
            "prompt_ids": ids, "prompt_mask": ids, "completion_ids": ids, "completion_mask": s.mask_BT,
            "advantages": s.advantage_B, "old_per_token_logps": s.old_BT, "ref_per_token_logps": s.reference_BT,
            "num_items_in_batch": s.mask_BT.sum(), "importance_sampling_ratio": weights,
        }  # fmt: skip
        total = trainer._compute_loss(trainer.model, inputs)
        total.backward()
        assert leaf.grad is not None
        return [total.detach(), leaf.grad]


# ---- cases ----

Case = Callable[[Sample], tuple[Numbers, Numbers]]  # ours and the peer's


def verl_cases() -> dict[str, Case]:
    """Ours and verl's, by what is compared."""
    return {**verl_advantage_cases(), **verl_loss_cases(), "kl steered": steered, "entropy": entropy}


def verl_advantage_cases() -> dict[str, Case]:
    def unbiased(s: Sample) -> Numbers:
        scale_B = np.repeat([(g.rewards_G.std() + 1e-6) / (g.rewards_G.std(ddof=1) + 1e-6) for g in s.groups], SIZE)
        return [advantages("grpo", s)[0] * torch.from_numpy(scale_B)]

    def scaled(s: Sample) -> Numbers:
        return [advantages("gpg", s)[0] * len(s.reward_B) / np.count_nonzero(s.reward_B)]

    return {
        "advantage grpo, norm_std off": lambda s: (
            advantages("grpo", s, norm_std=False),
            verl_advantages("grpo", s, norm_adv_by_std_in_grpo=False),
        ),
        "advantage grpo, std made unbiased": lambda s: (unbiased(s), verl_advantages("grpo", s)),
        "advantage rloo": lambda s: (advantages("rloo", s), verl_advantages("rloo", s)),
        "advantage reinforce_pp_baseline": lambda s: (
            advantages("reinforce_pp_baseline", s),
            verl_advantages("reinforce_plus_plus_baseline", s),
        ),
        "advantage reinforce_pp": lambda s: (
            advantages("reinforce_pp", s),
            verl_advantages("reinforce_plus_plus", s, config=core_algos.AlgoConfig(gamma=1.0)),
        ),
        "advantage gpg, times B / rewards that are not 0": lambda s: (scaled(s), verl_advantages("gpg", s)),
    }


def verl_loss_cases() -> dict[str, Case]:
    two = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28}
    far = {"clip_ratio_c": 1e9}  # verl's dual clip cannot be switched off
    means = {"token": "token-mean", "sequence": "seq-mean-token-mean", "constant": "seq-mean-token-sum-norm"}

    def kl(s: Sample, estimator: str) -> tuple[Numbers, Numbers]:
        ours = objective.kl(s.reference_BT - s.logprob_BT, Config(kl_estimator=estimator))
        return [ours], [core_algos.kl_penalty(s.logprob_BT, s.reference_BT, estimator)]

    def corrected(s: Sample, kind: str, level: str, threshold: str) -> tuple[Numbers, Numbers]:
        ours = loss("grpo", s, proximal=True, correction=kind, correction_cap=1.5, **CLIPS)
        return ours, verl_loss("vanilla", s, "token-mean", verl_weights(s, level, threshold), **two, **far)

    def aggregated(s: Sample, kind: str, mean: str) -> tuple[Numbers, Numbers]:
        return loss("grpo", s, loss_aggregation=kind, **CLIPS), verl_loss("vanilla", s, mean, **two, **far)

    return {
        "loss grpo, dual_clip": lambda s: (
            loss("grpo", s, dual_clip=1.5, **CLIPS),
            verl_loss("vanilla", s, "token-mean", **two, clip_ratio_c=1.5),
        ),
        "loss gspo": lambda s: (
            loss("gspo", s, loss_aggregation="sequence", **CLIPS),
            verl_loss("gspo", s, "seq-mean-token-mean", **two),
        ),
        "loss cispo": lambda s: (loss("cispo", s, **CLIPS), verl_loss("cispo", s, "token-mean", **two)),
        "loss sapo": lambda s: (
            loss("sapo", s, loss_aggregation="sequence"),
            verl_loss("sapo", s, "any", tau_neg=1.05),
        ),
        "loss gpg": lambda s: (loss("gpg", s), verl_loss("gpg", s, "token-mean")),
        "correction token": lambda s: corrected(s, "token", "token", "1.5"),
        "correction sequence": lambda s: corrected(s, "sequence", "sequence", "1.5"),
        "correction mask": lambda s: corrected(s, "mask", "token", f"{1 / 1.5}_1.5"),
        **{f"kl {name}": lambda s, name=name: kl(s, name) for name in ("k1", "k2", "k3")},
        **{f"loss grpo, {ours}": lambda s, pair=(ours, theirs): aggregated(s, *pair) for ours, theirs in means.items()},
    }


def steered(s: Sample) -> tuple[Numbers, Numbers]:
    """The KL's weight after one update, with verl's horizon at ten updates."""
    measured = float((s.logprob_BT - s.reference_BT).mean().abs())
    controller = core_algos.AdaptiveKLController(0.3, 0.05, 10)
    controller.update(measured, 1)
    return [torch.tensor(objective.steered(0.3, measured, 0.05))], [torch.tensor(controller.value)]


def entropy(s: Sample) -> tuple[Numbers, Numbers]:
    """Mean entropy of logits and its gradient for what the head reads, in float32 as the head is."""
    linear = torch.nn.Linear(LONGEST, VOCABULARY, bias=False)
    torch.nn.init.normal_(linear.weight, generator=torch.Generator().manual_seed(0))
    found: list[Numbers] = []
    for ours in (True, False):
        leaf = s.logprob_BT.float().requires_grad_(True)
        count = len(leaf)
        if ours:
            scored = head.Head(linear, None).score(leaf, torch.zeros(count).long(), torch.ones(count), entropy=True)
            mean = scored[1].mean()
        else:
            mean = core_algos.compute_entropy_loss(linear(leaf)[None], torch.ones(1, count))
        mean.backward()
        assert leaf.grad is not None
        found.append([mean.detach(), leaf.grad])
    return found[0], found[1]


def trl_cases(peer: Trl) -> dict[str, Case]:
    """Ours and TRL's, by what is compared."""
    two = {"epsilon": 0.2, "epsilon_high": 0.28}

    def corrected(s: Sample) -> tuple[Numbers, Numbers]:
        weights = verl_weights(s, "token", "1.5")
        ours = loss("grpo", s, proximal=True, correction="token", correction_cap=1.5, **CLIPS)
        return ours, peer.loss(s, weights, loss_type="bnpo", **two)

    return {
        "loss grpo, sequence": lambda s: (
            loss("grpo", s, loss_aggregation="sequence", **CLIPS),
            peer.loss(s, loss_type="grpo", **two),
        ),
        "loss grpo, token": lambda s: (loss("grpo", s, **CLIPS), peer.loss(s, loss_type="bnpo", **two)),
        "loss dapo": lambda s: (loss("dapo", s, **CLIPS), peer.loss(s, loss_type="dapo", **two)),
        "loss dr_grpo": lambda s: (
            loss("dr_grpo", s, loss_aggregation="constant", **CLIPS),
            peer.loss(s, loss_type="dr_grpo", **two),
        ),
        "loss grpo, dual_clip": lambda s: (
            loss("grpo", s, dual_clip=1.5, **CLIPS),
            peer.loss(s, loss_type="bnpo", delta=1.5, **two),
        ),
        "loss gspo": lambda s: (
            loss("gspo", s, loss_aggregation="sequence", **CLIPS),
            peer.loss(s, loss_type="grpo", importance_sampling_level="sequence", **two),
        ),
        "loss cispo, no lower bound": lambda s: (
            loss("cispo", s, clip_low=1.0, clip_high=0.28),
            peer.loss(s, loss_type="cispo", epsilon_high=1.28),
        ),
        "loss sapo": lambda s: (loss("sapo", s, loss_aggregation="sequence"), peer.loss(s, loss_type="sapo")),
        "kl k3, without the ratio": lambda s: (
            loss("grpo", s, kl_beta=0.3, **CLIPS),
            peer.loss(s, loss_type="bnpo", beta=0.3, use_bias_correction_kl=False, **two),
        ),
        "entropy_bonus": lambda s: (
            loss("grpo", s, entropy_bonus=0.1, **CLIPS),
            peer.loss(s, loss_type="bnpo", entropy_coef=0.1, **two),
        ),
        "correction token": corrected,
    }


def difference(ours: Numbers, theirs: Numbers) -> float:
    """The largest, of numbers that are not all 0."""
    assert all(bool(value.abs().max() > 0) for value in ours)
    return max(float((a.double() - b.double()).abs().max()) for a, b in zip(ours, theirs, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    samples = [sample(seed) for seed in range(SEEDS)]
    found: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for peer, cases in (("trl", trl_cases(Trl(folder))), ("verl", verl_cases())):
            found[peer] = {name: max(difference(*case(s)) for s in samples) for name, case in sorted(cases.items())}
    worst = max(value for values in found.values() for value in values.values())
    result = {
        "max_difference": found, "worst": worst, "bound": BOUND, "seeds": SEEDS,
        "versions": {module.__name__: module.__version__ for module in (trl, verl, torch)},
    }  # fmt: skip
    text = json.dumps(result, indent=1)
    print(text)
    if options.out is not None:
        options.out.write_text(text + "\n")
    if not worst < BOUND:
        raise SystemExit(f"A case differs by {worst}, more than {BOUND}.")


if __name__ == "__main__":
    main()
