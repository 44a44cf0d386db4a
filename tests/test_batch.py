"""Groups, weights, packing and the ledger, on hand-built trees: no model."""

from itertools import pairwise

import numpy as np
import pytest

from minirllm.batch import _forest
from minirllm.config import Config
from minirllm.grouping import members
from minirllm.tree import TokenTree
from minirllm.types import Completion, Episode, Message, Step, TerminationReason, Trajectory
from tests.episodes import PROMPT, episode, make, trained


def test_a_group_shares_its_prompt_and_gets_its_advantages():
    batch = make([episode("a", 0, 1.0), episode("a", 1, 0.0, [(9,)])])
    (forest,) = batch.forests
    assert forest.token_T.tolist() == [1, 2, 3, 4, 7, 8, 9]
    assert forest.trained_T.tolist() == [False] * 4 + [True] * 3
    assert forest.advantage_T.tolist() == [0] * 4 + [0.5, 0.5, -0.5]
    assert forest.temperature_T[4:] == pytest.approx([0.7] * 3)
    assert forest.weight_T == pytest.approx([0] * 4 + [1 / 3] * 3)
    expected = {"trained_tokens": 3, "context_tokens": 4, "tokens": 7, "micro_batches": 1, "trajectories": 2}
    expected |= {"prefix_saving": 11 / 7}
    assert {name: batch.metrics[name] for name in expected} == pytest.approx(expected)
    assert (batch.metrics["reward_mean"], batch.metrics["reward_std"], batch.metrics["reward/default"]) == (
        0.5,
        0.5,
        0.5,
    )


def test_weights_by_hand_for_each_aggregation():
    # three trajectories of 5 (in two branches), 1 and 2 trained tokens
    episodes = [episode("a", 0, 1.0, [(7, 8, 9), (5, 6)]), episode("a", 1, 0.0, [(9,)]), episode("a", 2, 0.0, [(4, 4)])]
    sizes = [5] * 5 + [1] + [2] * 2
    assert trained(make(episodes), "weight_T") == pytest.approx([1 / 8] * 8)
    assert sorted(trained(make(episodes, loss_aggregation="sequence"), "weight_T")) == pytest.approx(
        sorted(1 / (3 * n) for n in sizes)
    )
    assert trained(make(episodes, loss_aggregation="constant", max_tokens=10), "weight_T") == pytest.approx(
        [1 / 30] * 8
    )


def test_a_trajectory_weighs_the_same_however_many_branches_it_has():
    batch = make(
        [episode("a", 0, 1.0, [(7,)]), episode("a", 1, 0.0, [(5, 5), (6,), (8, 8, 8)])], loss_aggregation="sequence"
    )
    weight, advantage = trained(batch, "weight_T"), trained(batch, "advantage_T")
    assert weight[advantage > 0].sum() == pytest.approx(0.5)
    assert weight[advantage < 0].sum() == pytest.approx(0.5)


def test_groups_without_signal_are_named_and_take_no_compute():
    kinds = {"easy": [1, 1], "hard": [0, 0], "same": [0.5, 0.5], "good": [0, 1]}
    episodes = [episode(task, i, float(r)) for task, rewards in kinds.items() for i, r in enumerate(rewards)]
    episodes += [episode("alone", 0, 1.0), episode("alone", 1, None, termination_reason=TerminationReason.TIMEOUT)]
    batch = make(episodes)
    names = ("groups", "groups_with_signal", "groups_too_easy", "groups_too_hard", "groups_uniform", "groups_too_small")
    assert [batch.metrics[name] for name in names] == [5, 1, 1, 1, 1, 1]
    assert batch.metrics["trained_tokens"] == 4
    assert trained(batch, "weight_T") == pytest.approx([0.25] * 4)
    assert (batch.metrics["episodes"], batch.metrics["ungraded"], batch.metrics["ungraded/timeout"]) == (10, 1, 1)
    assert batch.metrics["reward_mean"] == pytest.approx(5 / 9)


def test_with_a_kl_term_groups_without_signal_stay():
    batch = make([episode("a", 0, 1.0), episode("a", 1, 1.0)], kl_beta=0.1)
    assert batch.metrics["groups_too_easy"] == 1
    assert trained(batch, "advantage_T").tolist() == [0] * 4
    assert trained(batch, "weight_T") == pytest.approx([0.25] * 4)


