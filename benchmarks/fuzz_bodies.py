"""What `fuzz.py` makes its requests of: bodies that are right, and things that may be wrong in them.

Owns: the data. Does not know: what is done with it.
"""

from __future__ import annotations

from typing import Any

SCHEMA = {"type": "object", "properties": {"cmd": {"type": "string"}}, "required": ["cmd"]}
FUNCTION = {"name": "run", "description": "Run it.", "parameters": SCHEMA}
CALL = {"id": "call_1", "type": "function", "function": {"name": "run", "arguments": '{"cmd": "ls"}'}}
RESPONSE_FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}}

#: Bodies that are right, by the end of their route; the first that fits counts.
BODIES: dict[str, list[dict[str, Any]]] = {
    "/chat/completions": [
        {
            "model": "tiny",
            "messages": [{"role": "user", "content": "hi"}],
            "temperature": 0.5,
            "max_tokens": 4,
            "stop": ["x"],
        },
        {
            "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
            "stream": True,
            "stream_options": {"include_usage": True},
            "logprobs": True,
            "top_logprobs": 2,
            "n": 2,
        },
        {
            "messages": [
                {"role": "system", "content": "s"},
                {"role": "user", "content": "hi"},
                {"role": "assistant", "content": None, "tool_calls": [CALL]},
                {"role": "tool", "tool_call_id": "call_1", "content": "made"},
            ],
            "tools": [{"type": "function", "function": FUNCTION}],
            "tool_choice": "auto",
            "return_token_ids": True,
        },
        {"messages": [{"role": "user", "content": "hi"}], "response_format": RESPONSE_FORMAT, "seed": 7},
    ],
    "/completions": [
        {"prompt": "hi", "max_tokens": 4, "n": 2, "logprobs": 1, "echo": False},
        {"prompt": [65, 66], "stream": True, "stop": "x", "return_token_ids": True},
    ],
    "/input_tokens": [{"model": "tiny", "input": "hi"}],
    "/responses": [
        {"model": "tiny", "input": "hi", "instructions": "s", "max_output_tokens": 4, "store": True},
        {
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
                {"type": "function_call", "call_id": "c", "name": "run", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c", "output": "made"},
                {"type": "reasoning", "id": "r", "summary": [], "encrypted_content": None},
            ],
            "tools": [{"type": "function", "strict": False, **FUNCTION}],
            "tool_choice": "auto",
            "stream": True,
        },
        {"input": "hi", "text": {"format": {"type": "text"}}, "reasoning": {"effort": "low"}},
        {"input": "and now?", "previous_response_id": "@answer", "store": False},
    ],
    "/messages": [
        {"model": "tiny", "max_tokens": 4, "messages": [{"role": "user", "content": "hi"}], "system": "s"},
        {
            "max_tokens": 4,
            "stream": True,
            "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}],
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "hi"}]},
                {
                    "role": "assistant",
                    "content": [{"type": "tool_use", "id": "t", "name": "run", "input": {"cmd": "ls"}}],
                },
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "made"}]},
            ],
            "tools": [{"name": "run", "input_schema": SCHEMA}],
            "tool_choice": {"type": "auto"},
            "thinking": {"type": "disabled"},
        },
    ],
    "/count_tokens": [{"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "system": "s"}],
    "Content": [
        {
            "contents": [{"role": "user", "parts": [{"text": "hi"}]}],
            "generationConfig": {"maxOutputTokens": 4, "temperature": 0.5},
            "systemInstruction": {"parts": [{"text": "s"}]},
            "tools": [{"functionDeclarations": [FUNCTION]}],
        },
    ],
    "Tokens": [{"contents": [{"role": "user", "parts": [{"text": "hi"}]}]}],
    "/admin/sessions": [{"id": "fuzzed"}],
}
JUNK: list[Any] = [
    None,
    True,
    False,
    0,
    1,
    -1,
    3,
    0.5,
    -0.0,
    1e308,
    2**31,
    2**63,
    2**70,
    -(2**70),
    "",
    " ",
    "x",
    "auto",
    "required",
    "none",
    "user",
    "system",
    "tool",
    "developer",
    "text",
    "function",
    "\ud800",
    "\x00",
    "é€😀",
    "<|im_end|>",
    "<tool_call>",
    "x" * 300,
    "{",
    "{}",
    '{"a": 1',
    [],
    {},
    [[]],
    [None],
    [1, 2],
    [""],
    {"type": "text"},
    {"type": "image", "source": {}},
    {"": None},
    {"type": "image_url", "image_url": {"url": "x"}},
    {"$ref": "#"},
    {"name": "run"},
    [{"type": "text", "text": "x"}],
    "json_object",
]
METHODS = ["GET", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD", "TRACE", "CONNECT", "get", "FOO"]
HEADERS = [
    ("content-type", "text/plain"),
    ("content-type", "application/x+json; charset=x"),
    ("content-type", ""),
    ("accept", "\xff"),
    ("content-encoding", "gzip"),
    ("expect", "100-continue"),
    ("x-api-key", "\xe9"),
    ("authorization", "Bearer"),
    ("authorization", "Basic eDp5"),
    ("authorization", "Bearer \xff\xfe"),
    ("x-goog-api-key", "?"),
    ("accept-encoding", "br"),
    ("upgrade", "websocket"),
    ("connection", "upgrade"),
    ("transfer-encoding", "gzip"),
    ("x-long", "y" * 4000),
    ("anthropic-version", "0"),
    ("range", "bytes=0-1"),
    ("if-none-match", "*"),
    ("cookie", "=;="),
    ("content-length", "3"),
]
