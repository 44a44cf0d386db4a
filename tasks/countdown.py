"""countdown: reach a target with + - * / and each given number exactly once. The problems are made, not downloaded.

The reward is 1 for a right expression, 0.1 for one that uses exactly the given numbers but misses the target, else 0:
the partial reward tells well-formed answers from babble, which is most of what a small model can learn at first.
"""

from __future__ import annotations

import random

from minirllm import AgentConfig, Config, Episode, Task, evaluator, rollout
from minirllm.client import chat
from minirllm.rewards.countdown import calculate, countdown

DEFAULTS = {
    "model": "smollm2-135m", "steps": 60, "batch_size": 16, "group_size": 8, "lr": 3e-4, "max_tokens": 24,
    "eval_every": 20, "eval_tasks": 64, "save_every": 20,
}  # fmt: skip
EXAMPLES = (((3, 5), 15, "3 * 5"), ((9, 4), 5, "9 - 4"), ((2, 6, 1), 13, "2 * 6 + 1"))
SEED, TRAIN, HELD_OUT = 20, 2000, 200  # of the problems themselves, which do not change with the run's seed
PARTIAL = 0.1
RULES = "Use each number exactly once, with + - * /. Answer with the expression only."


def question(numbers: tuple[int, ...] | list[int], target: int) -> str:
    return f"Make {target} from {', '.join(map(str, numbers))}."


def messages(task: Task) -> list[dict[str, str]]:
    """The rules, the examples, the problem."""
    found = [{"role": "system", "content": RULES}]
    for numbers, target, solution in EXAMPLES:
        found += [{"role": "user", "content": question(numbers, target)}, {"role": "assistant", "content": solution}]
    return [*found, {"role": "user", "content": str(task.instruction)}]


@rollout
async def answer(task: Task, config: AgentConfig) -> str:
    return str((await chat(config, messages(task))).output)


@evaluator
def score(task: Task, episode: Episode) -> float:
    return countdown(episode.answer, task.metadata["numbers"], task.metadata["target"], partial=PARTIAL)


def reference(task: Task) -> str:
    return str(task.metadata["expression"])


def train(config: Config) -> list[Task]:
    return problems()[HELD_OUT:]


def held_out(config: Config) -> list[Task]:
    return problems()[:HELD_OUT]


def problems() -> list[Task]:
    """Distinct problems with two or three numbers from 1 to 20, each with a solution whose value is from 1 to 100."""
    draw, made = random.Random(SEED), dict[str, Task]()
    while len(made) < TRAIN + HELD_OUT:
        numbers = [draw.randint(1, 20) for _ in range(draw.choice((2, 3)))]
        expression = str(numbers[0])
        for number in numbers[1:]:
            expression = f"{expression} {draw.choice('+-*')} {number}"
        value, _ = calculate(expression)
        if value is not None and 1 <= value <= 100:
            order = draw.sample(numbers, len(numbers))
            target, key = int(value), ",".join(map(str, sorted(numbers)))
            metadata = {"numbers": order, "target": target, "expression": expression}
            made.setdefault(f"{target}={key}", Task(f"{target}={key}", question(order, target), metadata))
    return list(made.values())
