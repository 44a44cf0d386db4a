"""The engine against ``model.generate`` of the same process, model, prompts and thread count. Writes JSON.

    python benchmarks/engine.py [--quick] [--threads N] [--determinism exact|fixed|off] [--out FILE]

mixed:  32 concurrent requests, prompts of 20 to 300 tokens, outputs of 8 to 128. ``generate`` gets them as one padded
        batch and runs until the longest output is done; both are credited with the tokens asked for.
shared: 8 requests with one 300-token prompt, 64 tokens each.
rates:  the engine alone, 8 and 32 requests of 94 + 64 tokens.
Both sample at temperature 1 with end tokens ignored, so that every length is exact; the engine also returns logprobs.
Rounds alternate between the two, and the best round of each counts: the machine may be busy.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import minirllm  # noqa: F401  # before torch: sets the variables that its arithmetic depends on

# isort: split
import torch
import transformers
from transformers import AutoModelForCausalLM

from minirllm import models
from minirllm.config import Config
from minirllm.engines.hf import HFEngine
from minirllm.policy import Policy
from minirllm.types import SamplingParams

Load = list[tuple[list[int], int]]  # (prompt ids, tokens to sample)


def mixed(count: int, vocabulary: int) -> Load:
    chance = random.Random(0)
    return [
        ([chance.randrange(vocabulary) for _ in range(chance.randint(20, 300))], chance.randint(8, 128))
        for _ in range(count)
    ]


def shared(count: int, vocabulary: int, tokens: int) -> Load:
    chance = random.Random(1)
    prompt = [chance.randrange(vocabulary) for _ in range(300)]
    return [(prompt, tokens)] * count


@torch.no_grad()
def run_generate(model: Any, load: Load) -> None:
    width = max(len(prompt) for prompt, _ in load)
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt, _ in load])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt, _ in load])
    longest = max(tokens for _, tokens in load)
    model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=longest,
        min_new_tokens=longest,
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        pad_token_id=0,
    )


async def run_engine(engine: HFEngine, load: Load) -> None:
    engine.weights_changed()
    got = await asyncio.gather(
        *[
            engine.generate(prompt, SamplingParams(max_tokens=tokens, ignore_eos=True), seed)
            for seed, (prompt, tokens) in enumerate(load)
        ]
    )
    assert [len(completion.token_ids) for completion in got] == [tokens for _, tokens in load]


def rates(loop: asyncio.AbstractEventLoop, engine: HFEngine, vocabulary: int, rounds: int) -> dict[str, float]:
    """Tokens per second of 8 and 32 different prompts of 94 tokens, 64 sampled each: what peers/vllm_rate.py runs."""
    chance, found = random.Random(2), {}
    for count in (8, 32):
        load = [([chance.randrange(vocabulary) for _ in range(94)], 64) for _ in range(count)]
        seconds = min(timed(lambda: loop.run_until_complete(run_engine(engine, load))) for _ in range(rounds))  # noqa: B023
        found[str(count)] = round(count * 64 / seconds, 1)
    return found


def timed(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def compare(loop: asyncio.AbstractEventLoop, engine: HFEngine, plain: Any, load: Load, rounds: int) -> dict[str, Any]:
    """Both compute on the policy's device thread: a second pool of OpenMP threads would slow either."""
    seconds: dict[str, list[float]] = {"engine": [], "generate": []}
    for _ in range(rounds):
        seconds["engine"].append(timed(lambda: loop.run_until_complete(run_engine(engine, load))))
        seconds["generate"].append(timed(lambda: loop.run_until_complete(engine.policy.run(run_generate, plain, load))))
    tokens = sum(n for _, n in load)
    best = {name: min(values) for name, values in seconds.items()}
    return {
        "requests": len(load),
        "prompt_tokens": sum(len(prompt) for prompt, _ in load),
        "output_tokens": tokens,
        "engine_tokens_per_s": round(tokens / best["engine"], 1),
        "generate_tokens_per_s": round(tokens / best["generate"], 1),
        "ratio": round(best["generate"] / best["engine"], 2),
        "seconds": {name: [round(s, 2) for s in values] for name, values in seconds.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="8 requests instead of 32, one round: does it run at all")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--determinism", default="auto")
    parser.add_argument("--lora-rank", type=int, default=0)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    config = Config(determinism=args.determinism, threads=args.threads, lora_rank=args.lora_rank, max_context=512)
    loaded = models.load("smollm2-135m")
    assert loaded.path is not None
    plain = AutoModelForCausalLM.from_pretrained(loaded.path, dtype=torch.float32, attn_implementation="sdpa").eval()
    plain.generation_config.eos_token_id = None
    policy = Policy(loaded.model, loaded.tokenizer, config)
    loop = asyncio.new_event_loop()
    engine = HFEngine(policy, config)
    loop.run_until_complete(engine.start())
    rounds, count, tokens = (1, 8, 16) if args.quick else (2, 32, 64)
    result = {
        "mixed": compare(loop, engine, plain, mixed(count, policy.vocab_size), rounds),
        "shared": compare(loop, engine, plain, shared(8, policy.vocab_size, tokens), rounds),
        "rates": rates(loop, engine, policy.vocab_size, rounds),
        "level": policy.level,
        "lora_rank": args.lora_rank,
        "threads": policy.threads,
        "cpu": _cpu(),
        "load_average": round(os.getloadavg()[0], 1),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "environment": {name: os.environ.get(name) for name in ("MKL_CBWR", "GOMP_SPINCOUNT", "OMP_NUM_THREADS")},
    }
    loop.run_until_complete(engine.close())
    policy.close()
    text = json.dumps(result, indent=2)
    print(text)
    if args.out:
        args.out.write_text(text + "\n")


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.processor()
    )


if __name__ == "__main__":
    main()
