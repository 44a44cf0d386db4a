"""TRL's GRPOTrainer on the shared workload, in an environment of its own: prints one JSON line with seconds per step.

pip install torch==2.13.0 trl==1.16.0 peft
python benchmarks/peers/trl_steps.py MODEL_FOLDER --sentences 3 --steps 3
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import trl
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

sys.path.insert(0, str(Path(__file__).parent))
import workload


class Clock(TrainerCallback):
    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self.began = time.perf_counter()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.seconds.append(time.perf_counter() - self.began)


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--sentences", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    return parser


def trainer_of(options: argparse.Namespace, folder: str, **settings: Any) -> Any:
    """A GRPOTrainer on the workload, LoRA of rank 16; `settings` are further ones of GRPOConfig."""
    torch.set_num_threads(options.threads)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    chats = [[{"role": "user", "content": text}] for text in workload.prompts(options.prompts, options.sentences)]
    fixed: dict[str, Any] = {
        "use_cpu": True,
        "bf16": False,
        "per_device_train_batch_size": options.group,
        "gradient_accumulation_steps": options.prompts,
        "num_generations": options.group,
        "max_completion_length": options.new_tokens,
        "generation_kwargs": {"min_new_tokens": options.new_tokens},
        "max_steps": options.steps,
        "learning_rate": 1e-6,
        "temperature": 1.0,
        "beta": 0.0,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
        "logging_steps": 1,
    }
    return trl.GRPOTrainer(
        model=model,
        reward_funcs=lambda completions, **kwargs: [workload.reward(c[0]["content"]) for c in completions],
        args=trl.GRPOConfig(output_dir=folder, **(fixed | settings)),
        train_dataset=Dataset.from_list([{"prompt": chat} for chat in chats] * options.steps),
        processing_class=AutoTokenizer.from_pretrained(options.model),
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"),
    )


def main() -> None:
    options = parser().parse_args()
    clock, generation = Clock(), []
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_of(options, folder)
        trainer.add_callback(clock)
        generate = trainer._generate_single_turn

        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return generate(*args, **kwargs)
            finally:
                generation.append(time.perf_counter() - began)

        trainer._generate_single_turn = timed
        trainer.train()
    encode = trainer.processing_class.apply_chat_template
    chats = [[{"role": "user", "content": text}] for text in workload.prompts(options.prompts, options.sentences)]
    result = {
        "trl": trl.__version__,
        "torch": torch.__version__,
        "prompt_tokens": [len(encode(chat, add_generation_prompt=True)["input_ids"]) for chat in chats],
        "seconds": clock.seconds,
        "generate_seconds": generation,
        "peak_rss_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
