"""The one copy of the weights: forward, head, logprobs, adapter, version, and the one thread that runs torch.

Owns: the Hugging Face module, LoRA or full parameters, the device lane, the determinism level. The engine and the
trainer meet only here. Does not know: text, sessions, slots, losses.

Legend: T packed tokens, N scored tokens, E hidden size, V vocabulary.
"""

from __future__ import annotations

import asyncio
import copy
import hashlib
import os
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.utils import logging as transformers_logging

from minirllm import attention, exactness, head, linear
from minirllm.config import Config
from minirllm.errors import ConfigError, ModelError
from minirllm.tree import Forest

Result = TypeVar("Result")

transformers_logging.disable_progress_bar()  # bars of loading and saving would tear the display of a run

OLDER = "older.safetensors"  # in a saved folder: weights of earlier versions, which rollouts under way sample from
PROBED_LAYERS = 6  # the longest repeating pattern of layer kinds in use (Gemma 3: five sliding, one full)


class Policy:
    """A causal language model that the engine samples from and the trainer updates in place."""

    def __init__(self, model: Any, tokenizer: Any, config: Config, lane: ThreadPoolExecutor | None = None):
        """`model` is a transformers causal LM loaded with ``attn_implementation=attention.IMPLEMENTATION``. `lane` is
        that of another policy, whose work this one's then waits for; whose lane it is closes it. Raises ModelError for
        a model this cannot drive, ConfigError for a determinism level the machine does not have."""
        self.tokenizer, self.config = tokenizer, config
        self.device = next(model.parameters()).device
        self.version = 0
        self.kept: dict[int, dict[str, torch.nn.Parameter]] = {}  # by version: copies of the trainable weights
        # given, so that none is built; unread
        self._mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=self.device)
        # in a small model, waking a second thread costs more than it brings
        small = sum(p.numel() for p in model.parameters()) < 20_000_000
        self.threads = config.threads or (1 if small else min(2, os.cpu_count() or 1))
        self.lane = lane or ThreadPoolExecutor(1, "device", initializer=torch.set_num_threads, initargs=(self.threads,))
        self.max_positions = int(getattr(model.config.get_text_config(), "max_position_embeddings", config.max_context))
        self.eos_ids = _eos_ids(model, tokenizer)
        self.model = self.lane.submit(self._trainable_model, model).result()
        self.lane.submit(linear.speed_up, self.model).result()
        base = self.model.get_base_model() if isinstance(self.model, PeftModel) else self.model
        softcap = getattr(base.config.get_text_config(), "final_logit_softcapping", None)
        self._decoder, self._head = base.get_decoder(), head.Head(base.get_output_embeddings(), softcap)
        self.vocab_size = int(self._head.linear.weight.shape[0])
        copied = (config.kl_beta or config.teacher == "base") and not config.lora_rank
        self._reference = self.lane.submit(self._frozen_copy).result() if copied else None
        self.level = self.lane.submit(self._probe).result()

    # -- the device lane ------------------------------------------------------------------------------------------

    async def run(self, fn: Callable[..., Result], *args: Any) -> Result:
        """`fn(*args)` on the one thread that may touch torch: grad mode and thread counts are per thread."""
        return await asyncio.get_running_loop().run_in_executor(self.lane, fn, *args)

    def close(self) -> None:
        """Let the thread end after what is queued."""
        self.lane.shutdown(wait=True, cancel_futures=True)

    # -- forward ----------------------------------------------------------------------------------------------------

    @property
    def static_shapes(self) -> bool:
        """Does the engine run one token in every slot, or one whole chunk, whatever there is to do? At the fixed level
        for equal bits; on CUDA at any, because only a step of one shape can be captured as a graph."""
        return self.level == "fixed" or self.device.type == "cuda"

    def hidden(self, token_T: Tensor, position_T: Tensor, layout: attention.Layout) -> Tensor:
        """One packed forward of the decoder, of a multiple of `attention.ROW_MULTIPLE` rows. Returns ``[T, E]``."""
        T = len(token_T)
        pad = -T % attention.ROW_MULTIPLE
        return self._decoder(
            input_ids=F.pad(token_T, (0, pad))[None],
            position_ids=F.pad(position_T, (0, pad))[None],
            attention_mask=self._mask,
            layout=attention.Packed([(T, layout)]) if pad else layout,
            use_cache=False,
        ).last_hidden_state[0, :T]

    def logits(self, hidden_NE: Tensor) -> Tensor:
        """The head, in fp32. Returns ``[N, V]``."""
        return self._head.logits(hidden_NE)

    def score(
        self, forest: Forest, reference: bool = False, entropy: bool = False
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Of every trained token its log-probability (with gradient), the entropy in nats (with one if `entropy`) and,
        where the forest has targets, how far in nats (with gradient) its distribution is from them: see
        `head.Head.score`. ``[T]`` each, else 0.

        The logit that scores token t stands at its parent. `reference` scores with the frozen base model, without
        gradient."""
        likely = None
        if forest.targets is not None:
            likely = head.Likely(*(torch.from_numpy(array).to(self.device) for array in forest.targets))
        with self.frozen() if reference else nullcontext():
            at_N, hidden_NE = self._parents(forest)
            found = [torch.zeros(len(forest), device=self.device) for _ in range(2 if likely is None else 3)]
            if len(at_N):
                columns = (forest.token_T, forest.temperature_T)
                token_N, temperature_N = (torch.from_numpy(values_T).to(self.device)[at_N] for values_T in columns)
                values = self._head.score(hidden_NE, token_N, temperature_N, entropy, likely)
                found = [zeros_T.index_put((at_N,), value_N) for zeros_T, value_N in zip(found, values, strict=True)]
        return found[0], found[1], None if likely is None else found[2]

    @torch.no_grad()
    def likely(self, forest: Forest, k: int, reference: bool = False) -> tuple[Tensor, head.Likely]:
        """For each trained token, in order: its log-probability at temperature 1, and the `k` most likely in its
        place. `reference` as in `score`."""
        with self.frozen() if reference else nullcontext():
            at_N, hidden_NE = self._parents(forest)
            return self._head.likely(hidden_NE, torch.from_numpy(forest.token_T).to(self.device)[at_N], k)

    def _parents(self, forest: Forest) -> tuple[Tensor, Tensor]:
        """Where the trained tokens stand, ``[N]``, and the hidden states that score them, ``[N, E]``."""
        token_T = torch.from_numpy(forest.token_T).to(self.device)
        position_T = torch.from_numpy(forest.position_T).to(self.device)
        at_N = torch.from_numpy(forest.trained_T.nonzero()[0]).to(self.device)
        parent_N = torch.from_numpy(forest.parent_T).to(self.device)[at_N]
        assert len(at_N) == 0 or int(parent_N.min()) >= 0, "a trained token without a parent cannot be scored"
        return at_N, self.hidden(token_T, position_T, attention.ForestLayout(forest.paths()))[parent_N]

    # -- weights ----------------------------------------------------------------------------------------------------

    def keep(self) -> None:
        """A copy of the weights as they are now, to sample from while they are trained."""
        self.kept[self.version] = {
            name: torch.nn.Parameter(p.detach().clone(), requires_grad=False) for name, p in self.trainable().items()
        }

    @contextmanager
    def weights_of(self, version: int | None) -> Iterator[None]:
        """Inside, the forward is that of the kept weights of `version`; None: of the weights as they are."""
        if version is None:
            yield
            return
        kept, live = self.kept[version], self.trainable()
        if self.device.type == "cuda":  # a captured graph reads the memory of the live ones
            tensors, others = [p.data for p in live.values()], [kept[name].data for name in live]
            before = [tensor.clone() for tensor in tensors]
            try:
                torch._foreach_copy_(tensors, others)
                yield
            finally:
                torch._foreach_copy_(tensors, before)
            return
        names = {id(parameter): name for name, parameter in live.items()}
        places = [
            (module._parameters, slot, p, kept[names[id(p)]])
            for module in self.model.modules()
            for slot, p in module._parameters.items()
            if id(p) in names
        ]
        try:
            for parameters, slot, _, other in places:
                parameters[slot] = other
            yield
        finally:
            for parameters, slot, own, _ in places:
                parameters[slot] = own

    def trainable(self) -> dict[str, torch.nn.Parameter]:
        """Name to parameter, in a fixed order."""
        return {name: p for name, p in sorted(self.model.named_parameters()) if p.requires_grad}

    def weights_sha256(self) -> str:
        """Of the trainable weights: names, shapes and bytes."""
        digest = hashlib.sha256()
        for name, parameter in self.trainable().items():
            digest.update(f"{name}{tuple(parameter.shape)}{parameter.dtype}".encode())
            digest.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy().data)
        return digest.hexdigest()

    def save(self, folder: Path) -> None:
        """The adapter in peft's form, or the whole model with its tokenizer in transformers' form."""
        options = {"save_embedding_layers": False} if self.config.lora_rank else {}  # else peft asks the hub
        self.model.save_pretrained(folder, **options)
        older = {version: kept for version, kept in self.kept.items() if version != self.version}
        if older:
            save_file({f"{v}/{name}": p.data for v, kept in older.items() for name, p in kept.items()}, folder / OLDER)
        if not self.config.lora_rank:
            self.tokenizer.save_pretrained(folder)

    @torch.no_grad()
    def load_weights(self, folder: Path) -> None:
        """Copies what `save` wrote into the live parameters. Raises ModelError when it is another model's or rank's."""
        path = folder / ("adapter_model.safetensors" if self.config.lora_rank else "model.safetensors")
        if not path.is_file():
            raise ModelError(
                f"{folder} holds no {path.name}: it was saved with another lora_rank (now {self.config.lora_rank})."
            )
        saved = load_file(path)
        for name, parameter in self.trainable().items():
            key = name.replace(".default.weight", ".weight")
            if key not in saved or saved[key].shape != parameter.shape:
                raise ModelError(f"{path} does not fit this model: {key} is missing or has another shape.")
            parameter.copy_(saved[key])

    def load_kept(self, folder: Path) -> None:
        """The older weights that `save` wrote beside the weights themselves, if any."""
        self.kept = {}
        for key, tensor in (load_file(folder / OLDER) if (folder / OLDER).is_file() else {}).items():
            version, _, name = key.partition("/")
            parameter = torch.nn.Parameter(tensor.to(self.device), requires_grad=False)
            self.kept.setdefault(int(version), {})[name] = parameter

    # -- set-up -----------------------------------------------------------------------------------------------------

    def _trainable_model(self, model: Any) -> Any:
        config = self.config
        model.eval()  # no dropout, ever: the sampler and the trainer are one function
        if not config.lora_rank:
            return model.requires_grad_(True)
        names = config.lora_targets
        targets = names if names == "all-linear" else names.split(",")
        lora = LoraConfig(
            r=config.lora_rank, lora_alpha=config.lora_alpha, target_modules=targets, task_type="CAUSAL_LM"
        )
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)  # by peft
            torch.manual_seed(config.seed)
            try:
                return get_peft_model(model, lora).eval()
            except ValueError as error:
                raise ConfigError(f"lora_targets {config.lora_targets!r} does not fit this model: {error}") from None

    def _frozen_copy(self) -> Any:
        linear = copy.deepcopy(self._head.linear).requires_grad_(False)
        return copy.deepcopy(self._decoder).requires_grad_(False), head.Head(linear, self._head.softcap)

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Inside, the forward is that of the model before any training, without gradient."""
        live = self._decoder, self._head
        with torch.no_grad():
            if self.config.lora_rank:
                with self.model.disable_adapter():
                    yield
                return
            assert self._reference is not None, "a frozen copy is kept only where it is asked for"
            try:
                self._decoder, self._head = self._reference
                yield
            finally:
                self._decoder, self._head = live

    @torch.no_grad()
    def _probe(self) -> str:
        """The determinism level; and a check that driving decoder and head by hand is what the model itself does."""
        name = "attn_logit_softcapping"
        if getattr(self.model.config.get_text_config(), name, None) is not None:
            raise ModelError(f"{type(self.model).__name__} has {name}, which this attention does not do; use another.")
        ids_T = torch.arange(1, 9, device=self.device) % self.vocab_size
        position_T = torch.arange(8, device=self.device)
        layout = attention.ForestLayout([[(0, 8)]])
        try:
            inputs = {"input_ids": ids_T[None], "position_ids": position_T[None], "attention_mask": self._mask}
            want_TV = self.model(**inputs, layout=layout, use_cache=False).logits[0]
        except (KeyError, TypeError) as error:
            raise ModelError(
                f"{type(self.model).__name__} does not hand the layout to its attention ({error}); use another model."
            ) from None
        got_TV = self.logits(self.hidden(ids_T, position_T, layout))
        if (got_TV - want_TV).abs().max() > (1e-3 if want_TV.dtype == torch.float32 else 0.5):
            raise ModelError(
                f"{type(self.model).__name__} has more than a linear head after its decoder; use another model."
            )
        return self._level()

    def _level(self) -> str:
        wanted, attention.ROW_MULTIPLE = self.config.determinism, exactness.ROW_MULTIPLES[0]
        if wanted == "off":
            return "off"
        if self.device.type == "cuda":
            exactness.settle()
        exact = False
        if wanted != "fixed" and self.device.type == "cpu" and next(self.model.parameters()).dtype == torch.float32:
            exact = self._find_row_multiple() is not None
        if wanted == "exact" and not exact:
            why = "on this machine bits depend on the batch shape"
            raise ConfigError(f"determinism = exact: {why}; use determinism = fixed or auto.")
        return "exact" if exact else "fixed"

    def _find_row_multiple(self) -> int | None:
        """Probe a few layers (all have the same shapes) with a busy adapter: a fresh one multiplies by zero, which
        would hide its thin products."""
        adapter = [p for name, p in self.trainable().items() if ".lora_B." in name]
        generator = torch.Generator().manual_seed(0)
        for parameter in adapter:
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.02)
        layers = self._decoder.layers
        try:
            self._decoder.layers = layers[:PROBED_LAYERS]
            return exactness.find_row_multiple(self.hidden, self.logits, self.vocab_size, self.device)
        finally:
            self._decoder.layers = layers
            for parameter in adapter:
                parameter.zero_()


def _eos_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """Every end id that the generation config, the model config and the tokenizer name."""
    found: set[int] = set()
    for source in (model.generation_config, model.config, tokenizer):
        ids = getattr(source, "eos_token_id", None)
        found.update(ids if isinstance(ids, list | tuple) else [] if ids is None else [ids])
    return frozenset(found)
