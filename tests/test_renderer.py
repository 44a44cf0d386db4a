"""Splicing behind sampled tokens and reading sampled turns back, on real and fixture templates."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers import models as token_models
from transformers import PreTrainedTokenizerFast

from minirllm.conversation import normalized
from minirllm.models import tiny
from minirllm.renderer import Renderer
from minirllm.types import Message
from tests.chat_templates import ALL, FAITHFUL, STYLES, SYSTEM, TOOLS, USER, call, calling, renderer, tokenizer, turn
from tests.deltas import check_calls

# ---- encoding ----


def test_a_long_text_is_encoded_without_a_word() -> None:
    """The endpoint itself says what is too long, to whom it concerns."""
    _, its = tiny.build()
    its.model_max_length = 10
    said: list[logging.LogRecord] = []
    handler, logger = logging.Handler(), logging.getLogger("transformers")
    handler.emit = said.append  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        assert len(Renderer(its).prompt([Message("user", "x" * 100)])) > 100
    finally:
        logger.removeHandler(handler)
    assert said == []


# ---- extending ----

ANY_ID = st.integers(0, 10**9)  # modulo the vocabulary
words = st.text(st.sampled_from("ab é😀.\n<{"), min_size=1, max_size=8).map(lambda text: f"x{text}y")
extras = st.lists(st.tuples(st.sampled_from(["user", "user", "tool"]), words), min_size=1, max_size=3)


def added(drawn: list[tuple[str, str]]) -> list[Message]:
    return [Message(role, text, tool_call_id="call_0" if role == "tool" else None) for role, text in drawn]


@pytest.mark.parametrize("name", ALL)
@settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(rounds=st.lists(st.tuples(st.lists(ANY_ID, max_size=6), st.booleans(), extras), min_size=1, max_size=3))
def test_extending_always_starts_with_the_held_ids(name: str, rounds: list) -> None:
    """Whatever was sampled. And what is added ends like a prompt: with the beginning of an assistant turn."""
    it = renderer(name)
    messages = [SYSTEM, USER]
    ids = it.prompt(messages, TOOLS)
    beginning = ids[-1:] if name == "mistral" else ids[-3:]
    for sampled, ended, drawn in rounds:
        sampled = [*(id % len(it.tokenizer) for id in sampled), *([min(it.eos_ids)] if ended else [])]
        ids, answer = [*ids, *sampled], it.parse(sampled, TOOLS)
        new = [*added(drawn), USER]
        extended = it.extend(ids, [*messages, answer], new, TOOLS)
        assert extended is not None  # these templates can all be extended
        assert extended[: len(ids)] == ids
        assert extended[-len(beginning) :] == beginning
        assert all(text in it.decode(extended[len(ids) :]) for role, text in drawn if role == "user")
        messages, ids = [*messages, answer, *new], extended


@pytest.mark.parametrize("name", FAITHFUL)
@settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(rounds=st.lists(st.tuples(words, st.booleans(), extras), min_size=1, max_size=3))
def test_extending_is_rendering_when_the_turn_was_as_the_template_writes_it(name: str, rounds: list) -> None:
    it = renderer(name)
    messages = [SYSTEM, USER]
    ids = it.prompt(messages, TOOLS)
    for text, ended, drawn in rounds:
        ids = [*ids, *it.encode(text), *([min(it.eos_ids)] if ended else [])]  # a cut turn is closed by us
        extended = it.extend(ids, [*messages, Message("assistant", text)], added(drawn), TOOLS)
        messages = [*messages, Message("assistant", text), *added(drawn)]
        assert extended is not None
        assert it.decode(extended) == it.decode(it.prompt(messages, TOOLS))
        ids = extended


def test_tool_turns_extend_natively() -> None:
    it = renderer("qwen25")
    ids = it.prompt([USER], TOOLS)
    sampled = turn(it, '<tool_call>\n{"name": "weather",  "arguments": {"city":"Rome"}}\n</tool_call>')
    answer, result = it.parse(sampled, TOOLS), Message("tool", "sunny", tool_call_id="call_0")
    extended = it.extend(ids + sampled, [USER, answer], [result], TOOLS)
    assert extended is not None
    assert it.decode(extended[len(ids + sampled) :]) == (
        "\n<|im_start|>user\n<tool_response>\nsunny\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
    assert it.prompt([USER, answer, result], TOOLS)[: len(ids + sampled)] != ids + sampled  # its spacing would be lost


def test_history_that_the_template_rewrites() -> None:
    """Qwen3 drops old reasoning: kept as sampled, or a re-render that no longer starts with the held ids."""
    first, text = "<think>\nhm\n</think>\n\nYes.", "<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    for name, begins in (("qwen3", ""), ("thinking_xml", "<think>\n")):
        keep, rerender = renderer(name), renderer(name, "rerender")
        sampled = turn(keep, first.removeprefix(begins))
        ids, answer = keep.prompt([USER]), keep.parse(sampled)
        assert (answer.reasoning, answer.content) == ("hm", "Yes.")
        kept = keep.extend(ids + sampled, [USER, answer], [USER])
        assert kept is not None
        assert keep.decode(kept) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n" + first + text + begins
        assert rerender.extend(ids + sampled, [USER, answer], [USER]) is None
        third = turn(keep, "No.")  # the second question changes how the template would write the first turn
        assert keep.extend(kept + third, [USER, answer, USER, Message("assistant", "No.")], [USER]) is not None


def test_rerender_extends_what_the_template_leaves_alone() -> None:
    it = renderer("qwen25", "rerender")
    ids = it.prompt([USER]) + turn(it, "Yes.")
    said = [USER, Message("assistant", "Yes.")]
    assert it.extend(ids, said, [USER]) == it.prompt([*said, USER])
    assert it.extend(it.prompt([USER]) + turn(it, "Yes. "), said, [USER]) is None


def test_a_turn_that_ended_in_another_end_token() -> None:
    it = Renderer(tokenizer("tiny"), eos_ids=[256])
    ids = [*it.prompt([USER]), *it.encode("Yes."), 256]
    extended = it.extend(ids, [USER, Message("assistant", "Yes.")], [USER])
    assert extended is not None
    assert it.decode(extended[len(ids) :]) == "\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("name", ["smollm2", *STYLES])
def test_what_cannot_be_proved_is_not_extended(name: str) -> None:
    it = renderer(name)
    said = [SYSTEM, USER, Message("assistant", "Yes.")]
    ids = it.prompt(said[:2], TOOLS) + turn(it, "Yes.")
    assert it.extend(ids, said, [USER], TOOLS) is not None
    other_tools = json.loads(json.dumps(TOOLS).replace("city", "town"))
    assert it.extend(ids, said, [USER], other_tools) is None
    assert it.extend(ids, [Message("system", "Be long."), *said[1:]], [USER], TOOLS) is None
    assert it.extend(ids, said, [], TOOLS) is None
    assert it.extend(ids, said[:2], [USER], TOOLS) is None
    assert it.extend([], said, [USER], TOOLS) is None
    assert it.extend(ids[3:], said, [USER], TOOLS) is None


def test_turns_without_a_special_token_at_their_end() -> None:
    begin = "{% if add_generation_prompt %}assistant: {% endif %}"
    plain = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    it = Renderer(tokenizer("tiny"), template=plain + begin)
    ids = it.prompt([USER]) + it.encode("Yes.")
    assert it.extend(ids, [USER, Message("assistant", "Yes")], [USER]) is None
    # a plain rendering that happens to start with the held ids is still proof
    assert it.extend(ids, [USER, Message("assistant", "Yes.")], [USER]) == ids + it.encode("\nuser: Hi\nassistant: ")


def test_a_template_that_counts_its_messages() -> None:
    counting = "<|im_start|>{{ messages | length }}<|im_end|>" + tiny.TEMPLATE
    it = Renderer(tokenizer("tiny"), template=counting)
    ids = it.prompt([USER]) + turn(it, "Yes.")
    assert it.extend(ids, [USER, Message("assistant", "Yes.")], [USER]) is None


# ---- reading turns ----

CALL = '{"name": "weather", "arguments": {"city": "é"}}'
PIECES = ["<think>", "</think>", "<tool_call>", "</tool_call>", CALL, "😀", " ", "\n", "a"]


def sampled_ids(it: Renderer, drawn: list) -> list[int]:
    return [id for one in drawn for id in (it.encode(one) if isinstance(one, str) else [one % len(it.tokenizer)])]


@pytest.mark.parametrize("name", ["smollm2", "tiny", "thinking_xml", "llama3", "mistral", "kimi_k2", "llama4"])
@settings(max_examples=50, deadline=None)
@given(
    drawn=st.lists(st.one_of(ANY_ID, st.sampled_from(PIECES)), max_size=30),
    stops=st.sampled_from([(), ("a",), ("\n\n", "😀")]),
    tools=st.sampled_from([(), TOOLS]),
)
def test_streams_concatenate_to_what_parse_returns(name: str, drawn: list, stops: tuple, tools: Any) -> None:
    it = renderer(name)
    ids = sampled_ids(it, drawn)
    stream = it.stream(tools, stops)
    deltas = [*(stream.push(id) for id in ids), stream.finish()]
    message = it.parse(ids, tools, stops)
    assert message == stream.message()
    assert message.content == "".join(delta.text for delta in deltas)
    assert message.reasoning == "".join(delta.reasoning for delta in deltas)
    check_calls(deltas, message)


@pytest.mark.parametrize("name", ["smollm2", "tiny"])
@settings(deadline=None)
@given(drawn=st.lists(ANY_ID, max_size=40))
def test_raw_streams_give_the_text_of_all_tokens(name: str, drawn: list) -> None:
    """Characters split over tokens, and bytes that are none, come out as when everything is decoded at once."""
    it = renderer(name)
    ids = sampled_ids(it, drawn)
    stream = it.stream(raw=True)
    text = "".join(stream.push(id).text for id in ids) + stream.finish().text
    assert text == it.decode([id for id in ids if id not in it.hidden_ids])


def test_characters_are_sent_when_they_are_whole() -> None:
    it = renderer("tiny")
    stream = it.stream()
    assert [stream.push(id).text for id in "é😀".encode()] == ["", "é", "", "", "", "😀"]
    assert [stream.push(id).text for id in b"\xe2\x82z"] == ["", "", "\ufffdz"]
    assert stream.push("é".encode()[0]).text == ""
    assert stream.finish().text == "\ufffd"


def test_decoders_that_treat_the_first_token_differently() -> None:
    """SentencePiece style: a space is part of the word, and decoding drops that of the first word only."""
    core = Tokenizer(token_models.WordLevel({"▁Hi": 0, "▁there": 1, "!": 2, "<end>": 3}, unk_token="!"))
    core.pre_tokenizer, core.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    core.add_special_tokens(["<end>"])
    words = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<end>")
    it = Renderer(words, template="{% for m in messages %}{{ m.content }}<end>{% endfor %}")
    stream = it.stream()
    assert [stream.push(id).text for id in (0, 1, 2, 1, 3)] == ["Hi", " there", "!", " there", ""]


def test_special_tokens_are_no_text_but_markers_are_read() -> None:
    it = renderer("llama3")
    ids = it.encode('<|python_tag|>{"name": "weather", "parameters": {"city": "Rome"}}<|eot_id|>')
    assert it.tokenizer.convert_tokens_to_ids("<|python_tag|>") in ids
    assert normalized(it.parse(ids, TOOLS), Message("assistant", tool_calls=(call(),)))
    chat = renderer("smollm2")
    assert chat.parse(chat.encode("a<|im_start|>b<|endoftext|><|im_end|>")).content == "ab"
    assert chat.token_text(2) == "<|im_end|>"


def test_broken_calls_come_back_as_text() -> None:
    it = renderer("tiny")
    message = it.parse(turn(it, 'ok <tool_call>{"name": "weather", }</tool_call>'), TOOLS)
    assert message == Message("assistant", 'ok <tool_call>{"name": "weather", }</tool_call>', malformed=True)
    assert it.parse(turn(it, '<tool_call>{"name": "f"}</tool_call>')).content == '<tool_call>{"name": "f"}</tool_call>'


@pytest.mark.parametrize("name", ["smollm2", "tiny"])
@settings(deadline=None)
@given(
    drawn=st.lists(st.one_of(ANY_ID, st.sampled_from(["ab", "b", "\n", "\nOb", "serv", "é", "é!", "😀"])), max_size=25),
    stops=st.lists(st.sampled_from(["ab", "b\n", "\nObserv", "é", "é!é", "😀", "\n\n"]), min_size=1, max_size=3),
)
def test_stop_check_fires_on_the_token_that_completes_a_stop_string(name: str, drawn: list, stops: list[str]) -> None:
    it = renderer(name)
    ids = sampled_ids(it, drawn)
    check = it.stop_check(stops)
    assert check is not None
    visible = [id for id in ids if id not in it.hidden_ids]
    fired = next((count for count in range(1, len(visible) + 1) if check(visible[:count])), None)
    naive = (count for count in range(1, len(visible) + 1) if any(stop in it.decode(visible[:count]) for stop in stops))
    assert fired == next(naive, None)
    if fired is not None:
        text = it.decode(visible[:fired])
        cut = min((text.index(stop) + len(stop), text.index(stop)) for stop in stops if stop in text)[1]
        stream = it.stream(raw=True, stops=stops)
        given = "".join(stream.push(id).text for id in visible[:fired]) + stream.finish().text
        assert given == text[:cut]


def test_stop_check_reads_only_the_end() -> None:
    it = renderer("tiny")
    assert it.stop_check(()) is None
    assert it.stop_check(("",)) is None
    check = it.stop_check(("END",))
    assert check is not None
    assert check(it.encode("the END"))
    assert not check(it.encode("END" + "." * 100))  # was there long ago: the engine asks after every token
    assert not check([])
    assert check([*it.encode("EN"), *[257] * 50, *it.encode("D")])  # hidden tokens in between do not count


# ---- sameness ----


@pytest.mark.parametrize(
    ("said", "sent", "same"),
    [
        (Message("user", "x"), Message("user", " x\n"), True),
        (Message("user", "x"), Message("assistant", "x"), False),
        (Message("user", "x y"), Message("user", "x  y"), False),
        (Message("assistant", "x", reasoning="why"), Message("assistant", "x"), True),
        (Message("assistant", "x", reasoning="why"), Message("assistant", "x", reasoning="why\n"), True),
        (Message("assistant", "x", reasoning="why"), Message("assistant", "x", reasoning="not"), False),
        (calling(call()), calling(call('{"city":"Rome"}', "z")), True),
        (calling(call()), calling(call('{"city": "Oslo"}')), False),
        (calling(call()), calling(call(), call()), False),
        (calling(call()), calling(), False),
        (Message("tool", "4", tool_call_id="a"), Message("tool", "4", tool_call_id="b", name="f"), True),
        (Message("assistant", "<x", malformed=True), Message("assistant", "<x"), True),
    ],
)
def test_same(said: Message, sent: Message, same: bool) -> None:
    assert normalized(said, sent) is same
    thoughts_left_out = bool(said.reasoning) > bool(sent.reasoning)  # nobody can send back what was not there
    assert normalized(sent, said) is (same and not thoughts_left_out)


def test_reading_at_one_go_decodes_each_token_twice_at_most() -> None:
    class Counting(Renderer):
        decoded = 0

        def decode(self, ids: Sequence[int]) -> str:
            self.decoded += len(ids)
            return super().decode(ids)

    it = Counting(tiny.build_tokenizer())
    ids = it.encode('<tool_call>{"name": "f"</tool_call>x<tool_call>' * 300)
    it.decoded = 0
    assert it.parse(ids, TOOLS) == renderer("tiny").parse(ids, TOOLS)
    assert it.decoded <= 2 * len(ids)
