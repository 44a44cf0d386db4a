"""Requests of the Messages dialect: what clients send is understood, what would be lost is refused."""

from __future__ import annotations

import json
import math

import pytest

from minirllm.dialects import chat, messages
from minirllm.errors import RequestError
from minirllm.types import Message, ModelRequest, ToolCall
from tests.bodies import names_each, refusing

USER = {"role": "user", "content": "hi"}
SCHEMA = {"type": "object", "properties": {"cmd": {"type": "string"}}}
TOOL = {"name": "run", "description": "Runs it.", "input_schema": SCHEMA}
(COUNT,) = messages.COUNT


def parse(**fields) -> ModelRequest:
    return messages.parse({"model": "m", "max_tokens": 10, "messages": [USER], **fields})


def said(*blocks: dict, role: str = "user") -> list[Message]:
    """What a message of these blocks becomes; a last word by the user follows it."""
    return parse(messages=[{"role": role, "content": list(blocks)}, USER]).messages[:-1]


refused = refusing(parse)


def text(value: str, **more) -> dict:
    return {"type": "text", "text": value, **more}


@pytest.mark.parametrize("system", ["be brief", [text("be brief", cache_control={"type": "ephemeral"})]])
def test_the_system_prompt_is_a_string_or_blocks(system) -> None:
    assert parse(system=system).messages == [Message("system", "be brief"), Message("user", "hi")]


def test_system_blocks_are_joined_by_lines_and_an_empty_system_prompt_is_none() -> None:
    assert parse(system=[text("a"), text("b")]).messages[0] == Message("system", "a\nb")
    for nothing in ("", None, [], [text("")]):
        assert parse(system=nothing).messages == [Message("user", "hi")]


def test_a_system_entry_may_stand_among_the_messages() -> None:
    entry = {"role": "system", "content": [text("the date")]}
    assert parse(messages=[USER, entry]).messages == [Message("user", "hi"), Message("system", "the date")]


@pytest.mark.parametrize(
    "content", ["hi", [text("hi")], [text("hi", cache_control={"type": "ephemeral", "ttl": "1h"})]]
)
def test_a_string_and_one_block_and_a_moving_cache_control_are_the_same(content) -> None:
    assert parse(messages=[{"role": "user", "content": content}]) == parse()


@pytest.mark.parametrize("content", ["", None, [], [text("")], ...])
def test_no_content_in_any_spelling_is_empty_text(content) -> None:
    message = {"role": "user", **({} if content is ... else {"content": content})}
    assert parse(messages=[message]).messages == [Message("user", "")]


def test_an_assistant_turn_with_thinking_text_and_calls() -> None:
    blocks = [
        {"type": "thinking", "thinking": "hm", "signature": "s"},
        {"type": "redacted_thinking", "data": "opaque"},
        text("I run it"),
        {"type": "tool_use", "id": "a", "name": "run", "input": {"cmd": "é"}},
        {"type": "tool_use", "id": "b", "name": "run"},
        text("and wait"),
    ]
    assert said(*blocks, role="assistant") == [
        Message(
            "assistant",
            "I run it\nand wait",
            (ToolCall("a", "run", '{"cmd": "é"}'), ToolCall("b", "run", "{}")),
            reasoning="hm",
        )
    ]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (0, 2, 1)])
def test_results_stand_before_the_text_of_their_message_wherever_they_were(order) -> None:
    blocks = [
        {"type": "tool_result", "tool_use_id": "a", "content": "one"},
        {"type": "tool_result", "tool_use_id": "b", "content": [text("two"), text("lines")]},
        text("and now?"),
    ]
    assert said(*(blocks[i] for i in order)) == [
        Message("tool", "one", tool_call_id="a"),
        Message("tool", "two\nlines", tool_call_id="b"),
        Message("user", "and now?"),
    ]


def test_results_alone_leave_no_empty_user_message() -> None:
    assert said({"type": "tool_result", "tool_use_id": "a"}) == [Message("tool", "", tool_call_id="a")]
    assert said({"type": "tool_result", "tool_use_id": "a", "content": []}, text("")) == [
        Message("tool", "", tool_call_id="a")
    ]


def test_a_failed_result_says_so_to_the_model() -> None:
    failed = {"type": "tool_result", "tool_use_id": "a", "content": "no such file", "is_error": True}
    assert said(failed)[0].content == "Error: no such file"
    assert said({**failed, "is_error": False})[0].content == "no such file"


