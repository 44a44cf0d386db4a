"""Algorithms of the user's own: what is wrong with one is said in a sentence that names it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from minirllm import flow, train
from minirllm.algorithms import Tokens, create, roles
from minirllm.algorithms.grpo import GRPO
from minirllm.algorithms.objective import loss
from minirllm.config import Config
from minirllm.errors import ConfigError, TaskError, UserError

HERE = __name__
SAID = "a loss and a dict of metrics were to be returned, got"
SHAPE = r"must be a tensor of the shape \(3,\), a value for a token, got"


class Right(GRPO):
    def loss(self, tokens: Tokens, config: Config) -> Any:
        return -tokens.advantage_N * tokens.logprob_N, {"mine": tokens.logprob_N}


class Raises(GRPO):
    def loss(self, tokens: Tokens, config: Config) -> Any:
        raise KeyError("gone")


class Nothing(GRPO):
    def loss(self, tokens: Tokens, config: Config) -> Any:
        return None


class Bare(GRPO):
    def loss(self, tokens: Tokens, config: Config) -> Any:
        return tokens.logprob_N


class Scalar(GRPO):
    def loss(self, tokens: Tokens, config: Config) -> Any:
        return tokens.logprob_N.mean(), {}


class Numbers(GRPO):
    def loss(self, tokens: Tokens, config: Config) -> Any:
        return tokens.logprob_N.detach().numpy(), {}


class Detached(GRPO):
    def loss(self, tokens: Tokens, config: Config) -> Any:
        return tokens.logprob_N.detach(), {}


class Metric(GRPO):
    def loss(self, tokens: Tokens, config: Config) -> Any:
        return tokens.logprob_N, {"mine": 1.0}


class Mean(GRPO):
    def loss(self, tokens: Tokens, config: Config) -> Any:
        return tokens.logprob_N, {"mine": tokens.logprob_N.mean()}


class Refuses(GRPO):
    def validate(self, config: Config) -> None:
        raise KeyError("gone")


class Asks(GRPO):
    def __init__(self, more: int):
        pass


def tokens() -> Tokens:
    now_N, zero_N = torch.tensor([-1.0, -2.0, -3.0], requires_grad=True), torch.zeros(3, dtype=torch.int64)
    return Tokens(now_N, now_N.detach(), torch.ones(3), zero_N, zero_N)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Raises", r"KeyError: 'gone' \(test_own\.py line \d+\)"),
        ("Nothing", f"{SAID} None"),
        ("Bare", rf"{SAID} one of \(3,\)"),
        ("Numbers", f"{SAID} "),
        ("Scalar", rf"its loss {SHAPE} one of \(\)"),
        ("Metric", rf"its metric 'mine' {SHAPE} 1\.0"),
        ("Mean", rf"its metric 'mine' {SHAPE} one of \(\)"),
        ("Detached", "its loss has no gradient, so nothing would be learned: make it of tokens.logprob_N"),
    ],
)
def test_a_loss_that_is_none_is_named(name: str, words: str) -> None:
    for options in ({"algorithm": f"{HERE}:{name}"}, {"roles": f"solver={HERE}:{name}"}):
        config = Config(**options)
        algorithm = roles.of(config).all[1] if config.roles else create(config.algorithm)
        with pytest.raises(TaskError, match=f"^loss of algorithm {HERE}:{name}: {words}"):
            loss(algorithm, tokens(), config)


def test_one_that_is_right_is_left_alone() -> None:
    loss_N, metrics = create(f"{HERE}:Right").loss(tokens(), Config())
    assert loss_N.tolist() == [1, 2, 3]
    assert not metrics["mine"].requires_grad, "a metric that keeps the graph would keep its memory"
    with torch.no_grad():  # nothing is learned, nothing has a gradient
        assert create(f"{HERE}:Right").loss(tokens(), Config())[0].tolist() == [1, 2, 3]


def test_one_that_cannot_be_made_or_asked_is_named() -> None:
    with pytest.raises(ConfigError, match=f"^algorithm {HERE}:Asks: TypeError: .*missing 1 required"):
        create(f"{HERE}:Asks")
    with pytest.raises(ConfigError, match=f"^validate of algorithm {HERE}:Refuses: KeyError: 'gone'"):
        create(f"{HERE}:Refuses").validate(Config())


SEEN: list[str] = []


def until_the_second_step(episode: Any, trajectory: Any) -> str:
    SEEN.append(episode.task_id)
    assert len(set(SEEN)) <= 4, "a step has four tasks"
    return str(episode.task_id)


def test_what_was_learned_before_a_function_of_the_users_failed_is_saved(tmp_path: Path) -> None:
    task = flow.load_task("smoke")
    own = {"group_by": f"{HERE}:until_the_second_step", "runs_dir": str(tmp_path), "run": "r", "eval_tasks": 0}
    config = Config(**{**task.defaults, **own})
    words = r"^group_by .*a step has four tasks.* Nothing was learned from step 2: it is sampled; when this is mended, "
    with pytest.raises(UserError, match=words):
        asyncio.run(train.train(task, config, quiet=True))
    assert [path.name for path in (tmp_path / "r" / "checkpoints").glob("step_*")] == ["step_000001"]
