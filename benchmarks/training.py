"""Forest against one sequence at a time: forward + backward of one group, on the same model in the same run.

Owns: the measurement and its JSON. ``python benchmarks/training.py [--quick] [--out FILE] [--profile]``
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import peft

import minirllm  # noqa: F401  # before torch: sets the variables that its arithmetic depends on

# isort: split
import torch
import transformers
from torch.profiler import ProfilerActivity, profile

from minirllm import head, models
from minirllm.algorithms import create
from minirllm.attention import ForestLayout
from minirllm.batch import Batch, build
from minirllm.config import Config
from minirllm.policy import Policy
from minirllm.trainer import Trainer
from minirllm.tree import TokenTree
from minirllm.types import Completion, Episode, Step, Trajectory

TARGET_SPEEDUP, TARGET_DIFFERENCE = 2.5, 1e-6
Gradients = dict[str, torch.Tensor]


def group(policy: Policy, size: int, prompt: int, answer: int) -> list[Episode]:
    """`size` rollouts of random tokens on one prompt; logprobs as captured, half a nat off for every other one."""
    rng = np.random.default_rng(0)
    prompt_ids = rng.integers(1000, policy.vocab_size, prompt).tolist()
    episodes = []
    for index in range(size):
        ids = rng.integers(1000, policy.vocab_size, answer).tolist()
        with torch.no_grad():
            token_L = torch.tensor(prompt_ids + ids)
            hidden_LE = policy.hidden(token_L, torch.arange(len(token_L)), ForestLayout([[(0, len(token_L))]]))
            rows_AV = head.logprobs(policy.logits(hidden_LE[prompt - 1 : -1]), torch.ones(answer))
            logprobs = rows_AV.gather(1, token_L[prompt:, None])[:, 0] + (0.5 if index % 2 else 0.0)
        tree = TokenTree()
        node = tree.add(prompt_ids, Completion(ids, logprobs.tolist(), "length", policy.version), str(index))
        steps = [Step(id=str(index), node=node, prompt_length=prompt, response_length=answer)]
        episodes.append(
            Episode(
                id=f"task:{index}",
                task_id="task",
                rollout_idx=index,
                reward=float(index % 3),
                tree=tree,
                trajectories=[Trajectory(steps=steps)],
            )
        )
    return episodes


def forward_backward(policy: Policy, trainer: Trainer, batch: Batch) -> tuple[float, float, Gradients]:
    """(seconds, loss, gradients) of one batch, without the optimizer step."""
    started = time.perf_counter()
    loss = sum(trainer._accumulate(forest)["loss"] for forest in batch.forests)
    seconds = time.perf_counter() - started
    gradients = {
        name: parameter.grad.clone() for name, parameter in policy.trainable().items() if parameter.grad is not None
    }
    trainer.optimizer.zero_grad()
    return seconds, loss, gradients


def difference(found: Gradients, wanted: Gradients) -> float:
    """Norm of the difference over the norm, of all gradients as one vector."""
    gap = torch.cat([(found[name] - wanted[name]).flatten() for name in wanted]).double().norm()
    return float(gap / torch.cat([value.flatten() for value in wanted.values()]).double().norm())


def measure(policy: Policy, size: int, prompt: int, answer: int, repeats: int) -> dict[str, Any]:
    """Both packings in turn, `repeats` times after one warm-up; medians, and the ratio of each pair."""
    episodes = group(policy, size, prompt, answer)
    seconds: dict[str, list[float]] = {"forest": [], "paths": []}
    results: dict[str, tuple[float, Gradients]] = {}
    tokens = {}
    for repeat in range(repeats + 1):
        for packing, times in seconds.items():
            config = Config(**{**policy.config.to_dict(), "packing": packing, "micro_batch_tokens": 4096})
            batch = build(episodes, config, create(config.algorithm), policy.version)
            spent, loss, gradients = forward_backward(policy, Trainer(policy, config, create(config.algorithm)), batch)
            results[packing], tokens[packing] = (loss, gradients), int(batch.metrics["tokens"])
            if repeat:
                times.append(spent)
    (loss, gradients), (wanted_loss, wanted) = results["forest"], results["paths"]
    return {
        "group": size, "prompt_tokens": prompt, "answer_tokens": answer, "tokens": tokens,
        "seconds": {packing: statistics.median(times) for packing, times in seconds.items()},
        "speedup": statistics.median(slow / fast for fast, slow in zip(*seconds.values(), strict=True)),
        "token_ratio": tokens["paths"] / tokens["forest"],
        "loss": loss,
        "loss_relative_difference": abs(loss - wanted_loss) / abs(wanted_loss),
        "gradient_relative_difference": difference(gradients, wanted),
    }  # fmt: skip


def profiled(policy: Policy, size: int, prompt: int, answer: int) -> str:
    """Where the time of one forest goes, by operator."""
    config = Config(**{**policy.config.to_dict(), "micro_batch_tokens": 4096})
    batch = build(group(policy, size, prompt, answer), config, create("grpo"), policy.version)
    trainer = Trainer(policy, config, create("grpo"))
    forward_backward(policy, trainer, batch)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        forward_backward(policy, trainer, batch)
    return str(profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=30))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="a group of 4 with a 150-token prompt and 32-token answers, two repeats"
    )
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--profile", action="store_true", help="print where the forest's time goes, instead")
    parser.add_argument("--out", type=Path, default=None, help="also write the JSON here")
    args = parser.parse_args()
    config = Config(model=args.model, lora_rank=16, threads=args.threads)
    loaded = models.load(config.model)
    policy = Policy(loaded.model, loaded.tokenizer, config)
    torch.set_num_threads(policy.threads)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in policy.trainable().items():
            if ".lora_B." in name:  # zero at first, which would leave half the gradients zero
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.02)
    shape = (4, 150, 32) if args.quick else (8, 300, 64)
    if args.profile:
        print(profiled(policy, *shape))
    else:
        result = measure(policy, *shape, repeats=2 if args.quick else 3)
        result |= {
            "target": {"speedup": TARGET_SPEEDUP, "relative_difference": TARGET_DIFFERENCE},
            "model": loaded.name, "level": policy.level, "lora_rank": 16, "threads": policy.threads,
            "cpu": platform.machine(), "python": platform.python_version(),
            "versions": {module.__name__: module.__version__ for module in (torch, transformers, peft)},
        }  # fmt: skip
        text = json.dumps(result, indent=1)
        print(text)
        if args.out is not None:
            args.out.write_text(text + "\n")
    policy.close()


if __name__ == "__main__":
    main()
