"""A minimal agent with one tool, `bash`, until an answer calls it no more.

Its prompt is the task, and the tool's schema as the model's template shows it. At most 30 turns, and 60 seconds for a
command.
"""

from __future__ import annotations

from pathlib import Path

from minirllm.flow import import_path
from minirllm.harness import SHELL, Call, Harness

shared = import_path(Path(__file__).with_name("_shared.py"))

HARNESS = Harness(
    name="react",
    version="1",
    about="tool calls in the chat dialect, one tool: bash",
    dialect="chat",
    requires=("bash",),
    prompt="60 tokens",
    launch=shared.loop("react"),
    script=(Call("bash", {"command": SHELL}), "Done."),
)
