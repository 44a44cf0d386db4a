"""addition: the sum of two single digits, after three examples.

The reward is 1 when the whole answer is the sum (outer white space and one full stop do not matter), else 0. Of the 100
problems, the three examples are left out and a fifth of the rest is held out.
"""

from __future__ import annotations

from minirllm import AgentConfig, Config, Episode, Task, evaluator, rollout
from minirllm.client import chat
from minirllm.rewards.exact import exact

DEFAULTS = {
    "model": "smollm2-135m", "steps": 60, "batch_size": 16, "group_size": 8, "lr": 3e-4, "max_tokens": 8,
    "eval_every": 20, "eval_tasks": 64, "save_every": 20,
}  # fmt: skip
EXAMPLES = ((2, 3), (5, 1), (4, 4))


def question(a: int, b: int) -> str:
    return f"{a} + {b}"


@rollout
async def answer(task: Task, config: AgentConfig) -> str:
    messages = []
    for a, b in EXAMPLES:
        messages += [{"role": "user", "content": question(a, b)}, {"role": "assistant", "content": str(a + b)}]
    reply = await chat(config, [*messages, {"role": "user", "content": task.instruction}])
    return str(reply.output)


@evaluator
def score(task: Task, episode: Episode) -> float:
    return exact(episode.answer, reference(task))


def reference(task: Task) -> str:
    return str(task.metadata["a"] + task.metadata["b"])


def train(config: Config) -> list[Task]:
    return [task for task in tasks() if not task.metadata["held_out"]]


def held_out(config: Config) -> list[Task]:
    return [task for task in tasks() if task.metadata["held_out"]]


def tasks() -> list[Task]:
    """All problems; every fifth one of a fixed order that mixes both digits is held out."""
    pairs = [(a, b) for a in range(10) for b in range(10) if (a, b) not in EXAMPLES]
    return [
        Task(f"{a}+{b}", question(a, b), {"a": a, "b": b, "held_out": (3 * a + b) % 5 == 0}) for a, b in pairs
    ]  # fmt: skip
