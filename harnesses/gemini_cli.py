"""Google's Gemini CLI: `gemini -p` on the Gemini dialect (`streamGenerateContent`), the only one it speaks.

Lean, it has one tool (run_shell_command) and a prompt of about 800 tokens, of 12,000 as its users run it. It names the
run's date and the working folder. It asks for temperature 1, top_p 0.95 and top_k 64, which training overrides. Without
its settings file it exits with code 41.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from minirllm.flow import import_path
from minirllm.harness import SHELL, Call, Context, Harness, Launch

shared = import_path(Path(__file__).with_name("_shared.py"))


def launch(context: Context) -> Launch:
    settings: dict[str, Any] = {
        "security": {"auth": {"selectedType": "gemini-api-key"}},
        "privacy": {"usageStatisticsEnabled": False},
        "general": {"disableAutoUpdate": True, "enableAutoUpdate": False},
    }
    env, files = shared.clock(context)
    env |= {
        "GEMINI_API_KEY": context.key,
        "GOOGLE_GEMINI_BASE_URL": context.url,
        "GEMINI_CLI_TRUST_WORKSPACE": "true",
        "GEMINI_CLI_NO_RELAUNCH": "true",
    }
    if not context.full:
        settings["tools"] = {"core": ["run_shell_command"]}
        env["GEMINI_SYSTEM_MD"] = str(context.home / ".gemini/system.md")
        files[".gemini/system.md"] = shared.PROMPT
    files[".gemini/settings.json"] = json.dumps(settings, indent=2)
    argv = (context.program("gemini"), "-m", context.model, "-y", "-p", shared.guarded(context.instruction))
    return Launch(argv, env=env, files=files)


HARNESS = Harness(
    name="gemini-cli",
    version="0.61.0",
    about="Google's coding agent",
    dialect="gemini",
    npm=("@google/gemini-cli@0.61.0",),
    requires=("node>=20",),
    prompt="0.8k tokens; full 12k",
    launch=launch,
    auxiliary=shared.side_calls({"summary": "You are a specialized system component responsible for distilling"}),
    script=(Call("run_shell_command", {"command": SHELL}), "Done."),
)
