"""The weight update: forests in, one AdamW step out, metrics beside it.

Owns: optimizer, learning-rate schedule, gradient clipping, the decision to skip a step, the sampler/trainer mismatch
figures. Every piece of torch work is one short call on the policy's device thread, so the event loop stays free.
Does not know: engines, rewards, text, how weights per token came about (batch.py).

Legend: T tokens of a forest, N trained tokens of it.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import numpy as np
import torch

from minirllm import exactness, tree
from minirllm.algorithms import Algorithm, Tokens, objective, roles
from minirllm.batch import Batch
from minirllm.config import Config
from minirllm.engines.sampling import effective_temperature
from minirllm.errors import ConfigError
from minirllm.files import write_whole
from minirllm.policy import Policy
from minirllm.tree import Forest
from minirllm.types import Completion

BETAS, EPSILON = (0.9, 0.999), 1e-8  # AdamW's customary values
MOVED = ("clip_fraction", "dual_clip_fraction", "effective_sample", "kl_reference", "loss", "ratio_max", "ratio_off")
MicroBatch = tuple[Forest, torch.Tensor | None]  # and log-probabilities [T] of the policy as the update began
STATE = ("step", "exp_avg", "exp_avg_sq")  # what torch keeps of a parameter, once it had a gradient: count, two means


def learning_rate(step: int, config: Config) -> float:
    """The rate of update `step` (0 first): linear warm-up, then constant, or a decay reaching 0 after the last step."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    left = max(1, config.steps - config.warmup_steps)
    progress = min(1.0, (step - config.warmup_steps) / left)
    factor = {"constant": 1.0, "linear": 1 - progress, "cosine": (1 + math.cos(math.pi * progress)) / 2}
    return config.lr * factor[config.lr_schedule]


