"""The token tree: every token of a session once, and the flat forest that training consumes.

Owns: TokenTree (capture), Forest (flat arrays), merge, concatenate, unfold. Does not know: text, rewards, torch.

A call is a prompt and the tokens sampled after it. Prompts share their common prefixes; a sampled token is stored where
it was sampled, once, and is never merged with another sample, even of equal ids. A prompt enters sampled nodes only
along the call it continues (`after`), so the shape of a tree does not depend on the order in which parallel calls end.

Legend: T tokens of a forest, N its nodes. Value t of every array is about token t; the logits that score token t are
those at `parent_T[t]`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np

from minirllm.types import Completion

R = TypeVar("R")
B = TypeVar("B")
ROOT = -1  # the parent of a first token, and of a node that holds one
_SAMPLED = ("logprobs", "temperature", "weight_version", "call_id", "aborted")  # fields that only sampled nodes have
_UNTRAINED = {
    "trained_T": False, "logprob_T": 0, "advantage_T": 0, "weight_T": 0, "sequence_T": -1, "role_T": 0, "target_T": -1,
    "temperature_T": 1,
}  # fmt: skip


@dataclass(slots=True)
class Node:
    """A run of tokens, all of a prompt or all of one sample. Sampled ones have as many `logprobs`, others none."""

    parent: int
    tokens: list[int]
    sampled: bool = False
    logprobs: list[float] = field(default_factory=list)  # natural log, of what was sampled from (after temperature)
    temperature: float = 1.0
    weight_version: int = 0
    call_id: str = ""
    aborted: bool = False  # the client went away: kept as it was, never trained
    children: list[int] = field(default_factory=list)  # ascending


@dataclass
class TokenTree:
    """Append-only. A node index stays valid and keeps naming the same *last* token, even when its node is split.

    A sample of no tokens (aborted at once) is an empty node and never gets children.
    """

    nodes: list[Node] = field(default_factory=list)
    roots: list[int] = field(default_factory=list)

    def add(self, prompt_ids: Sequence[int], completion: Completion, call_id: str, after: int | None = None) -> int:
        """Store one call; returns the node that ends its completion.

        The prompt follows the path of `after` (the node that ended the call it continues) as far as they agree, then
        prompt nodes, then branches. ValueError for an empty prompt: its first sampled token could not be scored.
        """
        if not prompt_ids:
            raise ValueError("Expected a prompt of at least one token, got none: the first sample could not be scored.")
        assert len(completion.logprobs) == len(completion.token_ids), "one logprob per sampled token"
        at, used = ROOT, 0
        for index in self.path(after) if after is not None else ():
            tokens = self.nodes[index].tokens
            agreed = agreement(tokens, prompt_ids, used)
            used += agreed
            if agreed:
                at = index if agreed == len(tokens) else self._split(index, agreed)
            if agreed < len(tokens):
                break
        sample = Node(
            self._descend(at, prompt_ids, used),
            list(completion.token_ids),
            True,
            list(completion.logprobs),
            completion.temperature,
            completion.weight_version,
            call_id,
            completion.finish_reason == "abort",
        )
        return self._append(sample)

    def path(self, node: int) -> list[int]:
        """Node indices from the root to `node`."""
        path = []
        while node != ROOT:
            path.append(node)
            node = self.nodes[node].parent
        return path[::-1]

    def ids(self, node: int) -> list[int]:
        """All token ids from the root to the end of `node`."""
        return [token for index in self.path(node) for token in self.nodes[index].tokens]

    def completion_nodes(self, node: int) -> list[int]:
        """The nodes that hold the sample ending at `node`, first to last: one, or more once it has been split."""
        call_id, found = self.nodes[node].call_id, []
        while node != ROOT and self.nodes[node].sampled and self.nodes[node].call_id == call_id:
            found.append(node)
            node = self.nodes[node].parent
        return found[::-1]

    def prompt_ids(self, node: int) -> list[int]:
        """What the model read in the call whose completion ends at `node`."""
        return self.ids(self.nodes[self.completion_nodes(node)[0]].parent)

    def response(self, node: int) -> tuple[list[int], list[float]]:
        """(token ids, logprobs) that were sampled in the call whose completion ends at `node`."""
        nodes = [self.nodes[index] for index in self.completion_nodes(node)]
        return [token for part in nodes for token in part.tokens], [value for part in nodes for value in part.logprobs]

    @property
    def num_tokens(self) -> int:
        """Tokens stored, each once."""
        return sum(len(node.tokens) for node in self.nodes)

    @property
    def num_sampled(self) -> int:
        """Sampled tokens stored, those of aborted samples too."""
        return sum(len(node.tokens) for node in self.nodes if node.sampled)

    def children(self, node: int) -> list[int]:
        """Child indices; of ROOT, the roots."""
        return self.roots if node == ROOT else self.nodes[node].children

    def order(self) -> Iterator[int]:
        """Every node, parents first."""
        stack = self.roots[::-1]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(reversed(self.nodes[node].children))

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; `from_dict` gives back an equal tree, floats bit for bit."""
        rows = []
        for node in self.nodes:
            row: dict[str, Any] = {"parent": node.parent, "tokens": node.tokens}
            if node.sampled:
                row |= {name: getattr(node, name) for name in _SAMPLED}
            rows.append(row)
        return {"nodes": rows}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> TokenTree:
        """The inverse of `to_dict`."""
        tree = cls([Node(**row, sampled="logprobs" in row) for row in data["nodes"]])
        for index, node in enumerate(tree.nodes):
            tree.children(node.parent).append(index)
        return tree

    def _append(self, node: Node) -> int:
        self.nodes.append(node)
        self.children(node.parent).append(len(self.nodes) - 1)
        return len(self.nodes) - 1

    def _descend(self, at: int, ids: Sequence[int], used: int = 0) -> int:
        """Walk ``ids[used:]`` down from `at` through prompt nodes, adding what is missing; returns the last node."""
        while used < len(ids):
            prompts = (c for c in self.children(at) if not self.nodes[c].sampled)
            child = next((c for c in prompts if self.nodes[c].tokens[0] == ids[used]), None)
            if child is None:
                return self._append(Node(at, list(ids[used:])))
            agreed = agreement(self.nodes[child].tokens, ids, used)
            at = child if agreed == len(self.nodes[child].tokens) else self._split(child, agreed)
            used += agreed
        return at

    def _split(self, index: int, size: int) -> int:
        """Cut node `index` after `size` tokens; returns the new node holding the first part. `index` keeps the rest."""
        tail = self.nodes[index]
        assert 0 < size < len(tail.tokens)
        head = replace(tail, tokens=tail.tokens[:size], logprobs=tail.logprobs[:size], children=[index])
        self.children(tail.parent).remove(index)
        tail.parent = self._append(head)
        tail.tokens, tail.logprobs = tail.tokens[size:], tail.logprobs[size:]
        return tail.parent


