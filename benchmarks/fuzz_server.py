"""The server of `fuzz.py`: what `minirllm serve` runs, on the tiny model, which says a fixed text.

Owns: that text. Prints its URL; ends when its standard input is closed.
"""

from __future__ import annotations

import asyncio
import sys

from minirllm.config import Config
from minirllm.engines.scripted import ScriptedEngine
from minirllm.stack import serving

CALL = '<tool_call>\n{"name": "run", "arguments": {"cmd": "ls"}}\n</tool_call>'


class Says(ScriptedEngine):
    """A tool call where there are tools and none was answered yet, else a greeting."""

    @staticmethod
    def script(prompt: str) -> str:
        return CALL if "<tools>" in prompt and "<tool_response>" not in prompt else "Hello."


async def serve(admin_key: str) -> None:
    config = Config(model="tiny", engine="benchmarks.fuzz_server:Says", threads=1, max_calls=10**9, max_tokens=16)
    async with serving(config, admin_key=admin_key) as stack:
        print(stack.base_url, flush=True)
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1]))
