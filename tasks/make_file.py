"""make_file: create a file with a given name and text. For agents with tools: what counts is what is on the disk.

It has no agent of its own: a harness acts, `bash` unless another is named, as in ``--harness mini-swe-agent``. A right
file scores 1, one with other white space 0.5. Up to 0.04 is for letters and digits in what the model said last, so that
a model which has never made a file has something to learn from.
"""

from __future__ import annotations

from minirllm import Config, Episode, Task, evaluator

DEFAULTS = {"harness": "bash", "steps": 20, "batch_size": 4, "group_size": 8, "max_tokens": 128, "eval_tasks": 16}
WORDS = ("amber", "birch", "cedar", "delta", "ember", "flint", "grove", "hazel", "ivory", "jolly")


@evaluator
async def score(task: Task, episode: Episode) -> float:
    text = episode.artifacts.get("files", {}).get(task.metadata["name"])
    if text is not None and text.rstrip("\n") == task.metadata["text"]:
        return 1.0
    if text is not None and text.split() == task.metadata["text"].split():
        return 0.5
    said = episode.answer
    return 0.04 * sum(letter.isascii() and letter.isalnum() for letter in said) / max(1, len(said))


def reference(task: Task) -> str:
    return str(task.metadata["text"])


def problems(first: str, count: int) -> list[Task]:
    made = []
    for number in range(count):
        name, text = f"{WORDS[number % 10]}.txt", f"{first} {WORDS[number // 10 % 10]} {number}"
        instruction = f"Create the file {name} in the current folder. Its only line is: {text}"
        made.append(Task(f"{first}-{number}", instruction, {"name": name, "text": text}))
    return made


def train(config: Config) -> list[Task]:
    return problems("train", 64)


def held_out(config: Config) -> list[Task]:
    return problems("held-out", 32)
