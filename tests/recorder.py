"""What an engine served, written down beside what a session stores, and what must hold of the session's tree.

Owns: `Recorder` and the checks of a tree. Does not know: any test.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from minirllm.errors import EngineError
from minirllm.session import Session
from minirllm.tree import TokenTree
from minirllm.types import Completion, SamplingParams

Sampled = tuple[tuple[int, ...], tuple[int, ...], tuple[float, ...]]  # prompt, token ids, logprobs


@dataclass(eq=False)
class Served:
    """One call as the engine saw it."""

    prompt: list[int]
    seed: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    end: str = "running"

    @property
    def sampled(self) -> Sampled:
        return tuple(self.prompt), tuple(self.tokens), tuple(self.logprobs)


class Recorder:
    """One session's view of an engine that several share; writes down what was asked and what was said."""

    def __init__(self, engine: Any):
        self.engine, self.max_context, self.vocab_size = engine, engine.max_context, engine.vocab_size
        self.served: list[Served] = []

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    def weights_changed(self) -> None: ...

    async def generate(
        self, prompt_ids: Sequence[int], params: SamplingParams, seed: int, *, stop: Any = None, on_token: Any = None,
        weights: int | None = None,
    ) -> Completion:  # fmt: skip
        one = Served(list(prompt_ids), seed)
        self.served.append(one)

        def heard(token: Any) -> None:
            one.tokens.append(token.id)
            one.logprobs.append(token.logprob)
            on_token(token)

        try:
            completion: Completion = await self.engine.generate(
                prompt_ids, params, seed, stop=stop, on_token=heard, weights=weights
            )
        except asyncio.CancelledError:
            one.end = "cancelled"
            raise
        except EngineError:
            one.end = "failed"
            raise
        one.end = "finished"
        assert (completion.token_ids, completion.logprobs) == (one.tokens, one.logprobs)
        return completion


def samples(tree: TokenTree) -> Counter[Sampled]:
    """What a tree says was sampled: once for each sample, finished or cut off."""
    found: Counter[Sampled] = Counter()
    for end in ends(tree):
        ids, logprobs = tree.response(end)
        found[tuple(tree.prompt_ids(end)), tuple(ids), tuple(logprobs)] += 1
    return found


def ends(tree: TokenTree) -> Iterator[int]:
    """The last node of each sample: those that their own sample does not go on behind."""
    goes_on = {node.parent for node in tree.nodes if node.sampled and node.call_id == tree.nodes[node.parent].call_id}
    return (index for index, node in enumerate(tree.nodes) if node.sampled and index not in goes_on)


def check_tree(session: Session) -> None:
    """Each distinct token is there once, and a branch holds the calls of its own conversation only."""
    tree, steps = session.tree, {step.id: step for step in session.steps}
    assert len(steps) == len(session.steps)
    owner = {index: end for end in ends(tree) for index in tree.completion_nodes(end)}
    seen: dict[tuple[int, int, int], int] = {}  # (the token before, id, its sample) -> a number for this token
    for end in owner.values():
        before = -1
        for index in tree.path(end):
            for id in tree.nodes[index].tokens:
                before = seen.setdefault((before, id, owner.get(index, -1)), len(seen))
    assert tree.num_tokens == len(seen), "tree size = distinct tokens"
    assert all(tree.nodes[c].parent == index for index, node in enumerate(tree.nodes) for c in node.children)
    by_node = {step.node: step for step in session.steps}
    for end in set(owner.values()):
        above = [i for i in tree.path(end) if tree.nodes[i].sampled and owner[i] != end]
        step = by_node.get(end)
        assert (step is None) == tree.nodes[end].aborted
        if step is not None:
            assert step.prompt_length == len(tree.prompt_ids(end))
        parent = step.parent if step is not None else tree.nodes[above[-1]].call_id if above else None
        line = set()
        if step is not None and parent is not None:  # all that the two have in common is stored once
            if not step.messages:
                assert tree.ids(steps[parent].node) == tree.prompt_ids(end)[: len(tree.ids(steps[parent].node))]
            both = zip(tree.prompt_ids(end), tree.ids(steps[parent].node), strict=False)
            agreed = len(list(takewhile(lambda pair: pair[0] == pair[1], both)))
            common = set(tree.path(end)) & set(tree.path(steps[parent].node))
            assert sum(len(tree.nodes[index].tokens) for index in common) >= agreed
        while parent is not None:
            line.add(parent)
            parent = steps[parent].parent
        assert {tree.nodes[index].call_id for index in above} <= line, "no crossed branches"
