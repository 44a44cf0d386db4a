"""solver_judge: two solvers propose an expression for a countdown problem, a judge picks one. One model is all three.

Two roles, so two kinds of trajectory with rewards of their own: a ``solver``'s is what its own proposal is worth, the
``judge``'s what the proposal that it picked is worth. Trajectories of one task with one name are compared with each
other: the solvers of all rollouts are one group, the judges another. The reward of the episode is the judge's.
"""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

from minirllm import AgentConfig, Episode, EvalOutput, Signal, Step, Task, Trajectory, evaluator, rollout
from minirllm.client import chat
from minirllm.flow import import_path
from minirllm.rewards.countdown import countdown, extract

DEFAULTS = {
    "model": "smollm2-135m", "steps": 60, "batch_size": 8, "group_size": 8, "lr": 3e-4, "max_tokens": 24,
    "eval_every": 20, "eval_tasks": 64, "save_every": 20,
}  # fmt: skip
SOLVERS = 2
PARTIAL = 0.1  # for an expression of the right numbers that misses the target
problems = import_path(Path(__file__).with_name("countdown.py"))
train, held_out, reference = problems.train, problems.held_out, problems.reference


@rollout
async def solve_and_judge(task: Task, config: AgentConfig) -> Episode:
    found = await asyncio.gather(*(chat(config, problems.messages(task)) for _ in range(SOLVERS)))
    # Which of two equal requests gets which of their two samples is up to timing; their order here must not be.
    proposals = sorted(found, key=lambda step: str(step.output))
    ruling = await chat(config, question(task, proposals))
    number = re.search(r"\d+", str(ruling.output))
    picked = int(number.group()) if number and len(number.group()) < 3 else 0
    answer = str(proposals[picked - 1].output) if 1 <= picked <= SOLVERS else ""
    solvers = [Trajectory("solver", [step], output=step.output) for step in proposals]
    return Episode(trajectories=[*solvers, Trajectory("judge", [ruling], output=answer)], artifacts={"answer": answer})


def question(task: Task, proposals: list[Step]) -> list[dict[str, str]]:
    """What the judge is asked."""
    lines = [f"{number}: {extract(str(step.output))}" for number, step in enumerate(proposals, 1)]
    rules = "Say which proposal uses each number once and reaches the target. Answer with its number only."
    asked = "\n".join([str(task.instruction), *lines, "Which one?"])
    return [{"role": "system", "content": rules}, {"role": "user", "content": asked}]


@evaluator
def score(task: Task, episode: Episode) -> EvalOutput:
    def worth(answer: object) -> float:
        return countdown(str(answer), task.metadata["numbers"], task.metadata["target"], partial=PARTIAL)

    for trajectory in episode.trajectories:
        trajectory.reward = worth(trajectory.output)
    solvers = [worth(t.output) == 1 for t in episode.trajectories if t.name == "solver"]
    reward = worth(episode.answer)
    # a judge is only tested where its choice matters
    tested = [Signal("judge_right", reward == 1)] if any(solvers) and not all(solvers) else []
    signals = [Signal("solver_right", sum(solvers) / len(solvers))] if solvers else []
    return EvalOutput(reward, reward == 1, [*signals, *tested])