def test_with_an_entropy_bonus_groups_without_signal_stay_and_with_the_kl_in_the_reward_they_do_not():
    episodes = [episode("a", 0, 1.0), episode("a", 1, 1.0)]
    assert trained(make(episodes, entropy_bonus=0.01), "weight_T") == pytest.approx([0.25] * 4)
    assert make(episodes, kl_beta=0.1, kl_in="reward").forests == []


def test_what_the_kl_costs_is_taken_from_a_trajectorys_reward():
    one, other = episode("a", 0, 1.0, answers=((7, 8), (9,))), episode("a", 1, 1.0)
    for step, cost in zip(one.trajectories[0].steps, (0.3, 0.1), strict=True):
        step.metadata["kl_cost"] = cost
    assert make([one, other]).metrics["groups_with_signal"] == 0  # resumed without it
    batch = make([one, other], kl_beta=0.1, kl_in="reward")
    assert sorted(set(trained(batch, "advantage_T").tolist())) == pytest.approx([-0.2, 0.2])
    assert batch.metrics["reward_mean"] == 1.0  # as graded


def test_reinforce_learns_from_equal_rewards_unless_they_are_zero():
    batch = make(
        [episode("a", 0, 1.0), episode("a", 1, 1.0), episode("b", 0, 0.0), episode("b", 1, 0.0)], algorithm="reinforce"
    )
    assert (batch.metrics["groups_with_signal"], batch.metrics["groups_too_hard"]) == (1, 1)
    assert trained(batch, "advantage_T").tolist() == [1] * 4


def test_ungraded_episodes_are_no_zero_and_nothing_graded_gives_an_empty_batch():
    ungraded = episode("a", 2, None, termination_reason=TerminationReason.GRADING_ERROR)
    batch = make([episode("a", 0, 1.0), episode("a", 1, 0.0), ungraded])
    assert sorted(set(trained(batch, "advantage_T").tolist())) == [-0.5, 0.5]
    empty = make([ungraded])
    assert empty.forests == []
    assert empty.metrics["ungraded/grading_error"] == 1
    assert "reward_mean" not in empty.metrics


def test_roles_are_groups_of_their_own_in_one_forest():
    def solve_and_judge(index, solver, judge):
        made = episode("a", index, 0.0, [(7,), (8, 8)], names=["solver", "judge"])
        made.trajectories[0].reward, made.trajectories[1].reward = solver, judge
        return made

    batch = make([solve_and_judge(0, 1.0, 0.25), solve_and_judge(1, 0.0, 0.75)])
    (forest,) = batch.forests
    found = list(zip(forest.token_T.tolist(), forest.advantage_T.tolist(), strict=True))
    trained = [found[t] for t in np.flatnonzero(forest.trained_T)]  # the first rollout's calls, then the second's
    assert trained == [(7, 0.5), (8, -0.25), (8, -0.25), (7, -0.5), (8, 0.25), (8, 0.25)]
    assert (batch.metrics["groups"], batch.metrics["reward/solver"], batch.metrics["reward/judge"]) == (2, 0.5, 0.5)
    assert batch.metrics["trajectories"] == 4


def test_a_role_without_signal_is_context_only():
    def both(index, solver):
        made = episode("a", index, 1.0, [(7,), (8, 8)], names=["solver", "judge"])
        made.trajectories[0].reward = solver
        return made

    batch = make([both(0, 1.0), both(1, 0.0)])
    assert trained(batch, "token_T").tolist() == [7, 7]


def test_a_call_of_two_trajectories_is_trained_once_and_aborted_ones_never():
    first, second = episode("a", 0, 1.0, [(7, 8)]), episode("a", 1, 0.0, [(9,)])
    first.trajectories.append(Trajectory("other", steps=list(first.trajectories[0].steps)))
    second.tree.add(PROMPT, Completion([5, 5], [-0.5, -0.5], "abort", -1), "gone")
    batch = make([first, second])
    assert sorted(trained(batch, "token_T").tolist()) == [7, 8, 9]
    assert batch.metrics["trained_tokens"] == 3