def test_a_reference_to_a_tool_reads_as_its_name() -> None:
    found = {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "tool_reference", "tool_name": "run"}]}
    assert said(found)[0].content == "run"


def test_tools_become_function_tools() -> None:
    request = parse(tools=[TOOL, {"name": "late", "defer_loading": True, "type": "custom", "cache_control": None}])
    assert request.tools == [
        {"type": "function", "function": {"name": "run", "description": "Runs it.", "parameters": SCHEMA}},
        {"type": "function", "function": {"name": "late"}},
    ]
    function = {"name": "run", "description": "Runs it.", "parameters": SCHEMA}
    spoken = chat.parse({"messages": [USER], "tools": [{"type": "function", "function": function}]})
    assert json.dumps(parse(tools=[TOOL]).tools) == json.dumps(spoken.tools)  # the order of keys shows in the prompt


def test_tool_choice_forms() -> None:
    named = {"type": "function", "function": {"name": "run"}}
    kinds = [None, {"type": "auto", "disable_parallel_tool_use": True}, {"type": "any"}, {"type": "none"}]
    choices = [parse(tools=[TOOL], tool_choice=choice).tool_choice for choice in kinds]
    assert choices == ["auto", "auto", "required", "none"]
    assert parse(tools=[TOOL], tool_choice={"type": "tool", "name": "run"}).tool_choice == named
    assert parse(tool_choice={"type": "auto"}).tool_choice == "auto"


def test_sampling_fields_arrive() -> None:
    request = parse(
        max_tokens=32000, temperature=0, top_p=0.5, top_k=7, stop_sequences=["END", "\n\n"], stream=True, seed=3
    )
    params = request.params
    assert (params.max_tokens, params.temperature, params.top_p, params.top_k) == (32000, 0.0, 0.5, 7)
    assert (params.stop, params.seed, request.stream) == (("END", "\n\n"), 3, True)
    assert request.asked == {"max_tokens", "temperature", "top_p", "top_k", "stop", "seed"}
    tokens = parse(return_token_ids=True, logprobs=True, top_logprobs=2)
    assert (tokens.return_token_ids, tokens.logprobs, tokens.params.top_logprobs) == (True, True, 2)


@pytest.mark.parametrize("thinking", ["adaptive", "disabled", "enabled", "between_tools"])
def test_what_agents_send_besides_asks_for_nothing(thinking) -> None:
    others = {
        "thinking": {"type": thinking, "budget_tokens": 1024, "display": "omitted"},
        "metadata": {"user_id": '{"session_id": "s"}'},
        "context_management": {"edits": [{"type": "clear_thinking_20251015"}]},
        "output_config": {"effort": "high", "format": None},
        "cache_control": {"type": "ephemeral"},
        "service_tier": "auto",
        "mcp_servers": [],
        "anything": 1,
    }
    names = "system tools tool_choice temperature top_p top_k stop_sequences stream thinking "
    names += "output_config output_format logprobs return_token_ids"
    assert parse(**others) == parse(**dict.fromkeys(names.split())) == parse()


def test_a_schema_for_the_answer_is_kept_under_either_name() -> None:
    form = {"type": "json_schema", "schema": SCHEMA}
    assert parse(output_config={"format": form}).response_format == form
    assert parse(output_format=form).response_format == form
    broken = {"type": "json_schema", "schema": {"type": 5}}
    assert refused(output_config={"format": broken}).param == "output_config.format.schema"


def test_counting_needs_no_limit_and_may_end_with_the_assistant() -> None:
    body = {"model": "m", "messages": [USER, {"role": "assistant", "content": "so far"}]}
    assert messages.parse(body, COUNT).messages[-1] == Message("assistant", "so far")
    assert messages.COUNT[COUNT](7) == {"input_tokens": 7}
    with pytest.raises(RequestError, match="prefill"):
        messages.parse(body)