def agreement(some: Sequence[Any], others: Sequence[Any], start: int = 0) -> int:
    """How many of `some` equal ``others[start:]``, from the first on."""
    window = others[start : start + len(some)]
    if list(window) == list(some):
        return len(some)
    return next((i for i, (a, b) in enumerate(zip(some, window, strict=False)) if a != b), len(window))


@dataclass
class Forest:
    """T tokens, parents before children; what the trainer reads. Token t attends to itself and its ancestors only.

    A node is a longest run of tokens without a branch: a conversation that only grows is one node. `advantage_T`,
    `weight_T` (the token's share of the loss) and what follows below are empty until `batch` fills them.
    `targets` are a teacher's K most likely tokens in the place of each trained one, in order: (ids, logprobs), [., K].
    """

    token_T: np.ndarray  # int64
    parent_T: np.ndarray  # int64, ROOT for a first token
    position_T: np.ndarray  # int64, distance from the root
    trained_T: np.ndarray  # bool: sampled, not aborted, wanted
    logprob_T: np.ndarray  # float32, as captured; 0 where not trained
    advantage_T: np.ndarray  # float32
    weight_T: np.ndarray  # float32
    sequence_T: np.ndarray  # int64: which trajectory of its batch, -1 where not trained
    role_T: np.ndarray  # int64: whose algorithm that has, 0 where not trained
    target_T: np.ndarray  # int64: the row of its teacher's distribution in the batch, -1 where there is none
    temperature_T: np.ndarray  # float32, 1 where not trained
    node_start_N: np.ndarray  # int64
    node_end_N: np.ndarray  # int64
    node_parent_N: np.ndarray  # int64, ROOT for the first node of a tree
    targets: tuple[np.ndarray, np.ndarray] | None = field(default=None, init=False)

    def __len__(self) -> int:
        return len(self.token_T)

    def paths(self) -> list[list[tuple[int, int]]]:
        """For each node, the token spans from its root to itself: what `attention.ForestLayout` takes."""
        paths: list[list[tuple[int, int]]] = []
        columns = (self.node_start_N.tolist(), self.node_end_N.tolist(), self.node_parent_N.tolist())
        for start, end, parent in zip(*columns, strict=True):
            paths.append([*(paths[parent] if parent != ROOT else []), (start, end)])
        return paths


