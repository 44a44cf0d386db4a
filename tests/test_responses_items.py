"""Items and tools of the Responses API: what clients really send, read as messages; messages written as items."""

from __future__ import annotations

import json

import pytest

from minirllm.dialects.responses_items import Tools, as_input, items_of, messages_of
from minirllm.errors import RequestError
from minirllm.types import Message, ToolCall

RUN = {"type": "function", "name": "run", "parameters": {"type": "object"}, "strict": False}
PATCH = {"type": "custom", "name": "patch", "description": "Edits files.", "format": {"type": "text"}}
AGENTS = {
    "type": "namespace", "name": "agents", "description": "Helpers.",
    "tools": [{"type": "function", "name": "spawn", "parameters": {}}, {**RUN, "description": "other"}],
}  # fmt: skip
CALL = {"type": "function_call", "call_id": "call_1", "name": "run", "arguments": '{"cmd": "ls"}'}
OUT = {"type": "function_call_output", "call_id": "call_1", "output": "files"}
THOUGHT = {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "hm"}]}


def said(text: str, **more) -> dict:
    return {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text, **more}]}


def read(*items, tools=(), find=lambda id: None) -> list[Message]:
    return messages_of(items, Tools(tools), find)


# ---- items -> messages ----


@pytest.mark.parametrize("role", ["system", "developer", "user"])
@pytest.mark.parametrize("head", [{}, {"type": "message"}, {"type": "message", "id": "msg_1", "status": "completed"}])
@pytest.mark.parametrize(
    "content", ["a\nb", [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]]
)
def test_messages_with_and_without_a_type(role, head, content) -> None:
    assert read({**head, "role": role, "content": content}) == [Message(role.replace("developer", "system"), "a\nb")]


@pytest.mark.parametrize("content", ["", None, [], [{"type": "output_text", "text": ""}], ...])
def test_no_content_in_any_spelling_is_empty_text(content) -> None:
    assert read({"role": "assistant", **({} if content is ... else {"content": content})}) == [Message("assistant")]