WRONG = {
    "messages": [[], None, "hi", {}],
    "system": [5, {"type": "text", "text": "x"}],
    "max_tokens": [0, -1, 1.5, "9", True],
    "temperature": [-0.1, 2.1, math.nan, "1", True],
    "top_p": [1.5],
    "top_k": [-2, 1.5],
    "stop_sequences": [5, ["a", 1], [""], ["x"] * 17],
    "stream": ["yes", 1],
    "tools": [{}, "run"],
    "tool_choice": ["auto", {"type": "any"}, {"type": "tool", "name": "run"}],
    "thinking": ["enabled"],
    "output_config": ["json"],
    "output_format": ["json"],
    "mcp_servers": [[{"type": "url", "url": "http://x", "name": "x"}]],
    "top_logprobs": [2],
    "return_token_ids": ["yes"],
}


test_a_wrong_value_is_refused_by_name = names_each(refused, WRONG)


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ("hi", "messages[0]"),
        ({"content": "x"}, "messages[0].role"),
        ({"role": "tool", "content": "x"}, "messages[0].role"),
        ({"role": ["user"], "content": "x"}, "messages[0].role"),
        ({"role": "user", "content": 5}, "messages[0].content"),
        ({"role": "user", "content": text("x")}, "messages[0].content"),
        ({"role": "user", "content": ["x"]}, "messages[0].content[0]"),
        ({"role": "user", "content": [{"text": "x"}]}, "messages[0].content[0].type"),
        ({"role": "user", "content": [text(3)]}, "messages[0].content[0].text"),
        ({"role": "user", "content": [text("x"), {"type": "image", "source": {}}]}, "messages[0].content[1].type"),
        ({"role": "user", "content": [{"type": "document", "source": {}}]}, "messages[0].content[0].type"),
        ({"role": "user", "content": [{"type": "tool_use", "name": "f"}]}, "messages[0].content[0].type"),
        ({"role": "user", "content": [{"type": "thinking", "thinking": "x"}]}, "messages[0].content[0].type"),
        ({"role": "assistant", "content": [{"type": "tool_result"}]}, "messages[0].content[0].type"),
        ({"role": "assistant", "content": [{"type": "server_tool_use"}]}, "messages[0].content[0].type"),
        ({"role": "assistant", "content": [{"type": "tool_use", "id": "a"}]}, "messages[0].content[0].name"),
        (
            {"role": "assistant", "content": [{"type": "tool_use", "name": "f", "input": "x"}]},
            "messages[0].content[0].input",
        ),
        (
            {"role": "user", "content": [{"type": "tool_result", "content": [{"type": "image"}]}]},
            "messages[0].content[0].content[0].type",
        ),
        ({"role": "user", "content": [{"type": "tool_result", "content": 4}]}, "messages[0].content[0].content"),
        ({"role": "user", "content": [{"type": "tool_result", "is_error": "no"}]}, "messages[0].content[0].is_error"),
    ],
)
def test_a_wrong_message_is_refused_by_its_place(message, param) -> None:
    assert refused(messages=[message]).param == param


def test_an_image_is_refused_in_words_that_say_why() -> None:
    problem = refused(messages=[{"role": "user", "content": [{"type": "image", "source": {}}]}])
    assert problem.message == "messages[0].content[0].type 'image' is not supported here: this model reads text only."


@pytest.mark.parametrize(
    ("tool", "param"),
    [
        ({"type": "web_search_20250305", "name": "web_search"}, "tools[0].type"),
        ({"type": "bash_20250124", "name": "bash"}, "tools[0].type"),
        ({"name": ""}, "tools[0].name"),
        ({"name": "f", "description": 5}, "tools[0].description"),
        ({"name": "f", "input_schema": []}, "tools[0].input_schema"),
    ],
)
def test_wrong_tools_are_refused_by_their_place(tool, param) -> None:
    assert refused(tools=[tool]).param == param


def test_a_choice_of_a_tool_that_is_not_there_is_refused() -> None:
    assert refused(tools=[TOOL], tool_choice={"type": "tool", "name": "other"}).param == "tool_choice"
    assert refused(tools=[TOOL], tool_choice={"type": "tool"}).param == "tool_choice.name"
    assert refused(tools=[TOOL], tool_choice={"type": "required"}).param == "tool_choice.type"
    assert refused(thinking={"type": "much"}).param == "thinking.type"


@pytest.mark.parametrize("body", [[], "x", 5, None])
def test_the_body_must_be_an_object(body) -> None:
    with pytest.raises(RequestError, match="The body must be a JSON object"):
        messages.parse(body)
