"""aider, the pair programmer: no tools, no loop; it writes the files that an answer spells out.

0.8k tokens of prompt. It is shown the task's own files, and may make new ones. One call, or a few when an answer cannot
be read as an edit; it sends temperature 0, which training overrides. Exit code 0 also when nothing was done. Full: with
a git repository's commits, for which it asks the model for a message, a side call.
"""

from __future__ import annotations

from pathlib import Path

from minirllm.flow import import_path
from minirllm.harness import PROOF, Context, Harness, Launch

shared = import_path(Path(__file__).with_name("_shared.py"))

COMMIT = "You are an expert software engineer that generates concise, one-line Git commit messages"


def launch(context: Context) -> Launch:
    quiet = ("--yes-always", "--no-check-update", "--analytics-disable", "--no-show-model-warnings", "--no-gitignore")
    plain = ("--no-pretty", "--no-fancy-input", "--no-detect-urls", "--no-suggest-shell-commands", "--map-tokens", "0")
    mode = () if context.full else ("--no-git", *plain)
    argv = (context.program("aider"), "--model", f"openai/{context.model}", *quiet, *mode, "--edit-format", "whole")
    env = {
        "OPENAI_API_BASE": context.url_v1,
        "OPENAI_API_KEY": context.key,
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # else it waits for a list of prices
    }
    files = (f"--file={name}" for name in context.files)
    return Launch((*argv, f"--message={shared.guarded(context.instruction)}", *files), env)


HARNESS = Harness(
    name="aider",
    version="0.86.2",
    about="the pair programmer: one answer, its files written",
    dialect="chat",
    pip=("aider-chat==0.86.2",),
    prompt="0.8k tokens",
    launch=launch,
    auxiliary=shared.side_calls({"commit message": COMMIT}),
    script=(f"{PROOF[0]}\n```\n{PROOF[1]}```",),
)
