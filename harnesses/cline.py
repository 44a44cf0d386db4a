"""Cline's command line: `cline`, on the chat dialect.

Lean, it has one tool (run_commands) and a prompt of about 400 tokens, of 5,400 as its users run it. It gives up when an
answer's first byte takes some 300 s. After an empty answer it asks again, up to three times. A full window makes it
drop history and stop early, with exit code 0.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from minirllm.flow import import_path
from minirllm.harness import SHELL, Call, Context, Harness, Launch

shared = import_path(Path(__file__).with_name("_shared.py"))

PROVIDER = "openai-compatible"
OFF = (
    "ask_question apply_patch editor fetch_web_content read_files search_codebase skills spawn_agent "
    "team_attach_outcome_fragment team_await_runs team_broadcast team_cancel_run team_cleanup team_create_outcome "
    "team_finalize_outcome team_list_outcomes team_list_runs team_mission_log team_read_mailbox "
    "team_review_outcome_fragment team_run_task team_send_message team_shutdown_teammate team_spawn_teammate "
    "team_status team_task"
)


def launch(context: Context) -> Launch:
    account = {"provider": PROVIDER, "apiKey": context.key, "model": context.model, "baseUrl": context.url_v1}
    entry = {"settings": account, "updatedAt": "2026-01-01T00:00:00.000Z", "tokenSource": "manual"}
    providers = {"version": 1, "lastUsedProvider": PROVIDER, "modes": {}, "providers": {PROVIDER: entry}}
    settings: dict[str, Any] = {"autoUpdateEnabled": False, "telemetryOptOut": True}
    argv = [context.program("cline"), "-P", "openai", "-m", context.model, "-t", str(int(context.seconds))]
    if not context.full:
        argv += ["-s", shared.PROMPT]
        settings["disabledTools"] = OFF.split()
    env = {"CLINE_SESSION_BACKEND_MODE": "local"}  # else it starts a server that outlives it
    files = {
        ".cline/data/settings/providers.json": json.dumps(providers, indent=2),
        ".cline/data/settings/global-settings.json": json.dumps(settings, indent=2),
    }
    return Launch((*argv, shared.guarded(context.instruction)), env=env, files=files)


HARNESS = Harness(
    name="cline",
    version="3.0.65",
    about="the coding agent Cline, on the command line",
    dialect="chat",
    npm=("cline@3.0.65",),
    requires=("node>=20",),
    prompt="0.4k tokens; full 5.4k",
    launch=launch,
    script=(Call("run_commands", {"commands": [SHELL]}), "Done."),
)