Spans = dict[int, tuple[int, int]]  # node of a tree -> its tokens in the forest, start and end


def merge(trees: Sequence[TokenTree], calls: Sequence[Collection[str]] | None = None) -> tuple[Forest, list[Spans]]:
    """One forest of one task's rollouts: prompts shared as far as they agree, samples never.

    `calls[k]` limits what is trained in tree k to these call ids (default: all). Aborted samples are not trained, and
    what no trained token descends from is left out. Also returns, per tree, where each trained node lies. The result
    is a function of the trees' contents, not of the order in which calls were added.
    """
    merged, source = TokenTree(), dict[int, tuple[int, int]]()
    trained: set[int] = set()
    for k, tree in enumerate(trees):
        wanted = [i for i, node in enumerate(tree.nodes) if node.sampled and not node.aborted and node.tokens]
        wanted = [i for i in wanted if calls is None or tree.nodes[i].call_id in calls[k]]
        kept = {index for i in wanted for index in tree.path(i)}
        place = {ROOT: ROOT}  # node of the tree -> node of `merged` with the same last token
        for index in tree.order():
            if index not in kept:
                continue
            node = tree.nodes[index]
            if node.sampled:
                place[index] = merged._append(replace(node, parent=place[node.parent], children=[]))
                source[place[index]] = (k, index)
            else:
                place[index] = merged._descend(place[node.parent], node.tokens)
        trained.update(place[i] for i in wanted)
    return _flatten(merged, source, trained, len(trees))


def _flatten(merged: TokenTree, source: Spans, trained: set[int], count: int) -> tuple[Forest, list[Spans]]:
    """Lay `merged` out depth first, siblings ordered by content. `source`: its sampled nodes -> (tree, node there)."""
    columns: dict[str, list[np.ndarray]] = {name: [] for name in _DTYPES}
    starts, ends, parents = list[int](), list[int](), list[int]()
    spans: list[Spans] = [{} for _ in range(count)]

    def rank(index: int) -> tuple[int, list[int], str]:
        return source.get(index, (-1, -1))[0], merged.nodes[index].tokens, merged.nodes[index].call_id

    total = 0
    stack = [(index, ROOT, 0, ROOT) for index in sorted(merged.roots, key=rank, reverse=True)]
    while stack:
        index, last, depth, segment = stack.pop()  # the token and the forest node it hangs on, and its position
        node, size, end = merged.nodes[index], len(merged.nodes[index].tokens), total + len(merged.nodes[index].tokens)
        if segment != ROOT and len(merged.nodes[node.parent].children) == 1:
            ends[segment] = end  # an only child continues its parent's run
        else:
            starts.append(total)
            ends.append(end)
            parents.append(segment)
            segment = len(starts) - 1
        values: dict[str, Sequence[float]] = {name: [neutral] * size for name, neutral in _UNTRAINED.items()}
        values |= {"token_T": node.tokens, "parent_T": [last, *range(total, end - 1)]}
        values["position_T"] = range(depth, depth + size)
        if index in trained:
            values |= {"trained_T": [True] * size, "logprob_T": node.logprobs}
            values["temperature_T"] = [node.temperature] * size
            tree, at = source[index]
            spans[tree][at] = (total, end)
        for name, column in columns.items():
            column.append(np.array(values[name], _DTYPES[name]))
        stack.extend((child, end - 1, depth + size, segment) for child in sorted(node.children, key=rank, reverse=True))
        total = end
    arrays = {name: np.concatenate([np.empty(0, _DTYPES[name]), *column]) for name, column in columns.items()}
    return Forest(**arrays, **_nodes(starts, ends, parents)), spans