def test_a_refusal_is_what_the_model_said() -> None:
    assert read({"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}) == [
        Message("assistant", "no")
    ]


def test_what_the_model_said_in_one_turn_is_one_message() -> None:
    second = {**CALL, "call_id": "call_2"}
    call, other = ToolCall("call_1", "run", '{"cmd": "ls"}'), ToolCall("call_2", "run", '{"cmd": "ls"}')
    assert read(THOUGHT, said("I look."), CALL, second, OUT, {**OUT, "call_id": "call_2", "output": None}) == [
        Message("assistant", "I look.", (call, other), reasoning="hm"),
        Message("tool", "files", tool_call_id="call_1"),
        Message("tool", "", tool_call_id="call_2"),
    ]
    assert read(CALL, said("behind")) == [Message("assistant", "behind", (call,))]
    assert read(said("a"), CALL, said("\nb")) == [Message("assistant", "a\nb", (call,))]
    assert read(THOUGHT, said("")) == [Message("assistant", reasoning="hm")]


def test_turns_that_meet_stay_apart() -> None:
    call = ToolCall("call_1", "run", '{"cmd": "ls"}')
    assert read(said("a"), said("b")) == [Message("assistant", "a"), Message("assistant", "b")]
    assert read(said("a"), THOUGHT, said("b")) == [Message("assistant", "a"), Message("assistant", "b", reasoning="hm")]
    assert read(CALL, OUT, CALL, OUT) == [Message("assistant", "", (call,)), Message("tool", "files", (), "call_1")] * 2
    assert read(CALL, {"role": "user", "content": "x"}, said("b")) == [
        Message("assistant", "", (call,)), Message("user", "x"), Message("assistant", "b"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("item", "text"),
    [
        ({"summary": [], "encrypted_content": None}, ""),
        ({"summary": [{"type": "summary_text", "text": "a"}, {"type": "summary_text", "text": "b"}]}, "a\nb"),
        ({"summary": [], "content": [{"type": "reasoning_text", "text": "c"}]}, "c"),
        (
            {"summary": [{"type": "summary_text", "text": "a"}], "content": [{"type": "reasoning_text", "text": "c"}]},
            "c",
        ),
        ({"encrypted_content": "gibberish"}, ""),
    ],
)
def test_reasoning_that_is_sent_back(item, text) -> None:
    assert read({"type": "reasoning", **item}, said("x")) == [Message("assistant", "x", reasoning=text)]


def test_outputs_of_tools_are_text_or_parts() -> None:
    parts = [{"type": "input_text", "text": "a"}, {"type": "output_text", "text": "b"}]
    assert [read({**OUT, "output": output})[0].content for output in ("", None, "x", parts)] == ["", "", "x", "a\nb"]


def test_an_item_that_is_referred_to_stands_there_itself() -> None:
    stored = {"rs_1": THOUGHT, "msg_1": said("I look."), "fc_1": CALL}
    references = [{"type": "item_reference", "id": id} for id in stored]
    assert read(*references, OUT, find=stored.get) == read(*stored.values(), OUT)
    assert read({"id": "msg_1"}, find=stored.get) == read(stored["msg_1"])


WRONG = [
    ("hi", "input[0]"),
    ({}, "input[0].type"),
    ({"type": "message", "content": "x"}, "input[0].role"),
    ({"role": "robot", "content": "x"}, "input[0].role"),
    ({"role": ["user"]}, "input[0].role"),
    ({"role": "user", "content": 5}, "input[0].content"),
    ({"role": "user", "content": ["x"]}, "input[0].content[0]"),
    ({"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}, "input[0].content[0].type"),
    ({"role": "user", "content": [{"type": "input_text", "text": 5}]}, "input[0].content[0].text"),
    ({"type": "reasoning", "summary": [{"type": "x"}]}, "input[0].summary[0].type"),
    ({"type": "function_call", "arguments": "{}"}, "input[0].name"),
    ({**CALL, "arguments": {"a": 1}}, "input[0].arguments"),
    ({**CALL, "call_id": 5}, "input[0].call_id"),
    ({"type": "custom_tool_call", "name": "patch", "input": {}}, "input[0].input"),
    ({**OUT, "output": {"content": "x"}}, "input[0].output"),
    ({"type": "item_reference", "id": "msg_9"}, "input[0].id"),
    ({"type": "computer_call"}, "input[0].type"),
    ({"type": ["message"]}, "input[0].type"),
]


@pytest.mark.parametrize(("item", "param"), WRONG)
def test_a_wrong_item_is_refused_by_its_place(item, param) -> None:
    with pytest.raises(RequestError) as caught:
        read(item)
    assert (caught.value.status, caught.value.param) == (400, param)
    assert caught.value.message.endswith(".")


# ---- tools ----


def test_tools_as_the_model_is_told_of_them() -> None:
    tools = Tools([RUN, PATCH, AGENTS, {"type": "web_search", "external_web_access": False}, {"type": "tool_search"}])
    assert tools.shown[0] == {"type": "function", "function": {"name": "run", "parameters": {"type": "object"}}}
    assert tools.shown[1]["function"]["name"] == "patch"
    assert tools.shown[1]["function"]["parameters"]["required"] == ["input"]
    assert [tool["function"]["name"] for tool in tools.shown] == ["run", "patch", "spawn", "agents__run"]
    assert [tools.name("run"), tools.name("run", "agents"), tools.name("spawn", "agents")] == [
        "run", "agents__run", "spawn",
    ]  # fmt: skip
    assert tools.name("gone", "elsewhere") == "gone"
    first = Tools([AGENTS, RUN])  # a plain tool keeps its name, wherever it stands
    assert [tool["function"]["name"] for tool in first.shown] == ["spawn", "agents__run", "run"]


@pytest.mark.parametrize(
    ("tool", "param"),
    [
        ("run", "tools[0]"),
        ({}, "tools[0].type"),
        ({"type": "file_search"}, "tools[0].type"),
        ({"type": "mcp", "server_label": "x"}, "tools[0].type"),
        ({"type": "function"}, "tools[0].name"),
        ({"type": "function", "function": {"name": "run"}}, "tools[0].name"),
        ({**RUN, "parameters": []}, "tools[0].parameters"),
        ({**RUN, "description": 5}, "tools[0].description"),
        ({"type": "namespace", "name": "a", "tools": {}}, "tools[0].tools"),
        ({"type": "namespace", "tools": [RUN]}, "tools[0].name"),
        ({**AGENTS, "tools": [AGENTS]}, "tools[0].tools[0].type"),
    ],
)
def test_a_wrong_tool_is_refused_by_its_place(tool, param) -> None:
    with pytest.raises(RequestError) as caught:
        Tools([tool])
    assert caught.value.param == param


# ---- messages -> items ----


def test_messages_as_items_and_back_are_the_same() -> None:
    tools = Tools([RUN, PATCH, AGENTS])
    messages = [
        Message("system", "be brief"),
        Message("user", "go"),
        Message(
            "assistant",
            "I look.",
            (
                ToolCall("c1", "run", '{"cmd": "ls"}'),
                ToolCall("c2", "patch", '{"input": "*** \\"é\\""}'),
                ToolCall("c3", "agents__run", "{}"),
            ),
            reasoning="hm",
        ),
        Message("tool", "files", tool_call_id="c1"),
        Message("tool", "ok", tool_call_id="c2"),
        Message("assistant", ""),
        Message("assistant", reasoning="only thoughts"),
        Message("user", "more"),
    ]
    items = items_of(messages, tools, "x")
    assert len({item["id"] for item in items}) == len(items)
    assert [item["type"] for item in items] == [
        "message", "message", "reasoning", "message", "function_call", "custom_tool_call", "function_call",
        "function_call_output", "custom_tool_call_output", "message", "reasoning", "message",
    ]  # fmt: skip
    assert [(item["name"], item.get("namespace")) for item in items[4:7]] == [
        ("run", None), ("patch", None), ("run", "agents"),
    ]  # fmt: skip
    assert items[5]["input"] == '*** "é"'
    back = messages_of(items, tools, lambda id: None)
    assert json.loads(back[2].tool_calls[1].arguments) == {"input": '*** "é"'}
    assert back == messages


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"input": "a\\nb"}', "a\nb"),
        ('{"patch": "a"}', "a"),
        ('{"input": 5}', '{"input": 5}'),
        ('{"a": "x", "b": "y"}', '{"a": "x", "b": "y"}'),
        ("[1]", "[1]"),
        ("not json", "not json"),
        ("[" * 100_000, "[" * 100_000),
    ],
)
def test_what_a_custom_tool_is_given(arguments, text) -> None:
    assert as_input(arguments) == text
