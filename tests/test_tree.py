"""The token tree keeps every token once and exactly; the forest is a faithful flat form of it."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minirllm.tree import ROOT, Forest, TokenTree, concatenate, merge, unfold
from minirllm.types import Completion


def completion(ids: list[int], finish: str = "stop", temperature: float = 1.0) -> Completion:
    """Logprobs that name their token and place, so that a shift shows."""
    return Completion(ids, [-(10.0 * i + token) / 7 for i, token in enumerate(ids)], finish, 3, temperature)  # type: ignore[arg-type]


Call = tuple[str, list[int], int | None, list[int], str]  # id, prompt, the call it continues, sampled, finish


@st.composite
def histories(draw: st.DrawFn, size: int = 12) -> list[Call]:
    """Calls that continue, edit or ignore earlier ones, over few token values so that prefixes meet."""
    ids = st.lists(st.integers(0, 2), max_size=4)
    calls: list[Call] = []
    for k in range(draw(st.integers(1, size))):
        after = draw(st.none() | st.integers(0, k - 1)) if k else None
        if after is None:
            prompt = draw(ids)
        else:
            _, base, _, sampled, _ = calls[after]
            before = base + sampled
            kept = draw(st.integers(0, len(before)) | st.just(len(before)))
            prompt = before[:kept] + draw(ids)
        finish = draw(st.sampled_from(["stop", "stop", "length", "abort"]))
        calls.append((f"c{k}", prompt or [0], after, draw(ids if finish == "abort" else ids.filter(bool)), finish))
    return calls


def build(calls: list[Call]) -> tuple[TokenTree, list[int]]:
    tree, nodes = TokenTree(), []
    for call_id, prompt, after, sampled, finish in calls:
        nodes.append(tree.add(prompt, completion(sampled, finish), call_id, None if after is None else nodes[after]))
    return tree, nodes


def naive_size(calls: list[Call]) -> int:
    """The same rule with one dict per token: a sampled token's identity is its call, a prompt token's is its value."""
    ends: list[dict] = []
    trails: list[list[tuple]] = []
    root: dict = {}
    size = 0
    for call_id, prompt, after, sampled, _ in calls:
        at, used, trail = root, 0, []
        for key in trails[after] if after is not None else []:
            if used == len(prompt) or key[0] != prompt[used]:
                break
            at, used = at[key], used + 1
            trail.append(key)
        keys: list[tuple] = [(token, None) for token in prompt[used:]]
        for key in keys + [(token, (call_id, i)) for i, token in enumerate(sampled)]:
            size += key not in at
            at = at.setdefault(key, {})
            trail.append(key)
        ends.append(at)
        trails.append(trail)
    return size


@given(histories())
@settings(max_examples=80, deadline=None)
def test_every_call_reads_back_exactly(calls: list[Call]) -> None:
    tree, nodes = build(calls)
    for (_, prompt, _, sampled, _), node in zip(calls, nodes, strict=True):
        assert tree.ids(node) == prompt + sampled
        assert tree.prompt_ids(node) == prompt
        assert tree.response(node) == (sampled, completion(sampled).logprobs)
    assert tree.num_tokens == naive_size(calls)


@given(histories())
@settings(max_examples=40, deadline=None)
def test_tree_structure(calls: list[Call]) -> None:
    tree, _ = build(calls)
    assert sorted(tree.order()) == list(range(len(tree.nodes)))
    for index, node in enumerate(tree.nodes):
        assert index in tree.children(node.parent)
        assert len(node.logprobs) == (len(node.tokens) if node.sampled else 0)
        assert node.tokens or node.sampled
    for parent in [ROOT, *range(len(tree.nodes))]:
        firsts = [tree.nodes[c].tokens[0] for c in tree.children(parent) if not tree.nodes[c].sampled]
        assert len(firsts) == len(set(firsts)), "two prompt branches begin alike"


@given(histories())
@settings(max_examples=40, deadline=None)
def test_round_trip_through_json(calls: list[Call]) -> None:
    tree, _ = build(calls)
    assert TokenTree.from_dict(json.loads(json.dumps(tree.to_dict()))) == tree


def check(forest: Forest) -> None:
    """What every forest promises."""
    assert len(forest.node_start_N) == len(forest.node_end_N) == len(forest.node_parent_N)
    starts, ends = forest.node_start_N.tolist(), forest.node_end_N.tolist()
    assert starts == [0, *ends][: len(starts)], "spans tile the tokens"
    assert (ends or [0])[-1] == len(forest)
    for t in range(len(forest)):
        parent = forest.parent_T[t]
        assert parent < t
        assert forest.position_T[t] == (0 if parent == ROOT else forest.position_T[parent] + 1)
        assert not (forest.trained_T[t] and parent == ROOT)
        assert forest.trained_T[t] or forest.logprob_T[t] == 0
    for n, path in enumerate(forest.paths()):
        start, end = path[-1]
        assert (start, end) == (forest.node_start_N[n], forest.node_end_N[n])
        assert start < end
        assert forest.node_parent_N[n] < n
        index = [t for a, b in path for t in range(a, b)]
        assert forest.parent_T[index].tolist() == [ROOT, *index[:-1]], "a path is the chain of parents"
        siblings = (forest.node_parent_N == forest.node_parent_N[n]).sum()
        assert len(path) == 1 or siblings > 1, "an only child is part of its parent's run"
    assert forest.token_T.dtype == forest.parent_T.dtype == forest.node_end_N.dtype == np.int64
    assert forest.logprob_T.dtype == forest.weight_T.dtype == np.float32
    assert forest.trained_T.dtype == np.bool_


def ancestors(forest: Forest, t: int) -> list[int]:
    """Token ids from the root to token t."""
    ids = []
    while t != ROOT:
        ids.append(int(forest.token_T[t]))
        t = int(forest.parent_T[t])
    return ids[::-1]


@given(st.lists(histories(6), min_size=1, max_size=4))
@settings(max_examples=40, deadline=None)
def test_merged_forest_trains_each_sampled_token_once(many: list[list[Call]]) -> None:
    built = [build(calls) for calls in many]
    forest, spans = merge([tree for tree, _ in built])
    check(forest)
    covered = np.zeros(len(forest), bool)
    for k, ((tree, nodes), calls) in enumerate(zip(built, many, strict=True)):
        for (_, prompt, _, sampled, finish), node in zip(calls, nodes, strict=True):
            if finish == "abort":
                assert not any(part in spans[k] for part in tree.completion_nodes(node))
                continue
            index = [t for part in tree.completion_nodes(node) for t in range(*spans[k][part])]
            assert forest.token_T[index].tolist() == sampled
            assert ancestors(forest, index[-1]) == prompt + sampled
            np.testing.assert_array_equal(forest.logprob_T[index], np.float32(completion(sampled).logprobs))
            assert forest.trained_T[index].all()
            assert not covered[index].any()
            covered[index] = True
    np.testing.assert_array_equal(covered, forest.trained_T)


@given(st.lists(histories(6), min_size=1, max_size=3))
@settings(max_examples=40, deadline=None)
def test_unfolded_rows_are_plain_sequences(many: list[list[Call]]) -> None:
    forest, _ = merge([build(calls)[0] for calls in many])
    forest.weight_T[:] = np.arange(len(forest))  # names each token
    rows = unfold(forest)
    for row in rows:
        check(row)
        assert row.paths() == [[(0, len(row))]]
    trained = [int(w) for row in rows for w in row.weight_T[row.trained_T]]
    assert sorted(trained) == np.flatnonzero(forest.trained_T).tolist()
    whole = concatenate(rows)
    check(whole)
    assert whole.trained_T.sum() == forest.trained_T.sum()


def test_a_group_pays_for_its_prompt_once() -> None:
    trees = [TokenTree() for _ in range(8)]
    for k, tree in enumerate(trees):
        tree.add(list(range(300)), completion([k % 2, 5, 6]), f"c{k}")  # also samples with equal ids stay apart
    forest, spans = merge(trees)
    assert len(forest) == 300 + 8 * 3
    assert forest.node_end_N.tolist() == [300, *range(303, 325, 3)]
    assert [list(s.values()) for s in spans] == [[(300 + 3 * k, 303 + 3 * k)] for k in range(8)]
    assert forest.parent_T[[300, 303]].tolist() == [299, 299]


def test_a_conversation_that_only_grows_is_one_node() -> None:
    tree = TokenTree()
    first = tree.add([1, 2], completion([3, 4]), "a")
    tree.add([1, 2, 3, 4, 5], completion([6], temperature=0.5), "b", after=first)
    forest, spans = merge([tree])
    assert forest.token_T.tolist() == [1, 2, 3, 4, 5, 6]
    assert forest.paths() == [[(0, 6)]]
    assert forest.trained_T.tolist() == [False, False, True, True, False, True]
    assert forest.temperature_T.tolist() == [1, 1, 1, 1, 1, 0.5]
    assert spans == [{first: (2, 4), 3: (5, 6)}]


def test_a_prompt_does_not_enter_a_sample_it_does_not_continue() -> None:
    tree = TokenTree()
    tree.add([1], completion([2, 3]), "a")
    tree.add([1, 2], completion([4]), "b")
    assert tree.num_tokens == 5
    guided = TokenTree()
    first = guided.add([1], completion([2, 3]), "a")
    guided.add([1, 2], completion([4]), "b", after=first)
    assert guided.num_tokens == 4
    assert guided.response(first) == ([2, 3], completion([2, 3]).logprobs)


def test_the_order_of_parallel_calls_does_not_show_in_the_forest() -> None:
    calls = [([1, 2, 3], [7, 7], "a"), ([1, 2, 3], [7, 8], "b"), ([1, 2, 4], [9], "c"), ([1, 2], [7], "d")]
    calls += [([5], [7], "e")]
    names = ("token_T", "parent_T", "trained_T", "logprob_T", "node_start_N", "node_parent_N")
    reference = None
    for seed in range(6):
        shuffled = random.Random(seed).sample(calls, len(calls))
        tree = TokenTree()
        for prompt, sampled, call_id in shuffled:
            tree.add(prompt, completion(sampled), call_id)
        forest, _ = merge([tree, tree])
        rows = [getattr(forest, name).tolist() for name in names]
        reference = reference or rows
        assert rows == reference


def test_only_wanted_calls_are_trained_and_the_rest_is_left_out_or_context() -> None:
    tree = TokenTree()
    first = tree.add([1], completion([2, 3]), "a")
    second = tree.add([1, 2, 3, 4], completion([5]), "b", after=first)
    tree.add([1, 9], completion([8]), "c")
    forest, spans = merge([tree], [{"b"}])
    assert forest.token_T.tolist() == [1, 2, 3, 4, 5]
    assert forest.trained_T.tolist() == [False] * 4 + [True]
    assert spans == [{second: (4, 5)}]
    empty, spans = merge([tree], [set()])
    assert len(empty) == 0
    assert empty.paths() == []
    assert spans == [{}]
    check(empty)
    assert unfold(empty) == []


def test_an_aborted_sample_is_context_for_what_continues_it_and_nothing_else() -> None:
    tree = TokenTree()
    cut = tree.add([1], completion([2], "abort"), "a")
    empty = tree.add([1], completion([], "abort"), "b")
    kept = tree.add([1, 2, 3], completion([4]), "c", after=cut)
    tree.add([1, 5], completion([6]), "d", after=empty)
    assert tree.ids(empty) == [1]
    forest, spans = merge([tree])
    assert forest.token_T.tolist() == [1, 5, 6, 2, 3, 4]
    assert forest.trained_T.sum() == 2
    assert kept in spans[0]
    assert cut not in spans[0]
    check(forest)


def test_concatenate_keeps_links_inside_each_forest() -> None:
    tree = TokenTree()
    tree.add([1], completion([2]), "a")
    tree.add([1], completion([3]), "b")
    forest, _ = merge([tree])
    both = concatenate([forest, forest])
    check(both)
    assert both.parent_T.tolist() == [-1, 0, 0, -1, 3, 3]
    assert both.paths() == [[(0, 1)], [(0, 1), (1, 2)], [(0, 1), (2, 3)], [(3, 4)], [(3, 4), (4, 5)], [(3, 4), (5, 6)]]
    assert len(concatenate([])) == 0


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one token"):
        TokenTree().add([], completion([1]), "a")
