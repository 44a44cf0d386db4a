"""Episodes become micro-batches: the advantage and the weight of every token in the loss, packed forests.

Owns: loss aggregation, the ledger, packing. Does not know: the model, gradients, how tokens were sampled, which
trajectories are compared and how (grouping.py).

The ledger balances: every sampled token is trained on once, or discarded for a reason that `Batch.fate` names and the
metrics count. A token to be trained on that no call on record explains raises LedgerError before anything is learned.

The loss of a step is ``sum over trained tokens of weight_T * loss_T``, whatever the number of micro-batches. With
``mini_batches`` there are several optimizer steps, each on some of the tasks, and "batch" below is such a part. A group
whose advantages are all zero teaches nothing: it is counted, takes no compute, and does not enter the totals that
weights are divided by (with the KL or the entropy in the loss it stays: its tokens still carry their gradients). By
``loss_aggregation`` the weight of a token is

- ``token``: 1 / trained tokens of the batch. Every token weighs the same.
- ``sequence``: 1 / (trajectories * trained tokens of its trajectory, all branches). Trajectories weigh the same.
- ``constant``: 1 / (trajectories * max_tokens). A token weighs the same in every batch.

Legend: T tokens of a forest, K of one call.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from minirllm import filters
from minirllm.algorithms import Algorithm
from minirllm.config import Config
from minirllm.diagnostics import episode_metrics
from minirllm.errors import LedgerError
from minirllm.grouping import Member, compare, has_signal, members
from minirllm.returns import means
from minirllm.standing import NOTHING, Means, Standing
from minirllm.tree import Forest, Node, Spans, TokenTree, concatenate, merge, shares, unfold
from minirllm.types import Episode, Step

Version = int | Callable[[Episode, Step], int]  # of the weights which sample a call, or any


@dataclass
class Batch:
    """What one update learns from: `metrics` says what was used, what not, and why."""

    parts: list[list[Forest]] = field(default_factory=list)  # the micro-batches of each optimizer step of an epoch
    metrics: dict[str, float] = field(default_factory=dict)
    members: dict[tuple[str, str], Member] = field(default_factory=dict)  # by episode id and call id
    means: tuple[Means, Means] = ({}, {})  # the rewards of the groups, the shares solved of the tasks
    signal: set[str] = field(default_factory=set)  # tasks with something to learn from
    auxiliary: set[tuple[str, str]] = field(default_factory=set)  # episode id and call id of side calls

    @property
    def forests(self) -> list[Forest]:
        """All micro-batches, in order."""
        return [forest for part in self.parts for forest in part]

    def fate(self, episode: Episode, node: Node) -> str:
        """What becomes of the tokens of a sampled node: "trained", or why they are discarded."""
        member = self.members.get((episode.id, node.call_id))
        if node.aborted:
            return "aborted"  # the client left, the session ended, the engine failed
        if (episode.id, node.call_id) in self.auxiliary:
            return "auxiliary"  # a side call of the harness: neither its advantage nor its loss is the agent's
        if episode.reward is None:
            return "ungraded"
        if member is None:
            return "unclaimed"  # by any trajectory of the episode
        return member.fate


def build(
    episodes: Sequence[Episode], config: Config, algorithm: Algorithm, version: Version, standing: Standing = NOTHING
) -> Batch:
    """The batch of one step, a function of the episodes' contents: they may come in any order.

    Trajectories of one task with one name are a group; a trajectory without a reward of its own has its episode's.
    Episodes without a reward are counted and left out. `version` is that of the weights which sample a call. Raises
    LedgerError for a token to be trained on that cannot be traced to a call on record, these weights and a finite
    logprob.
    """
    batch = select(episodes, config, algorithm, standing)
    targets = _targets(_trained(batch))
    for part in _parts(_trained(batch), config):
        by_task: dict[str, dict[int, list[Member]]] = {}  # and by rollout
        for member in part:
            rollouts = by_task.setdefault(member.episode.task_id, {})
            rollouts.setdefault(id(member.episode), []).append(member)
        limit, merged = config.micro_batch_tokens, partial(_forest, version=version)
        own = [f for task in by_task.values() for f in shares(list(task.values()), merged, len, limit)]
        batch.parts.append(pack(own, config))
    if targets is not None:
        for forest in batch.forests:
            rows_N = forest.target_T[forest.trained_T]
            assert (rows_N >= 0).all(), "a teacher scores every token or none"
            forest.targets = targets[0][rows_N], targets[1][rows_N]
    trained, total = batch.metrics["trained_tokens"], sum(map(len, batch.forests))
    assert trained == sum(int(forest.trained_T.sum()) for forest in batch.forests), "the ledger balances"
    batch.metrics |= {
        "micro_batches": float(len(batch.forests)),
        "context_tokens": total - trained,
        "tokens": float(total),
        # tokens of one path at a time, over tokens computed
        "prefix_saving": sum(map(_unfolded, batch.forests)) / max(1, total),
    }
    return batch


def select(episodes: Sequence[Episode], config: Config, algorithm: Algorithm, standing: Standing = NOTHING) -> Batch:
    """`build` without its forests: what is trained on, with which advantage and weight, and what is not."""
    episodes = sorted(episodes, key=lambda episode: (episode.task_id, episode.rollout_idx))
    batch = Batch(metrics=episode_metrics(episodes))
    batch.auxiliary = {(e.id, step.id) for e in episodes for step in e.steps if step.auxiliary}
    every = [m for episode in episodes if episode.reward is not None for m in members(episode, config)]
    why, beyond = filters.left_out(episodes, config), set[str]()
    for member in every:
        member.fate = why.get(member.episode.id, member.fate)
    while True:
        part = [m for m in every if m.episode.id not in why and m.episode.task_id not in beyond]
        learned, counts = compare(part, config, algorithm, standing)
        batch.signal = {member.episode.task_id for member in learned if has_signal(member)}
        if not (more := filters.surplus(episodes, batch.signal, config)):
            break
        beyond |= more  # without them once more: an algorithm may compare with the whole batch
    for member in every:
        if member.episode.task_id in beyond and member.episode.id not in why:
            member.fate = "surplus"
    batch.means = means((m.group, m.reward) for m in part), filters.solved(episodes)
    batch.metrics |= counts | filters.metrics(episodes, why, beyond)
    for part in _parts(learned, config):
        _weigh(part, config)
    batch.members = {(m.episode.id, call): m for m in every for call in m.calls}
    fates = Counter({"retried": sum(int(episode.metrics.get("retried_tokens", 0)) for episode in episodes)})
    for episode in episodes:
        for node in episode.sampled:
            fates[batch.fate(episode, node)] += len(node.tokens)
    sampled, trained = fates.total(), fates.pop("trained", 0)
    batch.metrics |= {
        "trajectories": float(len(_trained(batch))),
        "sampled_tokens": float(sampled),
        "trained_tokens": float(trained),
        "discarded_tokens": float(sampled - trained),
        **{f"discarded/{why}": float(count) for why, count in sorted(fates.items()) if count},
        "reread_tokens": float(sum(map(_reread, episodes))),
    }
    return batch


def _trained(batch: Batch) -> list[Member]:
    """The members that the update learns from, each once."""
    return list({id(member): member for member in batch.members.values() if member.weight}.values())


def _parts(members: Sequence[Member], config: Config) -> list[list[Member]]:
    """Those of each optimizer step: whole tasks, by task id, in shares as even as they can be."""
    tasks = sorted({member.episode.task_id for member in members})
    count = min(config.mini_batches, len(tasks))
    return [
        [member for member in members if member.episode.task_id in share]
        for share in (set(tasks[k * len(tasks) // count : (k + 1) * len(tasks) // count]) for k in range(count))
    ]


def _reread(episode: Episode) -> int:
    """Tokens of continued calls that the call which continues them reads otherwise than they were read and sampled."""
    steps = [step for step in episode.steps if _chain(episode.tree, step)]
    paths = {step.id: set(episode.tree.path(step.node)) for step in steps}
    left = [paths.get(step.parent or "", set()) - paths[step.id] for step in steps]
    return sum(len(episode.tree.nodes[index].tokens) for indices in left for index in indices)


def _weigh(members: Sequence[Member], config: Config) -> None:
    """Sets the weight of each member's tokens; the module's docstring has the three formulas."""
    total = sum(member.tokens for member in members)
    for index, member in enumerate(members):
        member.index = index
        member.weight = {
            "token": 1 / total,
            "sequence": 1 / (len(members) * member.tokens),
            "constant": 1 / (len(members) * config.max_tokens),
        }[config.loss_aggregation]


def _targets(members: Sequence[Member]) -> tuple[np.ndarray, np.ndarray] | None:
    """What a teacher says of all their tokens, (ids, logprobs), [., K] each; sets where each call's begin."""
    found, at = [], 0
    for member in members:
        for call, step in member.calls.items():
            if step.targets is not None:
                member.targets[call], at = at, at + step.response_length
                found.append(step.targets)
    return tuple(map(np.concatenate, zip(*found, strict=True))) if found else None  # type: ignore[return-value]


