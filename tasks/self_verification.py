"""self_verification: the model answers four times, compares its answers in pairs, and a knockout finds the one to give.

After V1 (arXiv 2603.04304), cut down: a knockout where it has Swiss rounds, a verdict "1" or "2" where it has scores.
Both roles learn together: a ``generator`` from whether its answer is right, a ``verifier`` from whether it named an
answer as good as the better of its two. The episode's reward is the winner's, to be held against the signals ``single``
(the mean of the answers: pass@1 without the knockout) and ``any_right`` (the most that any choice could reach). The
question is first_letter's.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from minirllm import AgentConfig, Episode, EvalOutput, Signal, Task, Trajectory, evaluator, rollout
from minirllm.client import chat
from minirllm.flow import import_path
from minirllm.rewards.exact import exact

ANSWERS = 4  # a power of two
letters = import_path(Path(__file__).with_name("first_letter.py"))
DEFAULTS = letters.DEFAULTS | {"batch_size": 8}
train, held_out, reference = letters.train, letters.held_out, letters.reference


@rollout
async def answer(task: Task, config: AgentConfig) -> Episode:
    found = await asyncio.gather(*(chat(config, letters.messages(task)) for _ in range(ANSWERS)))
    # Which of two equal requests gets which of their samples is up to timing; their order here must not be.
    generated = sorted((Trajectory("generator", [step], output=str(step.output)) for step in found), key=said)
    left, verified = [said(trajectory) for trajectory in generated], list[Trajectory]()
    while len(left) > 1:
        pairs = list(zip(left[::2], left[1::2], strict=True))
        met = await asyncio.gather(*(compare(task, config, *pair) for pair in pairs if pair[0] != pair[1]))
        verified += sorted(met, key=said)
        left = sorted([one for one, other in pairs if one == other] + [said(t) or t.input[0] for t in met])
    return Episode(trajectories=generated + verified, artifacts={"answer": left[0]})


def said(trajectory: Trajectory) -> str:
    return str(trajectory.output)


async def compare(task: Task, config: AgentConfig, *pair: str) -> Trajectory:
    """A verifier's view of two answers: its output is the one that it names, or nothing."""
    asked = f"{task.instruction}?\n1: {pair[0]}\n2: {pair[1]}\nWhich is right, 1 or 2?"
    step = await chat(config, [{"role": "user", "content": asked}])
    named = {"1": pair[0], "2": pair[1]}.get(str(step.output).strip()[:1], "")
    return Trajectory("verifier", [step], input=pair, output=named)


@evaluator
def score(task: Task, episode: Episode) -> EvalOutput:
    right = reference(task)
    for trajectory in episode.trajectories:
        trajectory.reward = exact(said(trajectory), right)
        if trajectory.name == "verifier" and said(trajectory):
            trajectory.reward = float(trajectory.reward == max(exact(text, right) for text in trajectory.input))
    single = [t.reward or 0.0 for t in episode.trajectories if t.name == "generator"]
    signals = [Signal("single", sum(single) / len(single)), Signal("any_right", max(single))] if single else []
    reward = exact(episode.answer, right)
    return EvalOutput(reward, reward == 1, signals)
