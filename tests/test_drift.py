"""Drift, which must be 0: what agents are sent is what the recorded tokens say, and those are the sampled ones.

Each fault is put in by hand, to show that the counter counts.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from minirllm import batch
from minirllm.algorithms import create
from minirllm.config import Config
from minirllm.errors import LedgerError
from minirllm.evaluate import summarise
from minirllm.log import explain
from minirllm.renderer import Renderer, Stream
from minirllm.types import Completion, Delta, Message, ModelRequest, SamplingParams
from tests.fake_engine import CALL, RENDERER, TOOL, FakeEngine, ask, chat, session
from tests.test_batch import episode


class Wrong(Stream):
    """Sends the letter a for the letter e, or, of its calls, other arguments."""

    def push(self, id: int) -> Delta:
        delta = super().push(id)
        calls = tuple(replace(call, arguments=call.arguments.replace("1", "2")) for call in delta.calls)
        return replace(delta, text=delta.text.replace("e", "a"), calls=calls)


class OtherWords(Renderer):
    """Reads some answers otherwise at one go than piece by piece."""

    def parse(self, ids: Sequence[int], *args: Any, **kwargs: Any) -> Message:
        message = super().parse(ids, *args, **kwargs)
        return replace(message, content=message.content.replace("one", "two"))

    def stream(self, *args: Any, **kwargs: Any) -> Stream:
        return Wrong(self, super().stream(*args, **kwargs)._reader)


class OtherTokens(FakeEngine):
    """Reports another logprob than it gives with the whole completion."""

    async def generate(self, *args: Any, on_token: Any = None, **kwargs: Any) -> Completion:
        return await super().generate(
            *args, **kwargs, on_token=lambda token: on_token(replace(token, logprob=token.logprob / 2))
        )


@pytest.mark.parametrize(
    ("says", "drift"), [("a yes", 1), ("a no", 0), ("one", 1), (CALL, 1), (CALL.replace("1", "3"), 0)]
)
async def test_text_that_is_not_what_its_tokens_say_is_drift(says: str, drift: int) -> None:
    for renderer, expected in ((RENDERER, 0), (OtherWords(RENDERER.tokenizer), drift)):
        s = session(FakeEngine(lambda prompt, seed: says), renderer=renderer)
        await ask(s, chat("a", tools=[TOOL]))
        assert s.counters["drift"] == expected


async def test_tokens_that_are_not_the_sampled_ones_are_drift() -> None:
    s = session(OtherTokens())
    await ask(s, chat("a", n=3))
    assert s.counters["drift"] == 3


@pytest.mark.parametrize("raw", [False, True])
async def test_no_tokens_drift(raw: bool) -> None:
    chance, broken = random.Random(4), '<tool_call>{"name": "add", "arguments": {"a": 1}'
    pieces = [CALL, broken, "<think>", "</think>", "é", "\U0001f600", " ", "\n", "stop", "<|im_start|>", "<tool_call>"]
    s = session(FakeEngine(lambda prompt, seed: "".join(chance.choices(pieces, k=8))), max_calls=10_000)
    params = SamplingParams(stop=("stop",))
    for turn in range(200):
        request = chat(f"{turn}", tools=[TOOL] * (turn % 2), params=params, asked=frozenset({"stop"}))
        await ask(s, ModelRequest(prompt=f"{turn}", params=params) if raw else request)
    assert s.counters["drift"] == 0
    assert s.counters["malformed_tool_calls"] > 0 or raw


def test_the_step_says_so() -> None:
    row = {"step": 1, "drift": 2.0, "groups": 1, "groups_with_signal": 1}
    assert " | drift in 2 calls: their text, as sent, is not what their tokens say" in explain(row, 3)
    assert " | drift in 3 calls" in explain({**row, "eval_drift": 1.0}, 3)
    assert "drift" not in explain({**row, "drift": 0.0}, 3)
    drifted = [episode("a", index, float(index), metrics={"drift": 1.0}) for index in range(2)]
    assert batch.build(drifted, Config(), create("grpo"), 0).metrics["drift"] == 2
    evaluated = summarise(drifted, 2)
    assert evaluated.metrics()["eval_drift"] == 2
    assert "drift in 2 calls" in str(evaluated)
    assert "drift" not in str(summarise([episode("a", 0, 1.0)], 1))


@pytest.mark.parametrize("name", ["token_T", "logprob_T"])
def test_a_batch_of_other_tokens_than_the_sampled_ones_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    merge = batch.merge

    def wrong(*args: Any) -> Any:
        forest, spans = merge(*args)
        getattr(forest, name)[np.flatnonzero(forest.trained_T)[1]] += 1
        return forest, spans

    monkeypatch.setattr(batch, "merge", wrong)
    why = "Episode a:0, call a-0-0, token at position 5: what is to be trained is not what was sampled"
    with pytest.raises(LedgerError, match=why):
        batch.build([episode("a", 0, 1.0), episode("a", 1, 0.0)], Config(), create("grpo"), 0)