def _forest(rollouts: Sequence[Sequence[Member]], version: Version) -> Forest:
    """These rollouts of one task (the members of each) merged, with advantages and weights filled in."""
    owners = [{call: member for member in members for call in member.calls} for members in rollouts]
    forest, spans = merge([members[0].episode.tree for members in rollouts], owners)
    for owner, found in zip(owners, spans, strict=True):
        _check(owner, found, version, forest)
        for call, member in owner.items():
            value_K, at = np.broadcast_to(member.advantages[call], member.calls[call].response_length), 0
            first = member.targets.get(call)
            for start, end in (found[node] for node in _chain(member.episode.tree, member.calls[call])):
                if first is not None:
                    forest.target_T[start:end] = np.arange(first + at, first + at + end - start)
                forest.advantage_T[start:end], at = value_K[at : at + end - start], at + end - start
                forest.weight_T[start:end] = member.weight
                forest.sequence_T[start:end] = member.index
                forest.role_T[start:end] = member.role
    return forest


def _chain(tree: TokenTree, step: Step) -> list[int]:
    """The nodes that hold what this call sampled, as its record has it."""
    if step.node is None or not 0 <= step.node < len(tree.nodes) or tree.nodes[step.node].call_id != step.id:
        return []
    return tree.completion_nodes(step.node)


