"""python_function: write a small Python function. It is called in a sandbox, its results are compared outside.

The reward is 1 when every call gives what is expected, else half the share of the calls that do. A pattern for
HumanEval, MBPP and EvalPlus: what `minirllm.rewards.code` takes stands in the task's metadata.
"""

from __future__ import annotations

from typing import Any

from minirllm import AgentConfig, Config, Episode, EvalOutput, Task, evaluator, rollout
from minirllm.client import chat
from minirllm.rewards.code import code

DEFAULTS = {"model": "smollm2-135m", "steps": 40, "batch_size": 6, "group_size": 8, "max_tokens": 96, "eval_tasks": 3}
PROBLEMS: dict[str, tuple[str, str, list[list[Any]]]] = {  # signature -> (what it does, a body, calls)
    "add(a, b)": ("returns the sum of a and b", "a + b", [[[1, 2], 3], [[-4, 4], 0], [[2.5, 1], 3.5]]),
    "double(x)": ("returns twice x", "2 * x", [[[3], 6], [[0], 0], [["ab"], "abab"]]),
    "largest(items)": ("returns the largest item of a list", "max(items)", [[[[3, 9, 2]], 9], [[[-5]], -5]]),
    "is_even(n)": ("tells whether n is even", "n % 2 == 0", [[[4], True], [[7], False], [[0], True]]),
    "backwards(text)": ("returns the text from its end to its beginning", "text[::-1]", [[["abc"], "cba"], [[""], ""]]),
    "count(text, letter)": (
        "returns how often a letter stands in a text", "text.count(letter)", [[["banana", "a"], 3], [["xyz", "a"], 0]],
    ),
    "evens(items)": (
        "returns the even numbers of a list, in order", "[n for n in items if n % 2 == 0]",
        [[[[1, 2, 3, 4]], [2, 4]], [[[1]], []]],
    ),
    "initials(name)": (
        "returns the first letters of the words of a name", "''.join(word[0] for word in name.split())",
        [[["Ada King Lovelace"], "AKL"], [["Bo"], "B"]],
    ),
    "clamp(x, low, high)": (
        "returns x, or the nearer of low and high when x lies outside", "max(low, min(x, high))",
        [[[5, 1, 3], 3], [[0, 1, 3], 1], [[2, 1, 3], 2]],
    ),
}  # fmt: skip


@rollout
async def answer(task: Task, config: AgentConfig) -> str:
    reply = await chat(config, [{"role": "user", "content": task.instruction}])
    return str(reply.output)


@evaluator
async def score(task: Task, episode: Episode) -> EvalOutput:
    verdict = await code(episode.answer, {name: task.metadata[name] for name in ("function", "calls")}, partial=True)
    verdict.reward = 1.0 if verdict.is_correct else 0.5 * (verdict.reward or 0.0)
    return verdict


def reference(task: Task) -> str:
    return f"```python\ndef {task.metadata['signature']}:\n    return {task.metadata['body']}\n```"


def tasks() -> list[Task]:
    made = []
    for signature, (does, body, calls) in PROBLEMS.items():
        name = signature.partition("(")[0]
        instruction = f"Write a Python function {signature} that {does}. Answer with the code only."
        made.append(Task(name, instruction, {"function": name, "signature": signature, "body": body, "calls": calls}))
    return made


def train(config: Config) -> list[Task]:
    return tasks()[:6]


def held_out(config: Config) -> list[Task]:
    return tasks()[6:]
