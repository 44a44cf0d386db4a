"""The ledger: every token is trained on once or discarded for a reason, and none of unknown origin is learned."""

import math

import pytest

from minirllm.errors import LedgerError
from minirllm.types import Completion
from tests.episodes import PROMPT, episode, make


def wrong_logprob(e, value=math.nan):
    e.tree.nodes[e.trajectories[0].steps[0].node].logprobs[1] = value


def missing_logprob(e):
    e.tree.nodes[e.trajectories[0].steps[0].node].logprobs.pop()


def other_call(e):
    e.trajectories[0].steps[0].node = e.trajectories[0].steps[1].node


def no_such_node(e):
    e.trajectories[0].steps[0].node = 99


def cut_off(e):
    e.tree.nodes[e.trajectories[0].steps[0].node].aborted = True


def sampled_twice(e):
    e.tree.add(PROMPT, Completion([1, 1], [-1.0, -1.0], "stop", 0), "a-1-0")


def longer_record(e):
    e.trajectories[0].steps[0].response_length += 1


def shorter_record(e):
    e.trajectories[0].steps[0].response_length -= 1


def other_prompt(e):
    e.trajectories[0].steps[0].prompt_length = 3


@pytest.mark.parametrize(
    ("damage", "position", "why"),
    [
        (wrong_logprob, 5, "its logprob is nan, expected a finite number"),
        (missing_logprob, 6, "it has no logprob"),
        (other_call, 4, "the record of its call and the tree disagree on who sampled it"),
        (no_such_node, 4, "the record of its call and the tree disagree on who sampled it"),
        (cut_off, 4, "the record of its call and the tree disagree on who sampled it"),
        (sampled_twice, 4, "the record of its call and the tree disagree on who sampled it"),
        (longer_record, 7, "its call is on record with 4 sampled tokens, not 3"),
        (shorter_record, 6, "its call is on record with 2 sampled tokens, not 3"),
        (other_prompt, 4, "its call is on record with a prompt of 3 tokens, not 4"),
    ],
)
def test_the_ledger_names_a_token_that_it_cannot_trace(damage, position, why):
    broken = episode("a", 1, 0.0, [(7, 8, 9), (5,)])
    make([episode("a", 0, 1.0), broken])
    damage(broken)
    with pytest.raises(LedgerError) as caught:
        make([episode("a", 0, 1.0), broken])
    assert str(caught.value) == f"Episode a:1, call a-1-0, token at position {position}: {why}."
    assert (caught.value.episode, caught.value.call, caught.value.position) == ("a:1", "a-1-0", position)


def test_the_ledger_refuses_tokens_of_other_weights():
    why = "token at position 4: it was sampled by weights of version 3, but those that sample this call have version 4"
    with pytest.raises(LedgerError, match=f"Episode a:1, call a-1-0, {why}"):
        make([episode("a", 0, 1.0, version=4), episode("a", 1, 0.0, version=3)], version=4)


def test_every_sampled_token_is_trained_or_discarded_for_a_reason():
    best = episode("a", 0, 1.0, [(7, 8), (9, 9, 9)])
    worst = episode("a", 1, 0.0, [(9,)], metrics={"retried_tokens": 50})
    del best.trajectories[0].steps[1]  # nobody claims it
    worst.tree.add(PROMPT, Completion([5] * 4, [-0.5] * 4, "abort", -1), "a-1-0")  # cut off, then asked again
    ungraded = episode("a", 2, None, [(7,) * 5])
    easy = [episode("b", i, 1.0, [(6,) * 3]) for i in range(2)]
    batch = make([best, worst, ungraded, *easy])
    found = {name: value for name, value in batch.metrics.items() if name.startswith("discarded") or "_tokens" in name}
    assert found == {
        "sampled_tokens": 2 + 3 + 1 + 4 + 5 + 6 + 50,
        "trained_tokens": 2 + 1,
        "discarded_tokens": 68,
        "discarded/unclaimed": 3,
        "discarded/aborted": 4,
        "discarded/ungraded": 5,
        "discarded/no_signal": 6,
        "discarded/retried": 50,
        "context_tokens": 4,
        "reread_tokens": 0,
    }
    fates = [batch.fate(worst, node) for node in worst.tree.nodes if node.sampled]
    assert fates == ["trained", "aborted"]
    member = batch.members["a:0", "a-0-0"]
    assert (member.reward, member.advantages, member.weight) == (1.0, {"a-0-0": 0.5}, 1 / 3)
