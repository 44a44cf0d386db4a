"""Chat templates in the styles of published families, each with a byte-level tokenizer; one renderer for each.

Owns: `renderer(name)`, the names, and a few messages and tools that the tests talk with.
"""

from __future__ import annotations

import datetime
from functools import cache
from pathlib import Path
from typing import Any

from minirllm import models
from minirllm.models import tiny
from minirllm.renderer import Renderer
from minirllm.types import Message, ToolCall

FOLDER = Path(__file__).parent / "fixtures" / "templates"
STYLES = ("qwen25", "qwen3", "thinking_xml", "llama3", "gemma3", "mistral")
ALL = ("smollm2", "tiny", *STYLES)
# Those that write every past turn as it was sampled: splicing must then give the very text of a rendering.
FAITHFUL = ("smollm2", "tiny", "qwen25", "llama3", "gemma3", "mistral")
SPECIAL = [
    *("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|python_tag|>"),
    *("<bos>", "<start_of_turn>", "<end_of_turn>"),
    *("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
]
TODAY = datetime.date(2025, 3, 9)
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather of a city.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
        },
    }
]
SYSTEM, USER = Message("system", "Be brief."), Message("user", "Hi")


@cache
def tokenizer(name: str) -> Any:
    """SmolLM2's own, or one token per byte and the special tokens of every style."""
    if name == "smollm2":
        return models.load("smollm2-135m").tokenizer
    made = tiny.build_tokenizer()
    if name != "tiny":
        made.add_special_tokens({"additional_special_tokens": SPECIAL})
        made.chat_template = (FOLDER / f"{name}.jinja").read_text()
        made.bos_token = "<bos>" if name == "gemma3" else None
        made.eos_token = {"llama3": "<|eot_id|>", "gemma3": "<end_of_turn>", "mistral": "</s>"}.get(name, "<|im_end|>")
    return made


@cache
def renderer(name: str, history: str = "keep") -> Renderer:
    """Shared: a renderer has no state that a test could change."""
    return Renderer(tokenizer(name), history, today=TODAY)


def turn(it: Renderer, text: str) -> list[int]:
    """Sampled ids: the text and the end of the turn."""
    return [*it.encode(text), min(it.eos_ids)]


def calling(*calls: ToolCall) -> Message:
    """An assistant turn of calls only."""
    return Message("assistant", tool_calls=calls)


def call(arguments: str = '{"city": "Rome"}', id: str = "call_0") -> ToolCall:
    """A call of the one tool."""
    return ToolCall(id, "weather", arguments)
