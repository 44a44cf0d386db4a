"""The coding agent pi: `pi -p`, in any of three dialects: `pi` (chat), `pi:responses`, `pi:messages`.

Lean, it has one tool (bash) and a prompt of about 620 tokens, of 1,400 as its users run it, with read, edit and write.
It names the run's date, the working folder and where it is installed. When the window is full the lean form ends (exit
code 1); the full one asks for a summary and goes on. Its exit code is 0 also when nothing was done.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from minirllm.flow import import_path
from minirllm.harness import SHELL, Call, Context, Harness, Launch

shared = import_path(Path(__file__).with_name("_shared.py"))

APIS = {"chat": "openai-completions", "responses": "openai-responses", "messages": "anthropic-messages"}


def configured(dialect: str) -> Harness:
    """pi in one of its dialects."""
    return Harness(
        name="pi",
        version="0.73.1",
        about="the coding agent pi; pi:responses and pi:messages in other dialects",
        dialect=shared.known("pi", dialect, APIS),
        npm=("@mariozechner/pi-coding-agent@0.73.1",),
        requires=("node>=20.6",),
        prompt="0.6k tokens; full 1.4k",
        launch=_launch(dialect),
        auxiliary=shared.side_calls({"summary": "You are a context summarization assistant."}),
        script=(Call("bash", {"command": SHELL}), "Done."),
    )


def _launch(dialect: str) -> Callable[[Context], Launch]:
    def launch(context: Context) -> Launch:
        model = {"id": context.model, "contextWindow": context.window, "maxTokens": context.max_tokens}
        provider = {
            "baseUrl": context.url if dialect == "messages" else context.url_v1,
            "api": APIS[dialect],
            "apiKey": context.key,
            "models": [model],
        }
        compaction = {
            "enabled": context.full,
            "reserveTokens": context.window // 8,  # its defaults are larger than small windows
            "keepRecentTokens": context.window // 4,
        }
        env, files = shared.clock(context)
        files |= {
            ".pi/agent/models.json": json.dumps({"providers": {"minirllm": provider}}, indent=2),
            ".pi/agent/settings.json": json.dumps({"compaction": compaction}, indent=2),
        }
        argv = [context.program("pi"), "--provider", "minirllm", "--model", context.model]
        if not context.full:
            argv += ["--tools", "bash"]
        return Launch((*argv, "-p", shared.guarded(context.instruction)), env={**env, "PI_OFFLINE": "1"}, files=files)

    return launch


HARNESS = configured("chat")
