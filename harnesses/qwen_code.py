"""Qwen Code: `qwen -p`, in any of three dialects: `qwen-code` (chat), `qwen-code:responses`, `qwen-code:messages`.

Lean, it has the tools run_shell_command, edit and read_file (without edit, its shell may not write) and a prompt of
about 3,100 tokens, of 19,000 as its users run it. It names the run's date and the working folder. After an empty answer
it asks again, up to five times. A full window makes it ask for a summary and go on.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from minirllm.flow import import_path
from minirllm.harness import SHELL, Call, Context, Harness, Launch

shared = import_path(Path(__file__).with_name("_shared.py"))

TYPES = {"chat": "openai", "responses": "openai-responses", "messages": "anthropic"}
LEAN = ("--bare", "--core-tools", "run_shell_command", "--exclude-tools", "notebook_edit,get_goal,update_goal")


def configured(dialect: str) -> Harness:
    """Qwen Code in one of its dialects."""
    return Harness(
        name="qwen-code",
        version="0.24.4",
        about="Qwen's coding agent; qwen-code:responses and qwen-code:messages in other dialects",
        dialect=shared.known("qwen-code", dialect, TYPES),
        npm=("@qwen-code/qwen-code@0.24.4",),
        requires=("node>=22",),
        prompt="3.1k tokens; full 19k",
        launch=_launch(dialect),
        auxiliary=shared.side_calls({"summary": "You are the component that summarizes a conversation"}),
        script=(Call("run_shell_command", {"command": SHELL, "is_background": False}), "Done."),
    )


def _launch(dialect: str) -> Callable[[Context], Launch]:
    def launch(context: Context) -> Launch:
        maker, url = ("ANTHROPIC", context.url) if dialect == "messages" else ("OPENAI", context.url_v1)
        env, files = shared.clock(context)
        env |= {
            f"{maker}_API_KEY": context.key,
            f"{maker}_BASE_URL": url,
            f"{maker}_MODEL": context.model,
            "QWEN_CODE_MAX_OUTPUT_TOKENS": str(context.max_tokens),
            "QWEN_CODE_NO_RELAUNCH": "1",
            "QWEN_CODE_SUPPRESS_YOLO_WARNING": "1",
        }
        argv = [context.program("qwen"), "--auth-type", TYPES[dialect], "-y"]
        if not context.full:
            argv += [*LEAN, "--system-prompt", shared.PROMPT]
        generation = {"contextWindowSize": context.window, "timeout": int(context.seconds * 1000)}
        settings: dict[str, Any] = {  # read in the full form only
            "privacy": {"usageStatisticsEnabled": False},
            "general": {"disableAutoUpdate": True},
            "model": {"generationConfig": generation},
        }
        files[".qwen/settings.json"] = json.dumps(settings, indent=2)
        return Launch((*argv, "-p", shared.guarded(context.instruction)), env=env, files=files)

    return launch


HARNESS = configured("chat")