def test_the_order_in_which_rollouts_ended_does_not_matter():
    def in_order(*order):
        made = [episode("ba"[i % 2], i // 2, float(i > 1), [(10 + i, 20 + i)]) for i in range(4)]
        return make([made[i] for i in order])

    one, other = in_order(0, 1, 2, 3), in_order(2, 0, 3, 1)
    for a, b in zip(one.forests, other.forests, strict=True):
        assert all(np.array_equal(value, vars(b)[name]) for name, value in vars(a).items())
    assert one.metrics == other.metrics
    assert trained(one, "token_T").tolist() == [11, 21, 13, 23, 10, 20, 12, 22]  # task a, then task b


def test_packing_keeps_order_and_the_limit():
    episodes = [
        episode(f"t{t}", i, float(i), [tuple(range(10, 18))]) for t in range(5) for i in range(2)
    ]  # 20 tokens a task
    batch = make(episodes, micro_batch_tokens=50)
    assert [len(forest) for forest in batch.forests] == [40, 40, 20]
    assert trained(batch, "weight_T") == pytest.approx([1 / 80] * 80)
    assert all((forest.parent_T < np.arange(len(forest))).all() for forest in batch.forests)


def test_a_group_over_the_limit_is_split_into_even_shares_that_repeat_the_prompt():
    episodes = [episode("a", i, float(i), [tuple(range(10, 18))]) for i in range(8)]  # 4 + 8 x 8 = 68 tokens
    batch = make(episodes, micro_batch_tokens=40)
    assert [len(forest) for forest in batch.forests] == [4 + 4 * 8] * 2
    assert all(forest.token_T[:4].tolist() == PROMPT for forest in batch.forests)
    assert len(trained(batch, "weight_T")) == 64
    small = make(episodes, micro_batch_tokens=16)
    assert [len(forest) for forest in small.forests] == [12] * 8
    huge = make([episode("a", 0, 0.0, [(5,) * 30]), episode("a", 1, 1.0, [(6,)])], micro_batch_tokens=16)
    assert [len(forest) for forest in huge.forests] == [34, 5]  # one rollout is never cut


def test_paths_are_single_sequences_with_the_same_trained_tokens():
    episodes = [episode("a", 0, 1.0, [(7, 8), (6,)]), episode("a", 1, 0.0)]
    forest, paths = make(episodes), make(episodes, packing="paths")
    assert sorted(len(row) for row in paths.forests) == [5, 6, 6]
    assert all((row.parent_T == np.arange(-1, len(row) - 1)).all() for row in paths.forests)
    for name in ("token_T", "advantage_T", "weight_T", "logprob_T"):
        assert sorted(trained(paths, name).tolist()) == sorted(trained(forest, name).tolist())
    assert (paths.metrics["prefix_saving"], forest.metrics["prefix_saving"]) == pytest.approx((1.0, 17 / 9))


def test_a_conversation_trains_its_first_turn_once():
    def talk(index, reward):
        tree = TokenTree()
        first = tree.add(PROMPT, Completion([7, 8], [-1.0, -2.0], "stop", 0), "one")
        steps = [Step("one", node=first, prompt_length=4, response_length=2)]
        for n, user in enumerate((30, 40)):  # two continuations of the first answer
            node = tree.add([*PROMPT, 7, 8, user], Completion([9 + n], [-3.0], "length", 0), f"two{n}", after=first)
            steps.append(Step(f"two{n}", node=node, prompt_length=7, response_length=1, finish_reason="length"))
        return Episode(
            id=f"a:{index}",
            task_id="a",
            rollout_idx=index,
            reward=reward,
            tree=tree,
            trajectories=[Trajectory(steps=steps)],
        )

    for packing in ("forest", "paths"):
        batch = make([talk(0, 0.0), talk(1, 1.0)], packing=packing)
        assert sorted(trained(batch, "token_T").tolist()) == [7, 7, 8, 8, 9, 9, 10, 10]
    assert batch.metrics["truncated"] == 4


def test_tokens_that_a_continuation_reads_otherwise_are_counted():
    def talk(index, *second):
        tree = TokenTree()
        first = tree.add(PROMPT, Completion([7, 8, 9], [-1.0] * 3, "stop", 0), "one")
        last = tree.add(second, Completion([5], [-1.0], "stop", 0), "two", after=first)
        steps = [
            Step("one", node=first, prompt_length=4, response_length=3),
            Step("two", node=last, parent="one", prompt_length=len(second), response_length=1),
        ]
        return Episode(f"a:{index}", task_id="a", rollout_idx=index, reward=float(index), tree=tree,
                       trajectories=[Trajectory(steps=steps)])  # fmt: skip

    kept, rewritten = talk(0, *PROMPT, 7, 8, 9, 2), talk(1, *PROMPT, 7, 6, 9, 2)
    assert make([kept, talk(1, *PROMPT, 7, 8, 9, 3)]).metrics["reread_tokens"] == 0
    assert make([kept, rewritten]).metrics["reread_tokens"] == 2  # 8 and 9, behind the 7 that both read
    assert make([kept, talk(1, 1, 2, 6)]).metrics["reread_tokens"] == 5


def test_overlong_answers_lose_reward_by_hand():
    """Over the last 4 of 10 tokens: 0 at 6, a half at 8, all of it from 10 on. The reward that is reported stays."""
    answers = [(1,) * 6, (2,) * 8, (3,) * 12]
    batch = make([episode("a", i, 1.0, [answers[i]]) for i in range(3)], max_tokens=10, overlong_buffer=4)
    assert sorted(set(trained(batch, "advantage_T").tolist())) == [-0.5, 0.0, 0.5]  # of 1.0, 0.5, 0.0
    assert batch.metrics["reward_mean"] == 1.0


def test_truncated_trajectories_set_the_baseline_and_are_not_trained_on():
    episodes = [episode("a", 0, 1.0, [(7, 8)]), episode("a", 1, 0.0, [(9,)])]
    episodes[1].trajectories[0].steps[0].finish_reason = "length"
    batch = make(episodes, mask_truncated=True)
    assert trained(batch, "token_T").tolist() == [7, 8]
    assert trained(batch, "advantage_T").tolist() == [0.5, 0.5]
    assert trained(batch, "weight_T").tolist() == [0.5, 0.5]
    assert (batch.metrics["discarded/truncated"], batch.metrics["trained_tokens"]) == (1, 2)
    assert len(trained(make(episodes), "token_T")) == 3


@pytest.mark.parametrize("packing", ["forest", "paths"])
def test_tokens_know_their_trajectory(packing):
    names = ["solver", "judge"]
    episodes = [episode("a", i, float(i), [(7, 8), (5,)], names=names) for i in range(2)]
    batch = make(episodes, packing=packing)
    found = {}
    for forest in batch.forests:
        for token, sequence in zip(forest.token_T[forest.trained_T], forest.sequence_T[forest.trained_T], strict=True):
            found.setdefault(int(sequence), []).append(int(token))
        assert (forest.sequence_T[~forest.trained_T] == -1).all()
    assert sorted(map(sorted, found.values())) == [[5], [5], [7, 8], [7, 8]]


def test_roles_are_compared_among_themselves():
    """REINFORCE++ whitens over a batch: the rewards of one role are no scale for those of another."""
    episodes = [episode("a", i, 0.0, [(7,), (5,)], names=["solver", "judge"]) for i in range(2)]
    for i, rewards in enumerate([(1.0, 100.0), (0.0, 0.0)]):
        for trajectory, reward in zip(episodes[i].trajectories, rewards, strict=True):
            trajectory.reward = reward
    advantages = trained(make(episodes, algorithm="reinforce_pp"), "advantage_T")
    assert sorted(advantages.tolist()) == pytest.approx([-(0.5**0.5)] * 2 + [0.5**0.5] * 2, rel=1e-4)


def test_whitening_counts_a_trajectory_by_its_tokens():
    """Rewards 1 of one token and 0 of three: mean 1/4, variance (0.75^2 + 3 * 0.25^2) / 3 = 1/4."""
    batch = make([episode("a", 0, 1.0, [(7,)]), episode("a", 1, 0.0, [(5, 5, 5)])], algorithm="reinforce_pp")
    assert trained(batch, "advantage_T").tolist() == pytest.approx([1.5, -0.5, -0.5, -0.5])


def test_counts_of_malformed_tool_calls_and_signals():
    one, other = episode("a", 0, 1.0, signals={"length": 3.0}), episode("a", 1, None, signals={"length": 100.0})
    one.trajectories[0].steps[0].response = Message("assistant", malformed=True)
    metrics = make([one, other]).metrics
    assert (metrics["malformed_tool_calls"], metrics["signal/length"], metrics["calls"]) == (1, 3.0, 2)


def test_token_order_within_a_task_is_rollout_order():
    batch = make([episode("a", i, float(i % 2), [(10 + i,)]) for i in range(4)])
    assert all(a < b for a, b in pairwise(trained(batch, "token_T")))


def test_what_sessions_counted_is_in_the_metrics():
    counted = {"branches": 2.0, "unprovable": 1.0, "edited": 1.0, "turns": 5.0}
    metrics = make([episode("a", 0, 1.0, metrics=counted), episode("a", 1, None, metrics={"unprovable": 2.0})]).metrics
    assert {name: metrics[name] for name in ("branches", "unprovable", "edited", "rerendered", "aborted")} == {
        "branches": 2, "unprovable": 3, "edited": 1, "rerendered": 0, "aborted": 0,
    }  # fmt: skip
    assert "turns" not in metrics


def test_an_advantage_belongs_to_a_call_and_may_differ_from_token_to_token():
    """A call whose sample was cut in two by a branch keeps the order of its tokens' advantages."""
    tree = TokenTree()
    first = tree.add(PROMPT, Completion([7, 8, 9], [-1.0] * 3, "stop", 0), "one")
    last = tree.add([*PROMPT, 7, 8, 5], Completion([6], [-1.0], "stop", 0), "two", after=first)
    steps = [Step("one", node=first, prompt_length=4, response_length=3)]
    steps += [Step("two", node=last, prompt_length=7, response_length=1)]
    made = Episode("a:0", task_id="a", reward=1.0, tree=tree, trajectories=[Trajectory(steps=steps)])
    (member,) = members(made, Config())
    member.advantages, member.weight = {"one": [1.0, 2.0, 3.0], "two": -4.0}, 1.0
    forest = _forest([[member]], 0)
    found = zip(forest.token_T[forest.trained_T].tolist(), forest.advantage_T[forest.trained_T].tolist(), strict=True)
    assert sorted(found) == [(6, -4), (7, 1), (8, 2), (9, 3)]


def test_an_advantage_that_is_given_stands_in_place_of_the_groups():
    """Of a call, or of each of its tokens. The others keep theirs; a group of equal rewards then has a signal."""
    episodes = [episode("a", index, reward, answers=((7, 8),)) for index, reward in enumerate((1.0, 0.0))]
    episodes[0].trajectories[0].steps[0].advantage = [0.25, -3.0]
    assert trained(make(episodes), "advantage_T").tolist() == [0.25, -3.0, -0.5, -0.5]
    equal = [episode("a", index, 1.0) for index in range(2)]
    equal[1].trajectories[0].steps[0].advantage = -2.0
    batch = make(equal)
    assert (batch.metrics["groups_with_signal"], batch.metrics["trained_tokens"]) == (1, 4)
    assert trained(batch, "advantage_T").tolist() == [0, 0, -2, -2]


@pytest.mark.parametrize("packing", ["forest", "paths"])
def test_targets_stand_at_their_tokens_though_a_branch_cut_the_sample(packing):
    """In the order of the forest's trained tokens, whatever the order of calls and micro-batches."""
    episodes = []
    for index in range(2):
        tree = TokenTree()
        first = tree.add(PROMPT, Completion([7, 8, 9], [-1.0] * 3, "stop", 0), "one")
        last = tree.add([*PROMPT, 7, 8, 5], Completion([6 - index], [-1.0], "stop", 0), "two", after=first)
        steps = [Step("two", node=last, prompt_length=7, response_length=1)]
        steps += [Step("one", node=first, prompt_length=4, response_length=3)]
        for step in steps:
            ids = np.array(tree.response(step.node)[0])[:, None] * 10
            step.targets = ids + np.arange(2), np.full(ids.shape, -0.5, np.float32).repeat(2, 1)
        trajectories = [Trajectory(steps=steps)]
        row = {"task_id": "a", "rollout_idx": index, "reward": 1.0 - index, "tree": tree}
        episodes.append(Episode(f"a:{index}", trajectories=trajectories, **row))
    batch = make(episodes, packing=packing)
    for forest in batch.forests:
        ids, logprobs = forest.targets
        assert ids[:, 0].tolist() == [10 * token for token in forest.token_T[forest.trained_T]]
        assert (ids[:, 1] == ids[:, 0] + 1).all()
        assert logprobs.shape == ids.shape
    assert sum(len(forest.targets[0]) for forest in batch.forests) == 8
