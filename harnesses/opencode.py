"""opencode: `opencode run`, in any of three dialects: `opencode` (chat), `opencode:responses`, `opencode:messages`.

Lean, it has one tool (bash) and a prompt of about 1,500 tokens, of 7,700 as its users run it. It names the date and the
working folder, and starts slowly (6 CPU seconds). A full window makes it ask for a summary and go on; its exit code is
then 1 although it finished. The full form asks for a title first. Equal tool calls in a row are allowed here.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from minirllm.flow import import_path
from minirllm.harness import SHELL, Call, Context, Harness, Launch

shared = import_path(Path(__file__).with_name("_shared.py"))

CLIENTS = {"chat": "@ai-sdk/openai-compatible", "responses": "@ai-sdk/openai", "messages": "@ai-sdk/anthropic"}
INSTRUCTION = "instruction.txt"  # as arguments its words would be put in quotes, or read as numbers
SIDE_CALLS = {"title": "You are a title generator.", "summary": "You are a context summarization agent."}
DENIED = ("read", "edit", "glob", "grep", "list", "skill", "task", "todowrite", "webfetch")


def configured(dialect: str) -> Harness:
    """opencode in one of its dialects."""
    return Harness(
        name="opencode",
        version="1.18.33",
        about="the coding agent opencode; opencode:responses and opencode:messages in other dialects",
        dialect=shared.known("opencode", dialect, CLIENTS),
        npm=("opencode-ai@1.18.33",),
        requires=("node>=20",),
        prompt="1.5k tokens; full 7.7k",
        launch=_launch(dialect),
        auxiliary=shared.side_calls(SIDE_CALLS),
        asides=(("You are a title generator.", "Make a file"),),
        script=(Call("bash", {"command": SHELL, "description": "Make the file"}), "Done."),
    )


def _launch(dialect: str) -> Callable[[Context], Launch]:
    def launch(context: Context) -> Launch:
        model = f"minirllm/{context.model}"
        answer = min(context.max_tokens, context.window // 2)
        provider = {
            "npm": CLIENTS[dialect],
            "options": {"baseURL": context.url_v1, "apiKey": context.key},
            "models": {context.model: {"limit": {"context": context.window, "output": answer}}},
        }
        settings: dict[str, Any] = {"model": model, "permission": {"*": "allow"}, "provider": {"minirllm": provider}}
        if not context.full:
            settings["permission"] |= dict.fromkeys(DENIED, "deny")
            settings["agent"] = {"build": {"prompt": shared.PROMPT}}
        env = {
            "OPENCODE_DISABLE_AUTOUPDATE": "1",
            "OPENCODE_DISABLE_MODELS_FETCH": "1",
            "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
            "OPENCODE_DISABLE_DEFAULT_PLUGINS": "1",
        }
        files = {".config/opencode/opencode.json": json.dumps(settings, indent=2), INSTRUCTION: context.instruction}
        argv = [context.program("opencode"), "run", "--pure", "-m", model]
        if not context.full:
            argv += ["--title", "task"]
        return Launch(("sh", "-c", 'exec "$@" < "$0"', str(context.home / INSTRUCTION), *argv), env=env, files=files)

    return launch


HARNESS = configured("chat")
