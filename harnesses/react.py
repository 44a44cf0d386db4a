"""A minimal agent with one tool, `bash`, until an answer calls it no more.

Its prompt is the task, and the tool's schema as the model's template shows it. At most 30 turns, and 60 seconds for a
command.
"""

from __future__ import annotations

from pathlib import Path

from minirllm.harness import SHELL, Call, Context, Harness, Launch

PROGRAM = Path(__file__).with_name("_loop.py")


def launch(context: Context) -> Launch:
    env = {**context.variables, "MINIRLLM_TURNS": "30", "MINIRLLM_SECONDS": "60"}
    argv = (context.python, "-I", str(context.home / ".loop.py"), "react")
    return Launch(argv, env, {".loop.py": PROGRAM.read_text(encoding="utf-8")})


HARNESS = Harness(
    name="react",
    version="1",
    about="tool calls in the chat dialect, one tool: bash",
    dialect="chat",
    requires=("bash",),
    prompt="60 tokens",
    launch=launch,
    script=(Call("bash", {"command": SHELL}), "Done."),
)
