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
STYLES = (
    *("qwen25", "qwen3", "thinking_xml", "llama3", "gemma3", "mistral"),
    *("deepseek_r1", "deepseek_v31", "glm45", "kimi_k2", "llama4"),
)
ALL = ("smollm2", "tiny", *STYLES)
# Those that write every past turn as it was sampled: splicing must then give the very text of a rendering.
FAITHFUL = (
    *("smollm2", "tiny", "qwen25", "llama3", "gemma3", "mistral"),
    *("deepseek_v31", "kimi_k2", "llama4"),
)
SPECIAL = [
    *("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|python_tag|>"),
    *("<bos>", "<start_of_turn>", "<end_of_turn>"),
    *("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
    *(f"<\uff5c{name}\uff5c>" for name in ("User", "Assistant")),
    *(f"<\uff5c{edge}\u2581of\u2581sentence\uff5c>" for edge in ("begin", "end")),
    *(
        f"<\uff5ctool\u2581{what}\u2581{edge}\uff5c>"
        for what in ("calls", "call", "outputs", "output")
        for edge in ("begin", "end")
    ),
    "<\uff5ctool\u2581sep\uff5c>",
    *("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
    *("<|im_system|>", "<|im_user|>", "<|im_assistant|>", "<|im_middle|>"),
    *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    *("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
    *("<|header_start|>", "<|header_end|>", "<|eot|>", "<|python_start|>", "<|python_end|>"),
]
ENDS = {
    **{"llama3": "<|eot_id|>", "gemma3": "<end_of_turn>", "mistral": "</s>", "glm45": "<|user|>", "llama4": "<|eot|>"},
    **dict.fromkeys(("deepseek_r1", "deepseek_v31"), "<\uff5cend\u2581of\u2581sentence\uff5c>"),
}
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
        made.eos_token = ENDS.get(name, "<|im_end|>")
    return made


@cache
def renderer(name: str, history: str = "keep") -> Renderer:
    """Shared: a renderer has no state that a test could change."""
    return Renderer(tokenizer(name), history, today=TODAY)


def turn(it: Renderer, text: str) -> list[int]:
    """Sampled ids: the text and the end of the turn."""
    return [*it.encode(text), min(it.eos_ids)]


def content_ids(it: Renderer, text: str) -> list[int]:
    """The ids of text in which the text of a token is only text."""
    return it._encode_marked("\ue000".join(text), "\ue000")


def calling(*calls: ToolCall) -> Message:
    """An assistant turn of calls only."""
    return Message("assistant", tool_calls=calls)


def call(arguments: str = '{"city": "Rome"}', id: str = "call_0") -> ToolCall:
    """A call of the one tool."""
    return ToolCall(id, "weather", arguments)
