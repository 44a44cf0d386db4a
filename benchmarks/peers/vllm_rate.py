"""vLLM's CPU build on the shared workload, in an environment of its own: tokens per second, as JSON.

python benchmarks/peers/vllm_rate.py MODEL_FOLDER --requests 8 32 [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import vllm

sys.path.insert(0, str(Path(__file__).parent))
import workload


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--sentences", type=int, default=3)
    parser.add_argument("--requests", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    options = parser.parse_args()
    llm = vllm.LLM(options.model, dtype="float32", max_model_len=2048, enable_prefix_caching=False)
    rates: dict[str, list[float]] = {}
    for repeat in range(options.repeats + 1):
        for count in options.requests:
            fixed = {"temperature": 1.0, "max_tokens": options.new_tokens, "ignore_eos": True, "logprobs": 0}
            params = [vllm.SamplingParams(**fixed, seed=repeat * 1000 + i) for i in range(count)]
            chats = [[{"role": "user", "content": text}] for text in workload.prompts(count, options.sentences)]
            began = time.perf_counter()
            outputs = llm.chat(chats, params, use_tqdm=False)
            seconds = time.perf_counter() - began
            assert all(len(output.outputs[0].token_ids) == options.new_tokens for output in outputs)
            if repeat:  # the first round warms up
                rates.setdefault(str(count), []).append(count * options.new_tokens / seconds)
    text = json.dumps({"vllm": vllm.__version__, "tokens_per_second": rates})
    print(text)
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