class Trainer:
    """Updates `policy` in place. `step` counts calls of `update`, skipped ones included; the schedule follows it."""

    def __init__(self, policy: Policy, config: Config, algorithm: Algorithm, dump_folder: Path | None = None):
        """`dump_folder` receives the batch of a skipped step. ConfigError when the algorithm refuses the options."""
        objective.validate(config)
        algorithm.validate(config)
        if effective_temperature(config.temperature) == 0:
            raise ConfigError(f"temperature = {config.temperature:g} gives a task the same answer each time: raise it.")
        if config.lora_rank and config.lora_alpha == 0:
            raise ConfigError("lora_alpha = 0 takes the adapter out of the model, so nothing can be learned: raise it.")
        # `config.kl_beta` is the KL's weight as it is now: `kl_target` steers it from what the options have
        self.kl_beta = config.kl_beta
        self.policy, self.config, self.algorithm, self.dump_folder = policy, config, algorithm, dump_folder
        self.step = 0
        self.problem = ""  # one sentence about the last update when it was skipped, else empty
        self.parameters = policy.trainable()
        self.optimizer = torch.optim.AdamW(
            list(self.parameters.values()), lr=config.lr, betas=BETAS, eps=EPSILON, weight_decay=config.weight_decay
        )

    async def update(self, batch: Batch) -> dict[str, float]:
        """``inner_epochs`` times ``mini_batches`` optimizer steps; ``policy.version`` rises by one.

        The version stays when the weights stay: nothing to learn from, or (``skipped`` = 1, `problem` says why) a loss
        or gradient that is not finite. Metrics are means over trained tokens unless named otherwise, and of the first
        step; what tells how far the policy moved is of the last one, too (``last/...``).
        """
        started, self.problem = time.perf_counter(), ""
        rate = learning_rate(self.step, self.config)
        self.step += 1
        version, passes = self.policy.version + 1, list[dict[str, float]]()
        for part in await self._steps(batch):
            if not self.problem:
                passes.append(await self._pass(part, rate, version))
        if self.problem and self.dump_folder is not None:
            path = self.dump_folder / f"skipped_step_{self.step:06d}.json"
            await asyncio.to_thread(dump, batch.forests, path)
            self.problem += f" The batch is in {path}."
        metrics = passes[0] if passes else {"grad_norm": 0.0}
        if len(passes) > 1:
            metrics |= {f"last/{name}": value for name, value in passes[-1].items() if name in MOVED}
        metrics |= self._steer(metrics.get("kl_reference", batch.metrics.get("kl_reference")))
        metrics |= {
            "lr": rate,
            "skipped": float(bool(self.problem)),
            "seconds_train": time.perf_counter() - started,
        }
        return metrics

    def _steer(self, measured: float | None) -> dict[str, float]:
        """The KL's weight in this update, where it changes from one to the next: sets that of the next one."""
        if not self.config.kl_target:
            return {}
        used = self.config.kl_beta
        if measured is not None and not self.problem:
            self.config = replace(self.config, kl_beta=objective.steered(used, measured, self.config.kl_target))
        return {"kl_beta": used}

    async def _steps(self, batch: Batch) -> Iterator[list[MicroBatch]]:
        """The micro-batches of each optimizer step, with log-probabilities under the weights as the update begins where
        a correction needs them: before the one step of an update the weights have not moved."""
        count = len(batch.parts) * self.config.inner_epochs
        kept = count > 1 and objective.correction(self.config) != "off"
        score = torch.no_grad()(self.policy.score)
        parts = [[(f, (await self.policy.run(score, f))[0] if kept else None) for f in part] for part in batch.parts]
        return chain.from_iterable(repeat(parts, self.config.inner_epochs))

    async def measure(self, forests: Sequence[Forest]) -> float:
        """The loss of these micro-batches under the weights as they are; nothing is learned."""
        return sum([await self.policy.run(self._measure, forest) for forest in forests])

    def _measure(self, forest: Forest) -> float:
        with torch.no_grad():
            return self._loss(forest)[0].item()

    async def _pass(self, micro_batches: Sequence[MicroBatch], rate: float, version: int) -> dict[str, float]:
        """One optimizer step, and its metrics."""
        sums: dict[str, float] = {}
        try:
            for forest, proximal_T in micro_batches:
                _add(sums, await self.policy.run(self._accumulate, forest, proximal_T))
            norm = await self.policy.run(self._apply, rate, sums["loss"], version)
        finally:
            await self.policy.run(self.optimizer.zero_grad)
        return {**_means(sums), "grad_norm": norm}

    def _accumulate(self, forest: Forest, proximal_T: torch.Tensor | None = None) -> dict[str, float]:
        """Forward and backward of one micro-batch; gradients add up. Returns sums over its trained tokens."""
        checkpointing = _gradient_checkpointing(self.policy.model, self.config.gradient_checkpointing)
        promised = self.policy.level != "off" or self.policy.device.type == "cpu"  # where it costs nothing
        with exactness.ordered(promised), checkpointing, torch.enable_grad():
            loss, tokens, per_token = self._loss(forest, proximal_T)
            loss.backward()
        sums = {name: values_N.sum(dtype=torch.float64).item() for name, values_N in per_token.items()}
        difference_N = (tokens.logprob_N.detach() - tokens.old_N).double()  # trainer minus sampler
        return sums | {
            "loss": loss.item(),
            "mismatch_mean": difference_N.abs().sum().item(),
            "mismatch_max": difference_N.abs().max().item(),
            # k3 estimate of KL(sampler || trainer)
            "mismatch_kl": (difference_N.exp() - difference_N - 1).sum().item(),
            "ratio_max": (difference_N.exp() - 1).abs().max().item(),
            "ratio_off": difference_N.abs().exp().sum().item() - len(difference_N),
            "ratio": difference_N.exp().sum().item(),
            "ratio_squared": (2 * difference_N).exp().sum().item(),
            "tokens": float(len(difference_N)),
        }

    def _loss(
        self, forest: Forest, proximal_T: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, Tokens, dict[str, torch.Tensor]]:
        """The loss of a micro-batch, the tokens that it is of, and values per token for the metrics."""
        at_N = torch.from_numpy(np.flatnonzero(forest.trained_T)).to(self.policy.device)
        columns = (forest.logprob_T, forest.advantage_T, forest.sequence_T, forest.role_T, forest.weight_T)
        *known, weight_N = (torch.from_numpy(values_T).to(self.policy.device)[at_N] for values_T in columns)
        config, bonus = self.config, self.config.entropy_bonus > 0
        reference_N = self.policy.score(forest, reference=True)[0][at_N] if objective.in_loss(config) else None
        logprob_T, entropy_T, divergence_T = self.policy.score(forest, entropy=bonus)
        proximal_N, entropy_N = None if proximal_T is None else proximal_T[at_N], entropy_T[at_N]
        divergence_N = None if divergence_T is None else divergence_T[at_N]
        tokens = replace(Tokens(logprob_T[at_N], *known), divergence_N=divergence_N)
        raised_N = entropy_N if bonus else None
        loss_N, per_token = objective.loss(self.algorithm, tokens, config, proximal_N, reference_N, raised_N)
        return (weight_N.double() * loss_N).sum(), tokens, {**per_token, "entropy": entropy_N.detach()}

    def _apply(self, rate: float, loss: float, version: int) -> float:
        """Clip and step, unless something is not finite. Returns the global gradient norm before clipping."""
        limit = self.config.grad_clip or math.inf
        norm = torch.nn.utils.clip_grad_norm_(self.parameters.values(), limit).item()
        if not (math.isfinite(loss) and math.isfinite(norm)):
            taught = " with what its earlier passes taught" if self.policy.version == version else ""
            self.problem = (
                f"Step {self.step} was skipped: its loss is {loss}, its gradient norm {norm}. The weights stay{taught}."
            )
            return norm
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.policy.version = version
        return norm

    def state_dict(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """AdamW's state by ``entry/parameter``, and the plain numbers. With the weights, this is all there is."""
        states = {name: self.optimizer.state.get(parameter, {}) for name, parameter in self.parameters.items()}
        tensors = {f"{entry}/{name}": value.detach() for name in states for entry, value in states[name].items()}
        steered = {"kl_beta": self.config.kl_beta, "kl_beta_from": self.kl_beta}
        return tensors, {"step": self.step, "version": self.policy.version, **steered}

    def load_state_dict(self, tensors: dict[str, torch.Tensor], numbers: dict[str, Any]) -> None:
        """What `state_dict` returned. Raises KeyError or ValueError when it belongs to other parameters."""
        loaded: dict[torch.Tensor, Any] = {}
        for name in {key.partition("/")[2]: None for key in tensors}:
            parameter, state = self.parameters[name], {entry: tensors[f"{entry}/{name}"] for entry in STATE}
            if any(state[entry].shape != parameter.shape for entry in STATE[1:]):
                raise ValueError(f"the moments of {name} have another shape than the parameter")
            devices = dict.fromkeys(STATE, parameter.device) | {"step": torch.device("cpu")}
            loaded[parameter] = {entry: value.to(devices[entry], copy=True) for entry, value in state.items()}
        self.optimizer.state.clear()
        self.optimizer.state.update(loaded)
        self.step, self.policy.version = numbers["step"], numbers["version"]
        if self.config.kl_target and numbers["kl_beta_from"] == self.kl_beta:  # else it begins at another
            self.config = replace(self.config, kl_beta=numbers["kl_beta"])


def rehearse(policy: Policy, config: Config) -> None:
    """The largest micro-batch once, on the device lane; the weights stay. What torch took for it, and for the
    optimizer's moments, it keeps: an engine that then takes a share of what is free leaves training its memory."""
    trainer = Trainer(policy, config, roles.of(config))
    count = max(config.micro_batch_tokens, min(config.max_context, policy.max_positions))
    session = tree.TokenTree()
    session.add([0], Completion([0] * (count - 1), [0.0] * (count - 1), "length", policy.version), "rehearsal")
    moments = [torch.empty_like(p) for p in trainer.parameters.values() for _ in STATE[1:]]
    forest = tree.merge([session])[0]
    forest.sequence_T[forest.trained_T] = 0
    trainer._accumulate(forest)
    trainer.optimizer.zero_grad()
    del moments


def dump(forests: Sequence[Forest], path: Path) -> None:
    """The forests as JSON: one object of plain lists each, for looking at what broke a step. UserError if it cannot."""
    rows = [
        {name: value.tolist() for name, value in vars(forest).items() if isinstance(value, np.ndarray)}
        for forest in forests
    ]
    write_whole(path, json.dumps(rows))


@contextmanager
def _gradient_checkpointing(model: Any, on: bool) -> Iterator[None]:
    """Recompute each decoder layer in backward, inside the block only: it would disable the KV cache in generation.

    transformers checkpoints a layer whose own ``training`` flag is set; its parts stay in evaluation mode (no dropout).
    """
    if not on:
        yield
        return
    model.activation_checkpointing_enable({"use_reentrant": False})
    layers = [module for module in model.modules() if getattr(module, "gradient_checkpointing", False)]
    try:
        for layer in layers:
            layer.training = True
        yield
    finally:
        for layer in layers:
            layer.training = False
        model.activation_checkpointing_disable()


def _add(sums: dict[str, float], more: dict[str, float]) -> None:
    for name, value in more.items():
        sums[name] = max(sums.get(name, 0.0), value) if name.endswith("_max") else sums.get(name, 0.0) + value


def _means(sums: dict[str, float]) -> dict[str, float]:
    """Sums over tokens become means; the loss (weighted already) and maxima stay."""
    tokens = max(1.0, sums.pop("tokens", 0.0))
    means = {name: value if name == "loss" or name.endswith("_max") else value / tokens for name, value in sums.items()}
    # the share of tokens that would tell as much if all weighed alike: (sum r)^2 / (N sum r^2) (Kish 1965)
    ratio, squared = means.pop("ratio"), means.pop("ratio_squared")
    return {**means, "effective_sample": ratio**2 / squared if squared > 0 else 0.0}
