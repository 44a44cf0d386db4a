"""Kept answers: found by id, forgotten when told to or when there are too many, each with all that was said before."""

from __future__ import annotations

from minirllm.dialects.kept import Kept
from minirllm.types import Message, Step

ASK, SAID, MORE, DONE = (
    Message(role, text)
    for role, text in [("user", "hi"), ("assistant", "hello"), ("user", "more"), ("assistant", "done")]
)
STEPS = [
    Step(id="a", messages=[ASK], response=SAID),
    Step(id="b", messages=[MORE], parent="a", response=DONE),
    Step(id="c", messages=[MORE], response=SAID),
]


def test_an_answer_is_found_by_its_id_until_it_is_forgotten() -> None:
    kept = Kept(STEPS)
    body = {"id": "resp_a", "output": [{"text": "hello"}]}
    kept.keep("resp_a", "a", body)
    body["output"] = []  # what was kept is what was given
    assert kept.body("resp_a") == {"id": "resp_a", "output": [{"text": "hello"}]}
    assert kept.body("a") is None
    kept.forget("resp_a")
    kept.forget("resp_a")
    assert kept.body("resp_a") is None


def test_a_conversation_is_everything_up_to_the_answer() -> None:
    steps = STEPS[:1]
    kept = Kept(steps)
    steps += STEPS[1:]  # the session goes on
    for id in "abc":
        kept.keep(id, id, {})
    assert kept.conversation("a") == [ASK, SAID]
    assert kept.conversation("b") == [ASK, SAID, MORE, DONE]
    assert kept.conversation("c") == [MORE, SAID]


def test_the_oldest_go_first_and_memory_is_bounded() -> None:
    kept = Kept([], most=100)
    for number in range(1000):
        kept.keep(f"r{number}", "", {"x": "y" * 30})  # 40 characters each
        kept.keep(f"r{number}", "", {"x": "y" * 30})  # given again: counted once
        known = [n for n in range(number + 1) if kept.body(f"r{n}") is not None]
        assert known == list(range(max(0, number - 1), number + 1))
    kept.keep("large", "", {"x": "y" * 500})
    assert kept.body("large") == {"x": "y" * 500}
    assert kept.body("r999") is None
    kept.keep("small", "", {"x": ""})
    assert [kept.body("large"), kept.body("small")] == [None, {"x": ""}]
