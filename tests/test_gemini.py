"""Requests of the Gemini dialect: what is documented is understood, what would be lost is refused."""

from __future__ import annotations

import pytest

from minirllm.dialects import gemini
from minirllm.types import Message, ModelRequest, ToolCall
from tests.bodies import refusing

USER = {"role": "user", "parts": [{"text": "hi"}]}
SCHEMA = {"type": "object", "properties": {"cmd": {"type": "string"}}}
DECLARED = {"name": "run", "parametersJsonSchema": SCHEMA}
TOOLS = [{"functionDeclarations": [DECLARED]}]
GENERATE, STREAM, *_ = gemini.ROUTES
COUNT, _ = gemini.COUNT


def parse(route: str = GENERATE, **fields) -> ModelRequest:
    return gemini.parse({"contents": [USER], **fields}, route)


def configured(**config) -> ModelRequest:
    return parse(generationConfig=config)


refused = refusing(parse)


def test_a_conversation_with_all_its_parts() -> None:
    request = parse(
        systemInstruction={"role": "system", "parts": [{"text": "be"}, {"text": "brief"}]},
        contents=[
            {"parts": [{"text": "one"}, {"text": "two"}]},  # without a role it is the user's
            {
                "role": "model",
                "parts": [
                    {"text": "hm", "thought": True, "thoughtSignature": "s"},
                    {"text": "I run it"},
                    {"functionCall": {"id": "a", "name": "run", "args": {"cmd": "é"}}, "thoughtSignature": "s"},
                    {"functionCall": {"name": "run"}},
                ],
            },
            {
                "role": "user",
                "parts": [
                    {"text": "and now?"},
                    {"functionResponse": {"id": "a", "name": "run", "response": {"output": "a.txt"}}},
                ],
            },
        ],
    )
    assert request.messages == [
        Message("system", "be\nbrief"),
        Message("user", "one\ntwo"),
        Message(
            "assistant", "I run it", (ToolCall("a", "run", '{"cmd": "é"}'), ToolCall("", "run", "{}")), reasoning="hm"
        ),
        Message("tool", "a.txt", tool_call_id="a", name="run"),
        Message("user", "and now?"),
    ]


def test_the_pieces_of_a_streamed_answer_are_one_turn_again() -> None:
    pieces = [{"role": "model", "parts": [{"text": piece}]} for piece in ("Hel", "lo", "")]
    call = {"role": "model", "parts": [{"functionCall": {"name": "run", "args": {}}}]}
    signature = {"role": "model", "parts": [{"thoughtSignature": "s"}]}
    got = parse(contents=[USER, *pieces, call, signature, USER]).messages
    assert got[1:-1] == [Message("assistant", "Hello", (ToolCall("", "run", "{}"),))]


@pytest.mark.parametrize(
    ("response", "text"),
    [
        ({"output": "x"}, "x"),
        ({"result": "x"}, "x"),
        ({"content": "x"}, "x"),
        ({"error": "x"}, "Error: x"),
        ({"output": 5}, '{"output": 5}'),
        ({"output": "x", "code": 1}, '{"output": "x", "code": 1}'),
        ({"weather": "é"}, '{"weather": "é"}'),
        ({}, "{}"),
        (None, "{}"),
    ],
)
def test_the_text_of_a_result(response, text) -> None:
    part = {"functionResponse": {"name": "run", "response": response}}
    assert parse(contents=[{"role": "function", "parts": [part]}]).messages == [Message("tool", text, name="run")]


def test_snake_case_is_the_same() -> None:
    camel = parse(
        systemInstruction={"parts": [{"text": "s"}]},
        tools=TOOLS,
        toolConfig={"functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": ["run"]}},
        generationConfig={"maxOutputTokens": 5, "topP": 0.5, "stopSequences": ["x"]},
    )
    snake = parse(
        system_instruction={"parts": [{"text": "s"}]},
        tools=[{"function_declarations": [{"name": "run", "parameters_json_schema": SCHEMA}]}],
        tool_config={"function_calling_config": {"mode": "ANY", "allowed_function_names": ["run"]}},
        generation_config={"max_output_tokens": 5, "top_p": 0.5, "stop_sequences": ["x"]},
    )
    assert camel == snake
    assert camel.params.max_tokens == 5


