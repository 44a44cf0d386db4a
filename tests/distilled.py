"""A tiny student, another tiny model, and what the student said, for tests of teachers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from minirllm import Task, stack
from minirllm.config import Config
from minirllm.models import tiny
from minirllm.policy import Policy
from minirllm.renderer import Renderer
from minirllm.teachers import teacher
from minirllm.tree import TokenTree, merge
from minirllm.types import Completion, Episode, Message, Step, Trajectory

DISTILL: dict[str, Any] = {"model": "tiny", "algorithm": "distill", "teacher": "base", "threads": 1, "lora_rank": 4}
ASKED = [Message("user", "hi")]


@pytest.fixture(scope="module")
def student() -> Iterator[tuple[Policy, Renderer]]:
    """A tiny model whose adapter is busy, so that it differs from its base."""
    _, policy, _, renderer = stack.load(Config(**DISTILL))
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in policy.trainable().items():
            if ".lora_B." in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.05)
    yield policy, renderer
    policy.close()


@pytest.fixture(scope="module")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a model with other weights than `tiny`."""
    folder = tmp_path_factory.mktemp("models") / "other"
    model, tokenizer = tiny.build(seed=5)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def said(policy: Policy, renderer: Renderer, *answers: list[int], task: Task | None = None) -> list[Episode]:
    """Rollouts of a call each, with these answers, log-probabilities as captured."""
    episodes, prompt = [], renderer.prompt(ASKED)
    for index, answer in enumerate(answers):
        probe = TokenTree()
        probe.add(prompt, Completion(answer, [0.0] * len(answer), "stop", 0), "c")
        forest = merge([probe])[0]
        logprobs = policy.score(forest)[0].detach().numpy()[forest.trained_T].tolist()
        tree = TokenTree()
        node = tree.add(prompt, Completion(answer, logprobs, "stop", 0), f"c{index}")
        lengths = {"prompt_length": len(prompt), "response_length": len(answer)}
        step = Step(f"c{index}", node=node, messages=ASKED, response=Message("assistant", "x"), **lengths)
        row = {"task": task or Task("t"), "task_id": "t", "rollout_idx": index, "reward": 0.0, "tree": tree}
        episodes.append(Episode(f"t:{index}", trajectories=[Trajectory(steps=[step])], **row))
    return episodes


def alone(model: Any, prompt: list[int], answer: list[int]) -> torch.Tensor:
    """All log-probabilities ``[A, V]`` of one sequence by transformers' own attention."""
    model.set_attn_implementation("eager")
    with torch.no_grad():
        rows = torch.log_softmax(model(input_ids=torch.tensor([prompt + answer]), use_cache=False).logits[0], -1)
    return rows[len(prompt) - 1 : -1]


def steps(episodes: list[Episode]) -> list[Step]:
    return [step for episode in episodes for step in episode.steps]


def thought(episodes: list[Episode]) -> Any:
    """What the teacher thinks of the one answer's tokens, by its advantages."""
    (step,) = steps(episodes)
    return np.array(step.advantage) + episodes[0].tree.response(step.node)[1]


async def taught(student: tuple[Policy, Renderer], episodes: list[Episode], **options: Any) -> dict[str, float]:
    async with teacher.opened(Config(**{**DISTILL, **options}), *student) as found:
        return await found.teach(episodes)