_DTYPES: dict[str, type] = {
    **dict.fromkeys(("token_T", "parent_T", "position_T", "sequence_T", "role_T", "target_T"), np.int64),
    "trained_T": np.bool_,
    **dict.fromkeys(("logprob_T", "advantage_T", "weight_T", "temperature_T"), np.float32),
}


def _nodes(starts: Sequence[int], ends: Sequence[int], parents: Sequence[int]) -> dict[str, np.ndarray]:
    named = {"node_start_N": starts, "node_end_N": ends, "node_parent_N": parents}
    return {name: np.array(values, np.int64) for name, values in named.items()}


def shares(rollouts: Sequence[R], built: Callable[[Sequence[R]], B], size: Callable[[B], int], limit: int) -> list[B]:
    """What is built of one task's rollouts: of all together, or of the fewest even shares of them that have at most
    `limit` tokens each. A share repeats the prompt. A single rollout that is larger stays whole."""
    found = [built(rollouts)]
    count = -(-size(found[0]) // limit)
    while len(found) < len(rollouts) and max(map(size, found)) > limit:
        edges = np.linspace(0, len(rollouts), min(count, len(rollouts)) + 1).astype(int).tolist()
        found = [built(rollouts[a:b]) for a, b in pairwise(edges)]
        count += 1
    return found


def concatenate(forests: Sequence[Forest]) -> Forest:
    """Forests side by side in one. None gives an empty forest."""
    arrays = {
        name: np.concatenate([np.empty(0, dtype), *(getattr(forest, name) for forest in forests)])
        for name, dtype in _DTYPES.items()
    }
    starts, ends, parents, linked = list[int](), list[int](), list[int](), [np.empty(0, np.int64)]
    total = 0
    for forest in forests:
        linked.append(np.where(forest.parent_T == ROOT, ROOT, forest.parent_T + total))
        parents.extend(ROOT if p == ROOT else p + len(starts) for p in forest.node_parent_N.tolist())
        starts.extend((forest.node_start_N + total).tolist())
        ends.extend((forest.node_end_N + total).tolist())
        total += len(forest)
    arrays["parent_T"] = np.concatenate(linked)
    return Forest(**arrays, **_nodes(starts, ends, parents))


def unfold(forest: Forest) -> list[Forest]:
    """One forest per root-to-leaf path, for models that need plain sequences. Each trained token is trained in one."""
    inner = set(forest.node_parent_N.tolist())
    taken_T = np.zeros(len(forest), np.bool_)
    rows = []
    for node, path in enumerate(forest.paths()):
        if node in inner:
            continue
        index_L = np.concatenate([np.arange(start, end) for start, end in path])
        arrays = {name: getattr(forest, name)[index_L] for name in _DTYPES}
        repeated_L = taken_T[index_L]
        for name, neutral in _UNTRAINED.items():
            arrays[name][repeated_L] = neutral
        arrays["parent_T"] = np.arange(-1, len(index_L) - 1)
        taken_T[index_L] = True
        rows.append(Forest(**arrays, **_nodes([0], [len(index_L)], [ROOT])))
    return rows
