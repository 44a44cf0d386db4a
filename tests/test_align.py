"""A teacher with another tokenizer: bytes, spans, prompts of its own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers import models as token_models
from transformers import PreTrainedTokenizerFast

from minirllm.config import Config
from minirllm.errors import ConfigError, RequestError, TeacherError
from minirllm.models import tiny
from minirllm.policy import Policy
from minirllm.renderer import Renderer
from minirllm.teachers import Reading, Scores, align, teacher
from minirllm.types import Message, Step
from tests.distilled import ASKED, DISTILL, said, steps


def merged() -> Any:
    """A tokenizer of another vocabulary: pairs of letters are tokens, too, and its turns end otherwise."""
    letters = tiny.byte_letters()
    pairs = ["th", "he", "in", "an", "ab", "cd"]
    vocab = {letter: byte for byte, letter in enumerate(letters)} | {pair: 256 + n for n, pair in enumerate(pairs)}
    core = Tokenizer(token_models.BPE(vocab=vocab, merges=[(pair[0], pair[1]) for pair in pairs]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>", clean_up_tokenization_spaces=False)
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}A:{{ m.content }}</s>{% else %}<s>{{ m.content }}\n"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}A:{% endif %}"
    )
    return tokenizer


def test_spans_by_hand() -> None:
    one, two = [b"a", b"bc", b"d", b"e"], [b"ab", b"c", b"de"]
    found = align.spans(one, two)
    assert found == [(slice(0, 2), slice(0, 2)), (slice(2, 4), slice(2, 3))]
    assert align.spans([b"a", b"", b"b"], [b"a", b"b"]) == [(slice(0, 2), slice(0, 1)), (slice(2, 3), slice(1, 2))]
    assert align.spans([b"ab"], [b"a", b"x"]) == []
    assert align.spans([], [b"a"]) == []


def test_bytes_of_tokens_in_both_spellings() -> None:
    spelled = align.token_bytes(merged())
    ids = merged().encode("the häß", add_special_tokens=False)
    assert b"".join(map(spelled, ids)) == "the häß".encode()
    assert spelled(merged().convert_tokens_to_ids("</s>")) == b"</s>"
    assert spelled(10**6) == b""
    core = Tokenizer(token_models.BPE(vocab={"\u2581": 0, "a": 1, "\u2581a": 2, "<0xC3>": 3}, merges=[("\u2581", "a")]))
    core.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    spelled = align.token_bytes(PreTrainedTokenizerFast(tokenizer_object=core))
    assert [spelled(id) for id in range(4)] == [b" ", b"a", b" a", b"\xc3"]
    core.decoder = decoders.WordPiece()
    with pytest.raises(TeacherError, match="does not say what the bytes of its tokens are"):
        align.token_bytes(PreTrainedTokenizerFast(tokenizer_object=core))


def test_an_answer_in_another_tokenizer_ends_where_it_is_no_text_any_more() -> None:
    ours, theirs = Renderer(tiny.build_tokenizer()), Renderer(merged())
    between = align.Aligner(ours, theirs)
    end = ours.turn([*ASKED, Message("assistant", "x")])[-1]
    answer, found = between([*b"xth", end])
    assert theirs.decode(answer) == "xth</s>"
    assert found == [(slice(0, 1), slice(0, 1)), (slice(1, 3), slice(1, 2)), (slice(3, 4), slice(2, 3))]
    answer, found = between([*b"th", 0xC3, *b"a", end])  # half a character: what follows has no place in a text
    assert (theirs.decode(answer), found) == ("th", [(slice(0, 2), slice(0, 1))])
    assert between([]) == ([], [])


class Fixed:
    """Scores that are given, of a teacher with the tokenizer `merged`."""

    def __init__(self, values: dict[str, list[float]]):
        self.renderer, self.facts, self.values = Renderer(merged()), {}, values
        self.read: list[Reading] = []

    async def score(self, tasks: Any, k: int) -> dict[str, Any]:
        self.read = [reading for rollouts in tasks for rollout in rollouts for reading in rollout]
        found = {}
        for reading, values in zip(self.read, self.values.values(), strict=True):
            nothing = np.zeros((len(values), k))
            found[reading.id] = Scores(np.array(values), nothing, nothing, np.array([value > -1 for value in values]))
        return found


async def test_the_tokens_of_a_span_share_what_the_teacher_thinks_of_it(student: tuple[Policy, Renderer]) -> None:
    policy, renderer = student
    episodes = said(policy, renderer, [*b"xth"], [*b"a", 0xFF])
    scorer = Fixed({"c0": [-0.5, -3.0], "c1": [-0.25]})
    config = Config(**{**DISTILL, "teacher": "elsewhere"})
    metrics = await teacher.Teacher(config, renderer, scorer, None, policy.vocab_size).teach(episodes)
    ours = [episode.tree.response(step.node)[1] for episode, step in zip(episodes, steps(episodes), strict=True)]
    share = (-3.0 - ours[0][1] - ours[0][2]) / 2
    assert steps(episodes)[0].advantage == pytest.approx([-0.5 - ours[0][0], share, share])
    assert steps(episodes)[1].advantage == pytest.approx([-0.25 - ours[1][0], 0.0])
    assert metrics["teacher_unaligned"] == 1
    assert metrics["teacher_agreement"] == pytest.approx(2 / 3)
    assert metrics["teacher_kl"] == pytest.approx(-(-3.75 - sum(ours[0]) - ours[1][0]) / 4)
    assert scorer.renderer.decode(scorer.read[0].prompt) == "<s>hi\nA:"
    nothing = said(policy, renderer, [0xFF])
    with pytest.raises(TeacherError, match="no token of this step has a beginning and an end in the teacher's tokens"):
        await teacher.Teacher(config, renderer, Fixed({"c0": []}), None, policy.vocab_size).teach(nothing)


async def test_what_another_template_cannot_say_is_told(student: tuple[Policy, Renderer]) -> None:
    policy, renderer = student
    scorer, config = Fixed({"c0": [-1.0]}), Config(**{**DISTILL, "teacher": "elsewhere"})
    raw = said(policy, renderer, [104])
    raw[0].trajectories[0].steps[0].messages = []
    with pytest.raises(TeacherError, match="call c0 of episode t:0 has a prompt without messages"):
        await teacher.Teacher(config, renderer, scorer, None, policy.vocab_size).teach(raw)
    scorer.renderer.prompt = _refuse  # type: ignore[method-assign]
    with pytest.raises(TeacherError, match="its chat template refuses call c0 of episode t:0: no such role"):
        await teacher.Teacher(config, renderer, scorer, None, policy.vocab_size).teach(said(policy, renderer, [104]))
    with pytest.raises(ConfigError, match="teacher_top_k needs a teacher of the student's vocabulary"):
        teacher.Teacher(Config(**{**DISTILL, "teacher_top_k": 2}), renderer, Fixed({}), None, policy.vocab_size)


def _refuse(*_: Any, **__: Any) -> str:
    raise RequestError("no such role")


def test_a_conversation_is_told_from_its_beginning() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    first = Step("a", messages=ASKED, response=Message("assistant", "one"), tools=tools)
    second = Step("b", parent="a", messages=[Message("user", "two")], response=Message("assistant", "three"))
    messages, found = teacher.conversation({"a": first, "b": second}, second)
    assert ([message.content for message in messages], found) == (["hi", "one", "two"], tools)
