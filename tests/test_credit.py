"""How the calls of a trajectory share in what it earned, and who is compared with whom: by hand."""

import numpy as np
import pytest

from minirllm import grouping
from minirllm.algorithms import roles
from minirllm.algorithms.credit import Path, returns_of
from minirllm.batch import select
from minirllm.config import Config
from minirllm.errors import ConfigError, UserError
from minirllm.log import explain
from tests.episodes import episode, make, trained


def talk(index, reward, calls, task="a"):
    """A rollout of one trajectory; `calls` are (reward, state) of each."""
    made = episode(task, index, reward, [(10 + index, n) for n in range(len(calls))])
    for step, (own, state) in zip(made.trajectories[0].steps, calls, strict=True):
        step.reward, step.input = own, state
    return made


TALKS = [talk(0, 4.0, [(1.0, "s"), (0.0, "t"), (2.0, "s")]), talk(1, 1.0, [(0.5, "s")])]


def shares(episodes, **options):
    """The advantages of each rollout's calls."""
    config = Config(**{"norm_std": False, **options})
    batch = select(episodes, config, roles.of(config))
    return [[batch.members[e.id, step.id].advantages[step.id] for step in e.trajectories[0].steps] for e in episodes]


def test_returns_by_hand():
    path = Path(4.0, np.array([1.0, 0.0, 2.0]), np.array([1, 1, 1]), ())
    assert returns_of(path, 0.5) == [1 + 0.5 * 3, 0 + 0.5 * 6, 2 + 4]
    assert returns_of(path, 1.0) == [7, 6, 6]
    assert returns_of(path, 0.0) == [1, 0, 6]
    assert returns_of(Path(4.0, np.array([]), np.array([]), ()), 0.5) == []


def test_returns_are_compared_call_by_call():
    """The first calls: 2.5 and 1.5; the others have no counterpart, and nothing to learn."""
    assert shares(TALKS, credit="returns", discount=0.5) == [[0.5, 0.0, 0.0], [-0.5]]
    plain = {"algorithm": "reinforce", "norm_std": True}
    assert shares(TALKS, credit="returns", discount=0.5, **plain) == [[2.5, 3.0, 6.0], [1.5]]
    assert shares(TALKS) == [[1.5, 1.5, 1.5], [-1.5]], "the trajectory's reward alone"


def test_whitening_of_returns_is_over_the_tokens_of_all_calls():
    """Two tokens each of returns 7, 6, 6 and 1.5: mean 41 / 8, variance over 7."""
    values = np.array([7.0, 6, 6, 1.5])
    scale = np.sqrt(2 * ((values - 5.125) ** 2).sum() / 7 + 1e-8)
    found = shares(TALKS, credit="returns", algorithm="reinforce_pp", norm_std=True)
    assert [*found[0], *found[1]] == pytest.approx(((values - 5.125) / scale).tolist())


def test_gigpo_adds_what_calls_in_the_same_state_earned():
    """Totals 7 and 1.5: 2.75 up and down. In state s returns 2.5, 6 and 1.5, mean 10 / 3; t was met once."""
    mean = 10 / 3
    expected = [2.75 + 0.5 * (2.5 - mean), 2.75, 2.75 + 0.5 * (6 - mean)]
    found = shares(TALKS, credit="gigpo", discount=0.5, state_weight=0.5)
    assert found == [pytest.approx(expected), pytest.approx([-2.75 + 0.5 * (1.5 - mean)])]
    assert shares(TALKS, credit="gigpo", state_weight=0.0) == [[2.75] * 3, [-2.75]]
    std = np.std([2.5, 6, 1.5]) + 1e-6
    found = shares(TALKS, credit="gigpo", discount=0.5, norm_std=True)
    assert found[0] == pytest.approx([1 + (2.5 - mean) / std, 1, 1 + (6 - mean) / std], abs=1e-5)


def test_without_a_state_of_its_agent_a_call_is_known_by_its_prompt():
    one, other = episode("a", 0, 1.0, [(7,), (8,)]), episode("a", 1, 0.0, [(9,)], prompt=[1, 2, 3, 5])
    assert shares([one, other], credit="gigpo") == [[0.5, 0.5], [-0.5]], "the same return twice, and another prompt"
    other = episode("a", 1, 0.0, [(9,)])
    assert shares([one, other], credit="gigpo") == [pytest.approx([0.5 + 1 / 3] * 2), pytest.approx([-0.5 - 2 / 3])]


def test_a_group_has_signal_when_one_of_its_calls_has():
    """Equal rewards, but one conversation got there by better calls."""
    equal = [talk(0, 1.0, [(1.0, "s"), (0.0, "t")]), talk(1, 1.0, [(0.0, "s"), (1.0, "t")])]
    assert make(equal).metrics["groups_too_easy"] == 1
    batch = make(equal, credit="returns", discount=0.5)
    assert batch.metrics["groups_with_signal"] == 1
    # returns 1.5 and 1 of the first rollout, 1 and 2 of the second
    found = zip(trained(batch, "token_T").tolist(), trained(batch, "advantage_T").tolist(), strict=True)
    assert [pair for pair in found if pair[0] >= 10] == [(10, 0.25), (10, -0.5), (11, -0.25), (11, 0.5)]


