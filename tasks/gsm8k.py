"""gsm8k: grade-school word problems (Cobbe et al. 2021, arXiv:2110.14168), from the hub or from ``--data rows.jsonl``.

The reward is 1 when the last ``#### x``, ``\\boxed{x}`` or number of the answer equals the dataset's, else 0. Rows are
objects with ``question`` and ``answer``, the answer ending in ``#### x``. Of a file, every fifth row is held out; on
the hub, the ``test`` split is.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from minirllm import AgentConfig, Config, Episode, Task, evaluator, rollout
from minirllm.client import chat
from minirllm.errors import TaskError
from minirllm.rewards.exact import final_number, number

DATASET = "openai/gsm8k"
DATA_REVISION = "e53f048856ff4f594e959d75785d2c2d37b678ee"  # of the dataset; 7,473 rows to train on, 1,319 to test
DEFAULTS = {
    "steps": 100, "batch_size": 16, "group_size": 8, "lr": 1e-4, "max_tokens": 320, "max_context": 1024,
    "eval_every": 20, "eval_tasks": 64, "save_every": 20,
}  # fmt: skip
INSTRUCTION = "Solve the problem step by step. End with the answer alone on a line, as #### and the number."
EXAMPLE = (
    "Tom has 3 boxes with 4 pens each and gives away 5 pens. How many pens has he left?",
    "He has 3 * 4 = 12 pens. After giving away 5 he has 12 - 5 = 7.\n#### 7",
)


@rollout
async def answer(task: Task, config: AgentConfig) -> str:
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": INSTRUCTION},
        {"role": "user", "content": EXAMPLE[0]},
        {"role": "assistant", "content": EXAMPLE[1]},
        {"role": "user", "content": task.instruction},
    ]
    return str((await chat(config, messages)).output)


@evaluator
def score(task: Task, episode: Episode) -> float:
    return number(episode.answer, task.metadata["answer"])


def reference(task: Task) -> str:
    return f"So it is {task.metadata['answer']}.\n#### {task.metadata['answer']}"


def train(config: Config) -> list[Task]:
    if config.data:
        return [task for i, task in enumerate(read(config.data)) if i % 5]
    return download("train")


def held_out(config: Config) -> list[Task]:
    if config.data:
        return read(config.data)[::5]
    return download("test")


def download(split: str) -> list[Task]:
    try:
        load_dataset = importlib.import_module("datasets").load_dataset  # slow, and graders import this file too
        rows = load_dataset(DATASET, "main", split=split, revision=DATA_REVISION)
    except (OSError, ValueError) as error:  # no network, or a cache without it
        reason = " ".join(str(error).split())[:200].removesuffix(".")
        raise TaskError(f"Cannot load {DATASET} ({reason}). Without a network use --data rows.jsonl.") from error
    return to_tasks(rows, split)


def read(path: str) -> list[Task]:
    """The rows of a JSON-lines file. Raises TaskError naming the line that is wrong."""
    rows = []
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise TaskError(f"Cannot read --data {path}: {error}.") from error
    for n, line in enumerate(lines, 1):
        try:
            rows += [json.loads(line)] if line.strip() else []
        except json.JSONDecodeError as error:
            raise TaskError(f"{path} line {n} is not JSON: {error}.") from error
    return to_tasks(rows, Path(path).stem)


def to_tasks(rows: Iterable[Any], name: str) -> list[Task]:
    tasks = []
    for i, row in enumerate(rows):
        if not isinstance(row, Mapping) or not all(isinstance(row.get(key), str) for key in ("question", "answer")):
            raise TaskError(f"{name}: row {i} needs the texts 'question' and 'answer', got {str(row)[:100]}.")
        final = final_number(row["answer"])
        if final is None:
            raise TaskError(f"{name}: the answer of row {i} has no number: {row['answer'][-50:]!r}.")
        tasks.append(Task(f"{name}-{i}", row["question"], {"answer": final.replace(",", "")}))
    return tasks
