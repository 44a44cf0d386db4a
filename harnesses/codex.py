"""OpenAI's Codex CLI: `codex exec` on the Responses dialect, the only one it speaks.

Lean, it has the tools exec_command, write_stdin and request_user_input and a prompt of about 1,400 tokens, of 10,000 as
its users run it. A full window ends it ("ran out of room", exit code 1), and so does any 429; for a server that is not
there it waits for ever. What its tool returns holds a random id and the time taken, which no setting keeps out: from
the second call on, prompts do not repeat from run to run, and neither does a training run.
"""

from __future__ import annotations

import json
from pathlib import Path

from minirllm.flow import import_path
from minirllm.harness import SHELL, Call, Context, Harness, Launch

shared = import_path(Path(__file__).with_name("_shared.py"))

LEAN = {
    "model_auto_compact_token_limit": 10**9,  # no summaries: a full window ends it
    "web_search": "disabled",
    "include_permissions_instructions": False,
    "include_environment_context": False,
    "agents.enabled": False,
    "features.goals": False,
    "features.apps": False,
    "features.plugins": False,
    "features.view_image": False,
}
NAMES = {"headers": "http_headers"}  # of a server's settings, where they differ


def launch(context: Context) -> Launch:
    provider = "model_providers.minirllm."
    settings: dict[str, object] = {
        "model": context.model,
        "model_provider": "minirllm",
        "model_context_window": context.window,
        "check_for_update_on_startup": False,
        "analytics.enabled": False,
        provider + "name": "minirllm",
        provider + "base_url": context.url_v1,
        provider + "env_key": "MINIRLLM_KEY",
        provider + "wire_api": "responses",
        provider + "stream_idle_timeout_ms": int(context.seconds * 1000),  # only events reset it
    }
    files = {}
    if not context.full:
        settings |= {"model_instructions_file": str(context.home / ".codex/instructions.md"), **LEAN}
        settings["skills.include_instructions"] = bool(context.skills)
        files[".codex/instructions.md"] = shared.PROMPT
    for name, server in context.servers.items():
        place = f"mcp_servers.{json.dumps(name)}."
        settings |= {place + NAMES.get(key, key): value for key, value in server.items() if key != "type"}
    files[".codex/config.toml"] = "".join(f"{name} = {json.dumps(value)}\n" for name, value in settings.items())
    argv = ("exec", "--dangerously-bypass-approvals-and-sandbox", "--skip-git-repo-check", "--", context.instruction)
    return Launch((context.program("codex"), *argv), env={"MINIRLLM_KEY": context.key}, files=files)


HARNESS = Harness(
    name="codex",
    version="0.171.0",
    about="OpenAI's coding agent",
    dialect="responses",
    npm=("@openai/codex@0.171.0",),
    requires=("node>=16",),
    prompt="1.4k tokens; full 10k",
    launch=launch,
    servers=("stdio", "http"),
    skills=".agents/skills",
    auxiliary=shared.side_calls({"summary": "You are performing a CONTEXT CHECKPOINT COMPACTION."}),
    script=(Call("exec_command", {"cmd": SHELL}), "Done."),
)