def test_rewards_of_calls_that_are_not_looked_at_are_said():
    row = make(TALKS).metrics
    assert row["step_rewards_unused"] == 3
    assert "3 rewards of calls not used (credit = trajectory)" in explain({"step": 1, **row}, 2)
    assert "step_rewards_unused" not in make(TALKS, credit="returns").metrics


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"credit": "gigo"}, r"There is no credit 'gigo' \(did you mean gigpo\?\)"),
        ({"discount": 0.9}, "discount has no effect with credit = trajectory"),
        ({"credit": "returns", "state_weight": 2.0}, "state_weight has no effect with credit = returns"),
        ({"credit": "gigpo", "algorithm": "reinforce"}, "credit = gigpo compares within groups"),
        ({"credit": "gigpo", "algorithm": "reinforce_pp"}, "credit = gigpo compares within groups"),
        ({"credit": "gigpo", "roles": "judge=reinforce"}, "credit = gigpo compares within groups"),
        ({"group_by": "answers"}, "There is no group_by 'answers': use task, or module:attr"),
        ({"group_by": "tests.test_credit:TALKS"}, "is not a function"),
        ({"credit": "tests.test_credit:TALKS"}, "is not a function"),
    ],
)
def test_what_has_no_effect_or_cannot_be_is_refused(options, message):
    config = Config(**options)
    with pytest.raises(ConfigError, match=message):
        grouping.validate(config, roles.of(config))


def test_gigpo_goes_with_all_that_compare_within_groups():
    for name in ("grpo", "rloo", "reinforce_pp_baseline", "gspo", "cispo"):
        grouping.validate(config := Config(credit="gigpo", algorithm=name), roles.of(config))


# ---- who is compared with whom ----


def by_kind(episode, trajectory):
    return episode.metadata["kind"]


def broken(episode, trajectory):
    return episode.metadata["nothing"]


def number(episode, trajectory):
    return 1


def test_a_hook_says_who_is_compared_with_whom():
    """Two tasks of one kind are one group of four: mean 0.25. The judges stay apart, they have another algorithm."""
    kind = {"kind": "sum"}
    episodes = [episode(task, i, float((task, i) == ("a", 0)), metadata=kind) for task in "ab" for i in (0, 1)]
    batch = make(episodes, group_by=f"{__name__}:by_kind")
    assert batch.metrics["groups"] == 1
    assert trained(batch, "advantage_T").tolist() == [0.75] * 2 + [-0.25] * 6
    assert make(episodes).metrics["groups"] == 2
    for made in episodes:
        made.trajectories[0].name = "judge" if made.rollout_idx else "solver"
    assert make(episodes, group_by=f"{__name__}:by_kind").metrics["groups"] == 1
    assert make(episodes, group_by=f"{__name__}:by_kind", roles="judge=rloo").metrics["groups"] == 2


def test_a_hook_that_fails_or_gives_no_text_is_named():
    with pytest.raises(UserError, match=r":broken: KeyError: 'nothing' \(test_credit\.py line \d+\)"):
        make([episode("a", 0, 1.0)], group_by=f"{__name__}:broken")
    with pytest.raises(UserError, match=f"group_by {__name__}:number must return a text, got 1"):
        make([episode("a", 0, 1.0)], group_by=f"{__name__}:number")


# ---- credits and algorithms of one's own ----


def per_trajectory(groups, compare, config):
    return [[np.zeros(1) for path in group] for group in groups]


def one_group(groups, compare, config):
    return [[np.zeros(len(path.reward_K)) for path in groups[0]]]


def endless(groups, compare, config):
    return [[np.full(len(path.reward_K), np.inf) for path in group] for group in groups]


def numbers(groups, compare, config):
    return [0.0 for group in groups]


WANTED = r"lists of 3, 1, 3, 1 finite numbers were to be returned, got"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("per_trajectory", rf"{WANTED} \[\[0.0\], \[0.0\], \[0.0\], \[0.0\]\]\."),
        ("one_group", rf"{WANTED} \[\[0.0, 0.0, 0.0\], \[0.0\]\]\."),
        ("endless", rf"{WANTED} \[\[inf, inf, inf\], \[inf\]"),
        ("numbers", r"TypeError: 'float' object is not iterable"),
    ],
)
def test_a_credit_of_the_wrong_shape_is_named(name, words):
    other = [talk(0, 1.0, [(0.0, "s")] * 3, "b"), talk(1, 0.0, [(0.0, "s")], "b")]
    with pytest.raises(UserError, match=f"^credit {__name__}:{name}:? {words}"):
        shares([*TALKS, *other], credit=f"{__name__}:{name}")


class Own:
    """An algorithm without a loss of its own; `advantages` is what a test makes of it."""

    def validate(self, config):
        pass

    def loss(self, tokens, config):
        raise NotImplementedError


class Raising(Own):
    def advantages(self, groups, config):
        return [group.rewards[0] for group in groups]


class Short(Own):
    def advantages(self, groups, config):
        return [group.rewards_G[1:] for group in groups]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Raising", r"AttributeError: 'Group' object has no attribute 'rewards'.* \(test_credit\.py line \d+\)"),
        ("Short", r"lists of 2 finite numbers were to be returned, got \[\[1.0\]\]"),
    ],
)
def test_an_algorithm_that_fails_is_named_and_not_its_credit(name, words):
    for options in ({"algorithm": f"{__name__}:{name}"}, {"roles": f"default={__name__}:{name}"}):
        with pytest.raises(UserError, match=f"^advantages of algorithm {__name__}:{name}: {words}"):
            shares(TALKS, **options)
    config = Config(algorithm=f"{__name__}:Raising")
    with pytest.raises(UserError, match=f"^advantages of algorithm {__name__}:Raising: AttributeError"):
        grouping.validate(config, roles.of(config))
