"""Distillation: the steps of an episode get their advantages from a teacher's scores of what the student sampled.

Owns: which teacher a Config means, what it reads (the student's own prompt, or one of its own), how its scores become
advantages and targets, the figures of a step. Does not know: how a teacher computes, batches, the loss.

The advantage of a sampled token is the teacher's log-probability minus the student's: a policy gradient with it
descends the reverse KL(student || teacher) on what the student itself does (arXiv 2306.13649; Thinking Machines,
On-Policy Distillation, 2025). With ``teacher_top_k`` its distribution is the target, see `head.Head.score`.

A teacher reads what the student read, token by token, where it has the student's tokenizer. One with another tokenizer
reads the same messages in its own chat template, and what the student said in its own tokens (align.py). A privileged
one is told more (privileged.py).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from minirllm import stack
from minirllm.algorithms.distill import is_url
from minirllm.config import Config
from minirllm.errors import ConfigError, RequestError, TeacherError
from minirllm.policy import Policy
from minirllm.renderer import Renderer
from minirllm.stack import Stack
from minirllm.syntaxes.calls import Tools
from minirllm.teachers import Reading, Scorer, Scores, align, local, privileged, remote
from minirllm.types import Episode, Message, Step


@asynccontextmanager
async def serving(
    config: Config, *, say: Callable[[str], None] | None = None, training: bool = False
) -> AsyncIterator[Stack]:
    """`stack.serving`, with the teacher that `config` names, if any. Raises also TeacherError."""
    async with stack.serving(config, say=say, training=training) as found, AsyncExitStack() as exit:
        if config.teacher:
            teacher = await exit.enter_async_context(opened(config, found.policy, found.renderer))
            found.teach, found.facts = teacher.teach, found.facts | teacher.facts
        yield found


@asynccontextmanager
async def opened(config: Config, student: Policy, renderer: Renderer) -> AsyncIterator[Teacher]:
    """The teacher that `config` names. Raises ConfigError, ModelError, CheckpointError or TeacherError."""
    hook = privileged.find(config.privileged) if config.privileged else None
    if is_url(config.teacher):
        async with remote.opened(config, renderer) as scorer:
            yield Teacher(config, renderer, scorer, hook, student.vocab_size)
    else:
        yield Teacher(config, renderer, await local.load(config, student, renderer), hook, student.vocab_size)


@dataclass
class _Told:
    """One call: what the student sampled, and which of its tokens each of the teacher's is about."""

    step: Step
    logprob_N: np.ndarray
    reading: Reading
    spans: list[align.Span]


@dataclass
class Teacher:
    """Fills in the advantages of a step's episodes. `facts` are for the manifest."""

    config: Config
    renderer: Renderer  # the student's
    scorer: Scorer
    hook: privileged.Hook | None
    vocabulary: int  # how many tokens the student has
    facts: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.scorer.renderer is not None and self.config.teacher_top_k:
            raise ConfigError("teacher_top_k needs a teacher of the student's vocabulary: leave it at 0.")
        self.facts = {"teacher": self.config.teacher, **self.scorer.facts}
        self.same = self.scorer.renderer is None
        self.own = self.scorer.renderer or self.renderer
        self.aligned = None if self.same else align.Aligner(self.renderer, self.own)

    async def teach(self, episodes: Sequence[Episode]) -> dict[str, float]:
        """Sets `Step.advantage` (and `Step.targets`) of every call that may be trained on; returns the figures of the
        step. Raises TeacherError, naming the call, for what cannot be scored."""
        began, told = time.perf_counter(), dict[str, list[list[_Told]]]()
        for episode in sorted(episodes, key=lambda episode: (episode.task_id, episode.rollout_idx)):
            if episode.reward is not None:
                told.setdefault(episode.task_id, []).append(self._told(episode))
        tasks = [[[one.reading for one in rollout] for rollout in rollouts] for rollouts in told.values()]
        scores = await self.scorer.score(tasks, max(1, self.config.teacher_top_k))
        sums = Counter[str]()
        for one in (one for rollouts in told.values() for rollout in rollouts for one in rollout):
            self._learn(one, scores[one.reading.id], sums)
        if sums["tokens"] and not sums["aligned"]:
            raise TeacherError("no token of this step has a beginning and an end in the teacher's tokens, too")
        return {
            "teacher_kl": sums["gap"] / max(1, sums["aligned"]),
            "teacher_agreement": sums["best"] / max(1, sums["scored"]),
            **({} if self.same else {"teacher_unaligned": float(sums["tokens"] - sums["aligned"])}),
            "seconds_teacher": time.perf_counter() - began,
        }

    def _told(self, episode: Episode) -> list[_Told]:
        """The calls of an episode as the teacher reads them."""
        steps = {step.id: step for step in episode.steps}
        told = []
        for step in (step for step in steps.values() if step.node is not None and not step.auxiliary):
            ids, logprobs = episode.tree.response(step.node)
            name, parent = f"{episode.id} {step.id}", step.parent if step.parent in steps else None
            prompt, answer = episode.tree.prompt_ids(step.node), list(ids)
            if self.aligned is None:
                spans = [align.Span(slice(n, n + 1), slice(n, n + 1)) for n in range(len(ids))]
            else:
                answer, spans = self.aligned(ids)
            if self.aligned is not None or self.hook is not None:
                messages, tools = conversation(steps, step)
                prompt = self._prompt(episode, step, messages, tools)
            reading = Reading(name, prompt, answer, f"{episode.id} {parent}" if parent else None)
            told.append(_Told(step, np.array(logprobs, np.float64), reading, spans))
        return told

    def _prompt(self, episode: Episode, step: Step, messages: list[Message], tools: Tools) -> list[int]:
        where = f"call {step.id} of episode {episode.id}"
        if not messages:
            raise TeacherError(f"{where} has a prompt without messages, which only the student's own prompt can say")
        try:
            return self.own.prompt(self.hook(episode.task, messages) if self.hook else messages, tools)
        except RequestError as error:
            raise TeacherError(f"its chat template refuses {where}: {error.message}") from None

    def _learn(self, told: _Told, scores: Scores, sums: Counter[str]) -> None:
        """One call's advantages. Tokens of one span share alike what the teacher thinks of it more than the student."""
        advantage_N = np.zeros(len(told.logprob_N))
        for span in told.spans:
            gap = scores.logprob_A[span.teacher].sum() - told.logprob_N[span.student].sum()
            count = span.student.stop - span.student.start
            advantage_N[span.student] = gap / count
            sums["gap"] -= gap
            sums["aligned"] += count
        sums["tokens"] += len(advantage_N)
        sums["best"] += int(scores.best_A.sum())
        sums["scored"] += len(scores.best_A)
        told.step.advantage = advantage_N.tolist()
        if self.config.teacher_top_k:
            for id in scores.top_id_AK[(scores.top_id_AK < 0) | (scores.top_id_AK >= self.vocabulary)][:1]:
                beyond = f"token {id} likely, but the student has {self.vocabulary} tokens"
                raise TeacherError(f"it finds {beyond}: lower teacher_top_k, or name another teacher")
            told.step.targets = (scores.top_id_AK, scores.top_logprob_AK)


def conversation(steps: dict[str, Step], step: Step) -> tuple[list[Message], Tools]:
    """The messages that a call answered, and the tools of its conversation."""
    chain, at = [step], step
    while at.parent in steps:
        at = steps[at.parent]
        chain.insert(0, at)
    before = [message for one in chain[:-1] for message in (*one.messages, one.response) if message is not None]
    return [*before, *step.messages], chain[0].tools