def test_declared_functions_become_function_tools() -> None:
    openapi = {
        "type": "OBJECT",
        "properties": {
            "type": {"type": "STRING", "enum": ["ARRAY"]},
            "many": {"type": "ARRAY", "items": {"type": "INTEGER"}},
        },
        "required": ["type"],
    }
    plain = {
        "type": "object",
        "properties": {
            "type": {"type": "string", "enum": ["ARRAY"]},
            "many": {"type": "array", "items": {"type": "integer"}},
        },
        "required": ["type"],
    }
    declared = [{"name": "late", "description": "Later.", "parameters": openapi}, {"name": "bare"}]
    assert parse(tools=[*TOOLS, {"functionDeclarations": declared}]).tools == [
        {"type": "function", "function": {"name": "run", "parameters": SCHEMA}},
        {"type": "function", "function": {"name": "late", "description": "Later.", "parameters": plain}},
        {"type": "function", "function": {"name": "bare"}},
    ]


def test_tool_modes() -> None:
    def choice(**config):
        return parse(tools=TOOLS, toolConfig={"functionCallingConfig": config}).tool_choice

    named = {"type": "function", "function": {"name": "run"}}
    assert [choice(mode=mode) for mode in ("AUTO", "VALIDATED", "ANY", "NONE", None)] == [
        "auto",
        "auto",
        "required",
        "none",
        "auto",
    ]
    assert choice(mode="ANY", allowedFunctionNames=["run"]) == named


def test_sampling_fields_arrive() -> None:
    request = configured(
        maxOutputTokens=65536,
        temperature=1,
        topP=0.95,
        topK=64.0,  # as the official client sends it
        stopSequences=["END"],
        seed=3,
        candidateCount=2,
        presencePenalty=0.5,
        frequencyPenalty=0.25,
        responseLogprobs=True,
        logprobs=2,
    )
    params = request.params
    assert (params.max_tokens, params.temperature, params.top_p, params.top_k) == (65536, 1.0, 0.95, 64)
    assert (params.stop, params.seed, request.n) == (("END",), 3, 2)
    assert (params.presence_penalty, params.frequency_penalty) == (0.5, 0.25)
    assert (request.logprobs, params.top_logprobs) == (True, 2)
    assert (parse(STREAM).stream, parse(GENERATE).stream) == (True, False)


def test_thoughts_are_asked_for() -> None:
    assert parse().notes == {"thoughts": False}
    config = {"includeThoughts": True, "thinkingBudget": -1, "thinkingLevel": "HIGH"}
    assert configured(thinkingConfig=config).notes == {"thoughts": True}


def test_formats_of_the_answer() -> None:
    assert configured(responseMimeType="text/plain").response_format is None
    assert configured(responseMimeType="application/json").response_format == {"type": "json_schema", "schema": {}}
    form = {"type": "json_schema", "schema": SCHEMA}
    assert configured(responseMimeType="application/json", responseJsonSchema=SCHEMA).response_format == form
    upper = {"type": "OBJECT", "properties": {"cmd": {"type": "STRING"}}}
    assert configured(responseMimeType="application/json", responseSchema=upper).response_format == form


def test_what_clients_send_besides_asks_for_nothing() -> None:
    others = {"safetySettings": [{"category": "x"}], "labels": {"a": "b"}, "cachedContent": "", "anything": 1}
    config = {"responseModalities": ["TEXT"], "speechConfig": None, "mediaResolution": "LOW"}
    assert parse(**others, generationConfig=config) == parse(generationConfig=None, tools=None) == parse()


