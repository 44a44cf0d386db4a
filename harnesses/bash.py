"""A minimal agent: the model writes a ```bash block, it is run in the work folder, until an answer has none.

Some 25 tokens of prompt besides the task, so it fits any window. At most 30 turns, and 60 seconds for a command.
"""

from __future__ import annotations

from pathlib import Path

from minirllm.harness import SHELL, Context, Harness, Launch

PROGRAM = Path(__file__).with_name("_loop.py")


def launch(context: Context) -> Launch:
    env = {**context.variables, "MINIRLLM_TURNS": "30", "MINIRLLM_SECONDS": "60"}
    argv = (context.python, "-I", str(context.home / ".loop.py"), "bash")
    return Launch(argv, env, {".loop.py": PROGRAM.read_text(encoding="utf-8")})


HARNESS = Harness(
    name="bash",
    version="1",
    about="the model writes a ```bash block, which is run, until an answer has none",
    dialect="chat",
    requires=("bash",),
    prompt="25 tokens",
    launch=launch,
    script=(f"```bash\n{SHELL}\n```", "Done."),
)
