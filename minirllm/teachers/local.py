"""A teacher in this process: a model, a run's checkpoint, or the student's own weights.

Owns: which weights a name means, scoring over forests, so that what readings begin with is computed once. Does not
know: how scores are used.

It computes on the student's device lane, in the same arithmetic, and its scores are a function of the readings alone.
Nothing of it is trained.
"""

from __future__ import annotations

import asyncio
import datetime
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from minirllm import attention, checkpoint, config, models
from minirllm.config import Config
from minirllm.errors import CheckpointError, ConfigError, ModelError, TeacherError
from minirllm.policy import Policy
from minirllm.renderer import Renderer
from minirllm.teachers import OWN, Reading, Scores
from minirllm.tree import TokenTree, merge, shares
from minirllm.types import Completion

Rollouts = Sequence[Sequence[Reading]]


async def load(options: Config, student: Policy, renderer: Renderer) -> Local:
    """The teacher that ``options.teacher`` names. Raises ModelError, CheckpointError or ConfigError."""
    if options.teacher in OWN:
        return Local(options, student, student, None, {})
    folder, own = await asyncio.to_thread(_named, options)
    own = replace(own, determinism="off", threads=options.threads, teacher="", kl_beta=0.0)
    try:
        loaded = await asyncio.to_thread(models.load, own.model, str(student.device))
    except ModelError as error:
        no_run = f"{options.teacher} is no run with checkpoints, not in {options.runs_dir} either, and no model. "
        raise ModelError(f"{'' if folder else no_run}{error}") from None
    multiple = attention.ROW_MULTIPLE
    try:
        policy = await asyncio.to_thread(Policy, loaded.model, loaded.tokenizer, own, student.lane)
    finally:
        attention.ROW_MULTIPLE = multiple  # the student's, which was found by trying
    if folder is not None:
        await student.run(policy.load_weights, folder)
    other = None
    if loaded.tokenizer.get_vocab() != renderer.tokenizer.get_vocab():
        today = datetime.date.fromisoformat(options.date) if options.date else None
        other = await asyncio.to_thread(Renderer, loaded.tokenizer, eos_ids=sorted(policy.eos_ids), today=today)
    elif policy.vocab_size < len(renderer.tokenizer):
        raise ConfigError(f"The head of {options.teacher} has fewer tokens than its tokenizer: name another teacher.")
    digest = await student.run(_sha256, policy)
    facts = {"teacher_model": loaded.name, "teacher_revision": loaded.revision, "teacher_sha256": digest}
    return Local(options, student, policy, other, facts)


def _checkpoint(options: Config) -> Path | None:
    """The checkpoint that a name means: one's folder, or a run's, in which the newest whole one is taken."""
    for folder in (Path(options.teacher), Path(options.runs_dir) / options.teacher):
        if (folder / "checkpoints").is_dir():
            return checkpoint.of_run(folder)
        if (folder / checkpoint.MANIFEST).is_file():
            checkpoint.verify(folder)
            return folder
    return None


def _named(options: Config) -> tuple[Path | None, Config]:
    """The checkpoint, if it is one, and the options that the model was made with."""
    folder = _checkpoint(options)
    return folder, _own_options(folder) if folder else replace(options, model=options.teacher, lora_rank=0)


def _own_options(folder: Path) -> Config:
    """Those of the run that a checkpoint is of."""
    files = [place / "config.toml" for place in folder.resolve().parents[:2] if (place / "config.toml").is_file()]
    if not files:
        raise CheckpointError(f"There is no config.toml of the run around {folder}: leave a checkpoint in its run.")
    return config.load(files[0])


def _sha256(policy: Policy) -> str:
    """Of all weights: nothing of a teacher is trained, but everything of it counts."""
    policy.model.requires_grad_(True)
    digest = policy.weights_sha256()
    policy.model.requires_grad_(False)
    return digest


class Local:
    """Scores with `policy`, on the lane of the student's."""

    def __init__(
        self, options: Config, student: Policy, policy: Policy, renderer: Renderer | None, facts: dict[str, Any]
    ):
        self.limit, self.base = options.micro_batch_tokens, options.teacher == "base"
        self.student, self.policy, self.renderer, self.facts = student, policy, renderer, facts

    async def score(self, tasks: Sequence[Rollouts], k: int) -> dict[str, Scores]:
        """As `Scorer` says."""
        found: dict[str, Scores] = {}
        for rollouts in tasks:
            longest = max((len(r.prompt) + len(r.answer) for rollout in rollouts for r in rollout), default=0)
            if longest > (most := self.policy.max_positions):
                raise TeacherError(f"it reads {most} tokens, and a call has {longest} of its own: lower max_context")
            found |= {reading.id: Scores.none(k) for rollout in rollouts for reading in rollout}
            answered = [said for rollout in rollouts if (said := [reading for reading in rollout if reading.answer])]
            for share in shares(answered, _tree, lambda share: share[0].num_tokens, self.limit):
                found |= await self.student.run(self._score, *share, k)
        return found

    def _score(self, tree: TokenTree, ends: dict[str, int], k: int) -> dict[str, Scores]:
        """Of the readings that `ends` names. Without any there is nothing to compute."""
        if not ends:
            return {}
        forest, (spans,) = merge([tree])
        logprob_N, likely = self.policy.likely(forest, k, self.base)
        columns = [tensor.cpu().numpy() for tensor in (logprob_N, likely.id_NK, likely.logprob_NK)]
        row_T = np.cumsum(forest.trained_T) - 1  # of each trained token among all of them
        found = {}
        for name, end in ends.items():
            at_A = np.concatenate([np.arange(*spans[node]) for node in tree.completion_nodes(end)])
            logprob_A, id_AK, top_AK = (column[row_T[at_A]] for column in columns)
            best_A = id_AK[:, 0] == forest.token_T[at_A]
            found[name] = Scores(logprob_A.astype(np.float64), id_AK, top_AK, best_A)
        return found


def _tree(rollouts: Rollouts) -> tuple[TokenTree, dict[str, int]]:
    """The readings of one task in one tree, and the node that ends each."""
    tree, ends = TokenTree(), dict[str, int]()
    for reading in (reading for rollout in rollouts for reading in rollout):
        said = Completion(reading.answer, [0.0] * len(reading.answer), "stop", 0)
        ends[reading.id] = tree.add(reading.prompt, said, reading.id, ends.get(reading.after or ""))
    return tree, ends