def test_counting_takes_contents_or_a_whole_request() -> None:
    whole = {"model": "models/tiny", "contents": [USER], "systemInstruction": {"parts": [{"text": "s"}]}}
    assert gemini.parse({"contents": [USER]}, COUNT).messages == [Message("user", "hi")]
    assert len(gemini.parse({"generateContentRequest": whole}, COUNT).messages) == 2
    assert gemini.COUNT[COUNT](7)["totalTokens"] == 7


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"contents": []}, "contents"),
        ({"contents": "hi"}, "contents"),
        ({"contents": ["hi"]}, "contents[0]"),
        ({"contents": [{"role": "system", "parts": []}]}, "contents[0].role"),
        ({"contents": [{"role": ["user"]}]}, "contents[0].role"),
        ({"contents": [{"parts": "hi"}]}, "contents[0].parts"),
        ({"contents": [{"parts": [{"text": 5}]}]}, "contents[0].parts[0].text"),
        ({"contents": [{"parts": [{"text": "x"}, {"inlineData": {}}]}]}, "contents[0].parts[1]"),
        ({"contents": [{"parts": [{"fileData": {}}]}]}, "contents[0].parts[0]"),
        ({"contents": [{"parts": [{"functionCall": {"name": "f"}}]}]}, "contents[0].parts[0]"),
        ({"contents": [{"parts": [{}]}]}, "contents[0].parts[0]"),
        ({"contents": [{"parts": [{"functionResponse": {}}]}]}, "contents[0].parts[0].functionResponse.name"),
        (
            {"contents": [{"parts": [{"functionResponse": {"name": "f", "response": "x"}}]}]},
            "contents[0].parts[0].functionResponse.response",
        ),
        ({"contents": [{"role": "model", "parts": [{"inlineData": {}}]}]}, "contents[0].parts[0]"),
        (
            {"contents": [{"role": "model", "parts": [{"functionCall": {"name": "f", "args": []}}]}]},
            "contents[0].parts[0].functionCall.args",
        ),
        ({"systemInstruction": {"parts": [{"inlineData": {}}]}}, "systemInstruction.parts[0]"),
        ({"tools": [{"googleSearch": {}}]}, "tools[0].googleSearch"),
        ({"tools": [{"functionDeclarations": [{}]}]}, "tools[0].functionDeclarations[0].name"),
        (
            {"tools": [{"functionDeclarations": [{"name": "f", "parameters": []}]}]},
            "tools[0].functionDeclarations[0].parameters",
        ),
        ({"toolConfig": {"functionCallingConfig": {"mode": "MAYBE"}}}, "toolConfig.functionCallingConfig.mode"),
        ({"toolConfig": {"functionCallingConfig": {"mode": ["ANY"]}}}, "toolConfig.functionCallingConfig.mode"),
        ({"toolConfig": {"functionCallingConfig": {"mode": "ANY"}}}, "toolConfig.functionCallingConfig.mode"),
        (
            {
                "tools": TOOLS,
                "toolConfig": {"functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": [["run"]]}},
            },
            "toolConfig.functionCallingConfig.allowedFunctionNames",
        ),
        ({"generationConfig": []}, "generationConfig"),
        ({"generationConfig": {"maxOutputTokens": 0}}, "generationConfig.maxOutputTokens"),
        ({"generationConfig": {"topP": 2}}, "generationConfig.topP"),
        ({"generationConfig": {"topK": 0.5}}, "generationConfig.topK"),
        ({"generationConfig": {"stopSequences": [1]}}, "generationConfig.stopSequences"),
        ({"generationConfig": {"candidateCount": 0}}, "generationConfig.candidateCount"),
        ({"generationConfig": {"responseMimeType": "text/x.enum"}}, "generationConfig.responseMimeType"),
        ({"generationConfig": {"responseModalities": ["AUDIO"]}}, "generationConfig.responseModalities"),
        (
            {"generationConfig": {"thinkingConfig": {"includeThoughts": 1}}},
            "generationConfig.thinkingConfig.includeThoughts",
        ),
        ({"cachedContent": "x"}, "cachedContent"),
    ],
)
def test_what_is_wrong_is_refused_by_its_place(fields, param) -> None:
    problem = refused(**fields)
    assert problem.param == param
    assert problem.message.startswith(param)
