"""kimi-cli, the last version before it was ended upstream.

12k tokens of prompt. Its loop keeps a reserve of the window free and compacts in every turn when there is none, so the
reserve is set small. It exits with 1 when the context is full.
"""

from __future__ import annotations

import json

from minirllm.harness import SHELL, Call, Context, Harness, Launch

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


def launch(context: Context) -> Launch:
    texts = {"model": context.model, "url": context.url_v1, "key": context.key}
    reserve = min(2000, context.window // 8)
    quoted = {name: json.dumps(text) for name, text in texts.items()}
    config = CONFIG.format(window=context.window, reserve=reserve, **quoted)
    path = context.home / "config.toml"
    argv = (context.program("kimi"), "--config-file", str(path), "--quiet", "-y", "-p", context.instruction)
    return Launch(argv, files={path.name: config})


HARNESS = Harness(
    name="kimi-cli",
    version="1.51.0",
    about="Moonshot's coding agent, the last version before its end",
    dialect="chat",
    pip=("kimi-cli==1.51.0",),
    requires=("python>=3.13",),
    prompt="12k tokens",
    launch=launch,
    script=(Call("Shell", {"command": SHELL}), "Done."),
)
