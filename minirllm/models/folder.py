"""Model and tokenizer out of a folder of files, with the attention of `minirllm.attention` in every layer.

Owns: loading, and the check that each layer really asks that function. Does not know: what models are called.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from minirllm.attention import IMPLEMENTATION, ForestLayout
from minirllm.errors import ModelError

# what transformers raises for files it cannot use
UNUSABLE = (OSError, ValueError, KeyError, ImportError, RuntimeError, SafetensorError)


def load(path: Path, name: str, dtype: torch.dtype) -> tuple[Any, Any]:
    """(model, tokenizer) on the CPU; `name` is for the sentence. Code from the folder never runs. Raises ModelError."""
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
        model = AutoModelForCausalLM.from_pretrained(
            path,
            config=config,
            dtype=dtype,
            attn_implementation=IMPLEMENTATION,
            trust_remote_code=False,
            use_safetensors=True,
        )
    except UNUSABLE as error:
        raise _unusable(name, error) from error
    return model, load_tokenizer(path, name)


def load_tokenizer(path: Path, name: str) -> Any:
    """The tokenizer alone. Raises ModelError."""
    try:
        return AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    except UNUSABLE as error:
        raise _unusable(name, error) from error


def _unusable(name: str, error: Exception) -> ModelError:
    reason = first_line(error)
    if "trust_remote_code" in str(error) or "custom code" in str(error):
        reason = "it needs code from its own repository, which is never run"
    return ModelError(f"Cannot load model {name} ({reason}): use a causal language model that transformers supports.")


def first_line(error: Exception) -> str:
    """The first line of an error's text, without its full stop; its type when it has none."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0].rstrip(".")


class _Counting(ForestLayout):
    """Counts which layers came to ask for attention."""

    def __init__(self, length: int):
        super().__init__([[(0, length)]])
        self.seen: set[int] = set()

    def attend(self, layer: int, *args: Any) -> torch.Tensor:
        self.seen.add(layer)
        return super().attend(layer, *args)


def check_attention(model: Any, name: str) -> None:
    """Every layer's attention must go through ours, else training and sampling would not see the same keys.

    Raises ModelError.
    """
    layout = _Counting(4)
    layers = model.config.get_text_config().num_hidden_layers
    ids_1T, position_1T = (torch.arange(4, device=model.device)[None] for _ in range(2))
    mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=model.device)  # taken as it is; our attention reads none
    try:
        with torch.no_grad():
            model(input_ids=ids_1T, position_ids=position_1T, attention_mask=mask, layout=layout, use_cache=False)
        reason = f"{len(layout.seen)} of its {layers} layers use exchangeable attention"
    except (TypeError, KeyError, ValueError, RuntimeError, AttributeError) as error:
        reason = f"it cannot take a layout: {error}"
    if len(layout.seen) != layers:
        raise ModelError(
            f"Model {name} ({type(model).__name__}) cannot be used: {reason}; "
            "choose one whose every layer is plain attention (Llama, Qwen, Gemma, Mistral)."
        )
