"""Reading request fields: whatever JSON arrives is understood or refused by name, never an accident."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minirllm.dialects import DIALECTS
from minirllm.dialects.fields import Fields, shown
from minirllm.errors import RequestError
from minirllm.types import ModelRequest

NAMES = """
    messages prompt tools tool_choice temperature top_p top_k min_p seed stop n max_tokens logprobs top_logprobs stream
    stream_options response_format model logit_bias functions best_of echo role content tool_calls name type text
    function arguments parameters json_schema schema include_usage stop_token_ids
"""
NAME = st.sampled_from(NAMES.split())
WORD = st.sampled_from(["user", "assistant", "tool", "function", "text", "auto", "required", "json_schema", "object"])
LEAF = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | WORD
JSON = st.recursive(LEAF, lambda any_: st.lists(any_, max_size=3) | st.dictionaries(NAME, any_, max_size=4))


def outcome(dialect, body) -> ModelRequest | str:
    try:
        return dialect.parse(body)
    except RequestError as problem:
        return problem.message


@pytest.mark.parametrize("dialect", DIALECTS.values(), ids=DIALECTS)
@given(body=st.dictionaries(NAME, JSON, max_size=5), message=JSON, tool=JSON)
def test_any_body_is_understood_or_refused_in_a_sentence(dialect, body, message, tool) -> None:
    users = [{"role": "user"}]
    for candidate in (body, {**body, "messages": [message], "prompt": "x"}, {"messages": users, "tools": [tool]}):
        said = outcome(dialect, candidate)
        if isinstance(said, str):
            assert 10 < len(said) < 2000
        else:
            assert 0 <= said.params.temperature <= 2
            assert said.n >= 1


def test_errors_name_the_field_and_show_the_value() -> None:
    fields = Fields({"a": 3, "b": "x" * 500, "c": [1] * 99}, "messages[2]")
    with pytest.raises(RequestError, match=r"^messages\[2\]\.a must be an integer of at least 4, got 3\.$"):
        fields.integer("a", 4)
    with pytest.raises(RequestError) as caught:
        fields.number("b", 0, 1)
    assert caught.value.param == "messages[2].b"
    assert len(caught.value.message) < 150
    assert shown([1] * 99) == "a list of 99"
    assert shown({"a": 1}) == "an object of 1"
