"""The server of `fuzz.py`: what `minirllm serve` runs, on the tiny model, which says a fixed text.

Owns: that text. Prints its URL; for every line of its standard input, how many blocks of memory Python's objects take
once the garbage is collected; ends when that is closed.
"""

from __future__ import annotations

import asyncio
import gc
import sys
from collections import deque
from typing import Any

from minirllm.config import Config
from minirllm.engines.scripted import ScriptedEngine
from minirllm.stack import serving

CALL = '<tool_call>\n{"name": "run", "arguments": {"cmd": "ls"}}\n</tool_call>'


class Says(ScriptedEngine):
    """A tool call where there are tools and none was answered yet, else a greeting."""

    def __init__(self, *parts: Any):
        super().__init__(*parts)
        self.prompts = deque(maxlen=1)  # it would keep them all

    @staticmethod
    def script(prompt: str) -> str:
        return CALL if "<tools>" in prompt and "<tool_response>" not in prompt else "Hello."


async def serve(admin_key: str) -> None:
    config = Config(model="tiny", engine="benchmarks.fuzz_server:Says", threads=1, max_calls=10**9, max_tokens=16)
    async with serving(config, admin_key=admin_key) as stack:
        print(stack.base_url, flush=True)
        while await asyncio.to_thread(sys.stdin.readline):
            gc.collect()
            print(sys.getallocatedblocks(), flush=True)


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1]))
