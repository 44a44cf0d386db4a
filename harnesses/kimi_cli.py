"""kimi-cli, the last version before it was ended upstream.

Lean, it is one agent with its shell and a prompt of a sentence, 1k tokens; in full 12k, with the time of day in them,
so that no two runs are alike. Its loop keeps a reserve of the window free, and compacts in every turn when there is
none, so the reserve is set small. It exits with 1 when the context is full.
"""

from __future__ import annotations

import json
from pathlib import Path

from minirllm.flow import import_path
from minirllm.harness import SHELL, Call, Context, Harness, Launch

shared = import_path(Path(__file__).with_name("_shared.py"))

CONFIG = """\
default_model = "own"
telemetry = false

[models.own]
provider = "minirllm"
model = {model}
max_context_size = {window}

[providers.minirllm]
type = "openai_legacy"
base_url = {url}
api_key = {key}

[loop_control]
reserved_context_size = {reserve}
"""

AGENT = """\
version: 1
agent:
  name: lean
  system_prompt_path: ./system.md
  tools: ["kimi_cli.tools.shell:Shell"]
"""


def launch(context: Context) -> Launch:
    texts = {"model": context.model, "url": context.url_v1, "key": context.key}
    reserve = min(2000, context.window // 8)
    quoted = {name: json.dumps(text) for name, text in texts.items()}
    config = CONFIG.format(window=context.window, reserve=reserve, **quoted)
    files = {"config.toml": config}
    argv = [context.program("kimi"), "--config-file", str(context.home / "config.toml"), "--quiet", "-y"]
    if not context.full:
        files |= {"agent.yaml": AGENT, "system.md": shared.PROMPT}
        argv += ["--agent-file", str(context.home / "agent.yaml")]
    return Launch((*argv, "-p", stated(context.instruction)), files=files)


def stated(instruction: str) -> str:
    """The instruction, with a word before it where the program would read it as a command."""
    return f"Task: {instruction}" if instruction.lstrip().startswith(("/", "-")) else instruction


HARNESS = Harness(
    name="kimi-cli",
    version="1.51.0",
    about="Moonshot's coding agent, the last version before its end",
    dialect="chat",
    pip=("kimi-cli==1.51.0",),
    requires=("python>=3.13",),
    prompt="1k tokens; full 12k",
    launch=launch,
    script=(Call("Shell", {"command": SHELL}), "Done."),
)
