"""How long does a queued request wait? 64 sessions stream at once, more than the engine has rows.

Owns: the measurement and its JSON. The clients are another process (`streams_client.py`), so that their own work is not
measured. A request is queued when its first token comes after those of as many others as there are rows. Two times
count from its sending: the first byte of its answer, by which clients know that they were heard, and the first token.
What each client got is compared with what its session recorded; a difference ends the run.
``python benchmarks/streams.py [--model tiny] [--sessions 64] [--slots 16] [--rounds 10] [--out FILE]``
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

from minirllm.config import Config
from minirllm.machine import machine
from minirllm.session import Session
from minirllm.stack import Stack, serving

CLIENT = Path(__file__).with_name("streams_client.py")
TOKENS = 64  # of an answer


async def one_round(stack: Stack, sessions: list[Session]) -> list[dict[str, Any]]:
    """All of these sessions' clients at once, in order of their first token."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(CLIENT), stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    wanted = [[f"{stack.base_url}/sessions/{session.id}/v1", session.key] for session in sessions]
    out, _ = await process.communicate(json.dumps(wanted).encode())
    answers: list[dict[str, Any]] = json.loads(out)
    for session, answer in zip(sessions, answers, strict=True):
        (step,) = session.steps
        assert step.node is not None
        assert answer["ids"] == session.tree.response(step.node)[0], f"{session.id} got other tokens than it sampled"
        assert session.counters["drift"] == session.counters["aborted"] == 0
        stack.sessions.close(session.id)
    return sorted(answers, key=lambda answer: answer["first_token"])


def summary(answers: list[dict[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {"requests": len(answers)}
    for name in ("first_byte", "first_token"):
        times_ms = np.array([answer[name] for answer in answers]) * 1000
        p50, p99 = np.percentile(times_ms, [50, 99]).tolist()
        found |= {f"{name}_p50_ms": p50, f"{name}_p99_ms": p99, f"{name}_max_ms": float(times_ms.max())}
    return found


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    config = Config(model=options.model, slots=options.slots, max_tokens=TOKENS)
    result: dict[str, Any] = {"machine": machine(), "model": options.model, "sessions": options.sessions}
    admitted, queued = list[dict[str, Any]](), list[dict[str, Any]]()
    async with serving(config) as stack:
        result |= {"slots": options.slots, "level": stack.policy.level}
        for turn in range(options.rounds + 1):
            made = [stack.sessions.create(f"s{turn}-{n}", seed_parts=(turn, n)) for n in range(options.sessions)]
            answers = await one_round(stack, made)
            if turn:  # the first one warms up
                admitted, queued = admitted + answers[: options.slots], queued + answers[options.slots :]
    result |= {"rounds": options.rounds, "load": os.getloadavg()[0], "tokens": sum(len(a["ids"]) for a in queued)}
    return {**result, "lost_or_crossed": 0, "admitted_at_once": summary(admitted), "queued": summary(queued)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="tiny")
    for name, value in (("--sessions", 64), ("--slots", 16), ("--rounds", 10)):
        parser.add_argument(name, type=int, default=value)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/baselines/streams.json"))
    options = parser.parse_args()
    result = asyncio.run(measure(options))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    print({name: result[name] for name in ("load", "admitted_at_once", "queued")})


if __name__ == "__main__":
    main()
