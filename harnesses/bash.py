"""A minimal agent: the model writes a ```bash block, it is run in the work folder, until an answer has none.

Some 25 tokens of prompt besides the task, so it fits any window. At most 30 turns, and 60 seconds for a command.
"""

from __future__ import annotations

from pathlib import Path

from minirllm.flow import import_path
from minirllm.harness import SHELL, Harness

shared = import_path(Path(__file__).with_name("_shared.py"))

HARNESS = Harness(
    name="bash",
    version="1",
    about="the model writes a ```bash block, which is run, until an answer has none",
    dialect="chat",
    requires=("bash",),
    prompt="25 tokens",
    launch=shared.loop("bash"),
    script=(f"```bash\n{SHELL}\n```", "Done."),
)
