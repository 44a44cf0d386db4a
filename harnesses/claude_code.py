"""Anthropic's Claude Code: `claude -p` on the Messages dialect.

Lean, it has one tool (Bash) and a prompt of about 550 tokens, of 12,000 as its users run it, in which nothing differs
from run to run; the full form names date, folder and system. Root needs IS_SANDBOX. When the window is full the lean
form ends ("Prompt is too long", exit code 1); the full one asks for a summary first, and goes on from it. An answer cut
at max_tokens makes it ask again, three times.
"""

from __future__ import annotations

import json
from pathlib import Path

from minirllm.flow import import_path
from minirllm.harness import SHELL, Call, Context, Harness, Launch
from minirllm.types import ModelRequest

shared = import_path(Path(__file__).with_name("_shared.py"))
summary = shared.side_calls({"summary": "CRITICAL: Respond with TEXT ONLY. Do NOT call any tools."})


def launch(context: Context) -> Launch:
    argv = [context.program("claude"), "-p", "--model", context.model, "--output-format", "json"]
    env = {
        "ANTHROPIC_BASE_URL": context.url,
        "ANTHROPIC_API_KEY": context.key,
        "IS_SANDBOX": "1",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_AUTOUPDATER": "1",
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",  # it differs in every prompt
        "CLAUDE_CODE_DISABLE_NONSTREAMING_FALLBACK": "1",  # a second sample of what was sampled already
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(context.max_tokens),
        "API_TIMEOUT_MS": str(int(context.seconds * 1000)),
    }
    if context.servers:
        argv += ["--mcp-config", json.dumps({"mcpServers": context.servers}), "--strict-mcp-config"]
    if not context.full:
        lean = ["--tools", "Bash,Skill"] if context.skills else ["--bare", "--tools", "Bash"]
        argv += [*lean, "--system-prompt", shared.PROMPT]
        env |= {
            "CLAUDE_CODE_DISABLE_THINKING": "1",
            "CLAUDE_CODE_DISABLE_EXPERIMENTAL_BETAS": "1",
            "DISABLE_PROMPT_CACHING": "1",
            "DISABLE_COMPACT": "1",
        }
    return Launch((*argv, "--dangerously-skip-permissions", "--", shared.guarded(context.instruction)), env=env)


def auxiliary(request: ModelRequest) -> str | None:
    if request.params.max_tokens == 1:
        return "quota"
    if request.response_format is not None and not request.tools:
        return "title"
    return summary(request)


HARNESS = Harness(
    name="claude-code",
    version="2.1.332",
    about="Anthropic's coding agent",
    dialect="messages",
    npm=("@anthropic-ai/claude-code@2.1.332",),
    prompt="0.5k tokens; full 12k",
    launch=launch,
    servers=("stdio", "http", "sse"),
    skills=".claude/skills",
    auxiliary=auxiliary,
    script=(Call("Bash", {"command": SHELL, "description": "Make the file"}), "Done."),
)
