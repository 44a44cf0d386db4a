"""An engine that plays the agents of docs/examples: it looks things up, and every second of its answers is right.

Owns: what it says. The tiny model scores it.
"""

from __future__ import annotations

import json
import re
from itertools import count
from pathlib import Path
from typing import Any

from minirllm.engines.scripted import ScriptedEngine
from minirllm.harness import Call
from minirllm.tools.harness import written

EXAMPLES = Path(__file__).parent.parent / "docs" / "examples"
STOCK = json.loads((EXAMPLES / "stock.json").read_text())


def call(name: str, **arguments: Any) -> str:
    """As the tiny model spells a tool call."""
    return written(Call(name, arguments))


class Clerk(ScriptedEngine):
    answers = count()

    @staticmethod
    def script(prompt: str) -> str:
        question = re.search(r"How many (\w+) are in stock\?", prompt)
        assert question is not None, prompt
        if "<tool_response>" not in prompt:
            return call("stock", item=question[1])
        return f"{STOCK[question[1]] if next(Clerk.answers) % 2 else 'No'} {question[1]} are in stock."