def _check(owner: dict[str, Member], trained: Spans, version: Version, forest: Forest) -> None:
    """The ledger of an episode: each call is to train the very tokens that it sampled, from these weights."""
    for call, member in owner.items():
        tree = member.episode.tree
        nodes = [index for index in trained if tree.nodes[index].call_id == call]
        expected = version if isinstance(version, int) else version(member.episode, member.calls[call])
        if problem := _untraceable(tree, member.calls[call], nodes, expected):
            raise LedgerError(member.episode.id, call, *problem)
        for node, (start, end) in ((tree.nodes[index], trained[index]) for index in nodes):
            tokens, logprobs = np.array(node.tokens), np.array(node.logprobs, np.float32)
            wrong = (forest.token_T[start:end] != tokens) | (forest.logprob_T[start:end] != logprobs)
            if wrong.any():
                at = int(forest.position_T[start:end][wrong][0])
                raise LedgerError(member.episode.id, call, at, "what is to be trained is not what was sampled")


def _untraceable(tree: TokenTree, step: Step, nodes: list[int], version: int) -> tuple[int, str] | None:
    """(position, what is wrong) of the first token in `nodes` that this call's record does not explain."""
    chain, used = _chain(tree, step), step.prompt_length
    for index in sorted(set(chain) ^ set(nodes)):
        return len(tree.ids(tree.nodes[index].parent)), "the record of its call and the tree disagree on who sampled it"
    start = len(tree.prompt_ids(chain[-1])) if chain else step.prompt_length
    if start != step.prompt_length:
        return start, f"its call is on record with a prompt of {step.prompt_length} tokens, not {start}"
    for node in (tree.nodes[index] for index in chain):
        if node.weight_version != version:
            was = f"it was sampled by weights of version {node.weight_version}"
            return used, f"{was}, but those that sample this call have version {version}"
        if len(node.logprobs) != len(node.tokens):
            return used + min(len(node.logprobs), len(node.tokens)), "it has no logprob"
        for at, value in enumerate(np.array(node.logprobs, np.float64), used):
            if not np.isfinite(value):
                return at, f"its logprob is {value}, expected a finite number"
        used += len(node.tokens)
    if (count := used - start) != step.response_length:
        at = start + min(count, step.response_length)
        return at, f"its call is on record with {step.response_length} sampled tokens, not {count}"
    return None


def _unfolded(forest: Forest) -> int:
    """Tokens of all root-to-leaf paths, each counted by itself."""
    leaves = np.setdiff1d(np.arange(len(forest.node_end_N)), forest.node_parent_N)
    return int((forest.position_T[forest.node_end_N[leaves] - 1] + 1).sum())


def pack(forests: Sequence[Forest], config: Config) -> list[Forest]:
    """The micro-batches: neighbours joined, in order, while they stay within micro_batch_tokens; or each path alone."""
    if config.packing == "paths":
        return [row for forest in forests for row in unfold(forest)]
    packed: list[list[Forest]] = []
    for forest in forests:
        if packed and sum(map(len, packed[-1])) + len(forest) <= config.micro_batch_tokens:
            packed[-1].append(forest)
        else:
            packed.append([forest])
    return [pack[0] if len(pack) == 1 else concatenate(pack) for pack in packed]
