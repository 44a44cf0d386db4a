"""The clients of `streams.py`: all ask at once, each reads its stream and notes when what came.

Owns: the clock of a request. Reads ``[[url, key], ...]``, writes a list of answers in that order.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any
from urllib.parse import urlsplit

from soak_client import Connection


async def ask(url: str, key: str) -> dict[str, Any]:
    """One streamed answer: when its first byte and its first token came, in seconds, and its token ids."""
    where = urlsplit(url)
    name = where.path.split("/")[2]
    body = {"messages": [{"role": "user", "content": f"I am {name}."}], "stream": True, "return_token_ids": True}
    first_token, ids, rest = 0.0, list[int](), b""
    async with Connection(str(where.hostname), int(where.port or 0)) as connection:
        began = time.perf_counter()
        connection.send("POST", f"{where.path}/chat/completions", key, json.dumps(body).encode())
        status, _ = await connection.head()
        first_byte = time.perf_counter() - began
        assert status == 200, status
        while piece := await connection.chunk():
            *frames, rest = (rest + piece).split(b"\n\n")
            for frame in frames:
                if frame != b"data: [DONE]":
                    ids += [id for c in json.loads(frame[6:])["choices"] for id in c.get("token_ids") or []]
            if ids and not first_token:
                first_token = time.perf_counter() - began
    return {"name": name, "first_byte": first_byte, "first_token": first_token, "ids": ids}


async def client() -> None:
    """Reads ``[[url, key], ...]``, asks all at once, writes what came."""
    wanted = json.loads(sys.stdin.read())
    print(json.dumps(await asyncio.gather(*[ask(url, key) for url, key in wanted])))


if __name__ == "__main__":
    asyncio.run(client())
