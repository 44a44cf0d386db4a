"""hermes-agent, with its terminal tool only unless in full.

2.9k tokens of prompt, 13k in full. It refuses to work with a window below 64,000 tokens, so it is told of one that
large: a model with less answers "context too long" when it comes to that. Empty answers are asked for again, up to four
times.
"""

from __future__ import annotations

import json
from pathlib import Path

from minirllm.flow import import_path
from minirllm.harness import SHELL, Call, Context, Harness, Launch

shared = import_path(Path(__file__).with_name("_shared.py"))

LEAST = 65_536  # tokens of a window that it accepts


def launch(context: Context) -> Launch:
    model = {
        "provider": "custom",
        "default": context.model,
        "base_url": context.url_v1,
        "api_key": context.key,
        "context_length": max(LEAST, context.window),
    }
    argv = [context.program("hermes"), "-m", context.model, "--provider", "custom", "--yolo"]
    if not context.full:
        argv += ["-t", "terminal", "--ignore-rules"]
    argv += ["-z", shared.guarded(context.instruction)]
    return Launch(tuple(argv), files={".hermes/config.yaml": json.dumps({"model": model}, indent=1)})  # JSON is YAML


HARNESS = Harness(
    name="hermes",
    version="0.19.0",
    about="Nous Research's agent",
    dialect="chat",
    pip=("hermes-agent==0.19.0",),
    prompt="2.9k tokens; full 13k",
    launch=launch,
    script=(Call("terminal", {"command": SHELL}), "Done."),
)
