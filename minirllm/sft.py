"""Supervised fine-tuning on conversations: rows of messages in, optimizer steps out. Read `train` first.

Owns: the rows, how a conversation becomes a token tree, the order of things in such a run. Does not know: tensors.

A conversation is told to a session as an agent would tell it, and the "engine" behind it gives the very answers of the
row. So its tokens and branches are those of a rollout; every token of every assistant turn is trained on, the end of
the turn included; and the update is the trainer's own.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from minirllm import interrupt, stack
from minirllm.algorithms.sft import SFT
from minirllm.batch import Batch, pack
from minirllm.config import Config, refuse
from minirllm.dialects import chat
from minirllm.engines import Sampler
from minirllm.errors import ContextOverflow, DataError, RequestError
from minirllm.files import sha256, why
from minirllm.log import RunLog
from minirllm.renderer import Renderer
from minirllm.saving import Saving
from minirllm.session import Session
from minirllm.standing import schedule
from minirllm.trainer import Trainer
from minirllm.tree import Forest, TokenTree, merge
from minirllm.types import Completion, Message, ModelRequest, SampledToken, SamplingParams, StopCheck

NOT_OURS = ("mismatch_", "ratio_", "effective_sample")  # metrics of a sampler, which there is none


@dataclass(frozen=True)
class Row:
    """One conversation, and where it was read."""

    messages: list[Message]
    tools: list[dict[str, Any]]
    where: str


def read_rows(path: Path) -> list[Row]:
    """The conversations of a JSON-lines file: ``{"messages": [...], "tools": [...]}`` a line, as chat completions have
    them. Raises DataError naming the line."""
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except OSError as error:
        raise DataError(f"{path} cannot be read: {why(error)}.") from None
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        packed = "unpack the file if it is compressed, else save it as UTF-8"
        raise DataError(f"{path} line {line} is no text in UTF-8: {packed}.") from None
    rows = [_row(line, f"{path} line {number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not rows:
        raise DataError(f"{path} holds no rows: give one JSON object with messages per line.")
    return rows


def _row(line: str, where: str) -> Row:
    try:
        value = json.loads(line, object_pairs_hook=_once)
        fields = {"messages": value["messages"], "tools": value.get("tools")}
        request = chat.parse(fields)
    except (ValueError, RecursionError) as error:  # an integer may be too long for Python
        raise DataError(f"{where} is no JSON: {error}.") from None
    except (KeyError, TypeError, AttributeError):
        raise DataError(f"{where} must be a JSON object with a list of messages.") from None
    except RequestError as error:
        raise DataError(f"{where}: {error.message}") from None
    for place, message in enumerate(fields["messages"]):
        if message.get("weight") not in (None, 1):
            one = f"messages[{place}].weight is {message['weight']!r:.40}"
            raise DataError(f"{where}: {one}, but all assistant messages count alike: leave weight out.")
    messages = request.messages or []
    if not any(message.role == "assistant" for message in messages):
        raise DataError(f"{where} has no assistant message, so there is nothing to learn from it.")
    if messages[0].role in ("assistant", "tool"):
        raise DataError(f"{where} begins with a message of role {messages[0].role}: user or system must come first.")
    for place, (given, message) in enumerate(zip(value["messages"], messages, strict=True)):
        at, said = f"{where}: messages[{place}]", message.content or message.tool_calls or message.reasoning
        if message.role == "assistant" and not said and given.get("content") is None:
            raise DataError(f'{at} has neither content nor tool_calls: give it some, or "" for an empty answer.')
    return Row(messages, request.tools, where)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object. Raises ValueError for a key that is there twice: which of its values was meant?"""
    if len(found := dict(pairs)) < len(pairs):
        raise ValueError(f"of the keys {', '.join(key for key, _ in pairs)} one is there twice")
    return found


class _Answers(Sampler):
    """Gives the very answer that it was told to give: nothing is scored, nor cut."""

    def __init__(self, max_context: int, vocab_size: int):
        self.max_context, self.vocab_size, self.answer = max_context, vocab_size, list[int]()

    async def generate(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        seed: int,
        *,
        stop: StopCheck | None = None,
        on_token: Callable[[SampledToken], None] | None = None,
        weights: int | None = None,
    ) -> Completion:
        """The answer; its log-probabilities are not known, and not needed."""
        if (length := len(prompt_ids) + len(self.answer)) > self.max_context:
            raise ContextOverflow(self.max_context, length)
        if on_token is not None:
            for id in self.answer:
                on_token(SampledToken(id, 0.0))
        return Completion(self.answer, [0.0] * len(self.answer), "stop", 0)


async def told(row: Row, renderer: Renderer, limit: int, vocabulary: int) -> TokenTree:
    """The conversation as a token tree in which its assistant turns are sampled. Raises DataError when it has more
    than `limit` tokens, or cannot be written by the chat template."""
    engine = _Answers(limit, vocabulary)
    session = Session("sft", "", engine, renderer, "", default_max_tokens=limit, max_calls=len(row.messages))
    try:
        for place, message in enumerate(row.messages):
            if message.role == "assistant":
                engine.answer = renderer.turn(row.messages[: place + 1], row.tools)
                reply = await session.call(ModelRequest(messages=row.messages[:place], tools=row.tools))
                session.delivered(reply.id)
    except ContextOverflow as error:
        raise DataError(
            f"{row.where} has {error.got} tokens, but max_context is {limit}: shorten the row or raise --max-context."
        ) from None
    except RequestError as error:
        raise DataError(f"{row.where}: {error.message}") from None
    return session.tree


def micro_batches(trees: Sequence[TokenTree], config: Config) -> list[Forest]:
    """Packed forests in which every trained token weighs the same and the weights add up to 1."""
    forests = [merge([tree])[0] for tree in trees]
    total = sum(int(forest.trained_T.sum()) for forest in forests)
    for index, forest in enumerate(forests):
        forest.advantage_T[forest.trained_T] = 1
        forest.weight_T[forest.trained_T] = 1 / total
        forest.sequence_T[forest.trained_T] = index
    return pack(forests, config)


async def train(
    data: Path,
    config: Config,
    *,
    val: Path | None = None,
    epochs: int | None = None,
    resume: bool = False,
    quiet: bool = False,
    stop: Callable[[], bool] = lambda: False,
) -> dict[str, Any]:
    """Fine-tune on the rows of `data`, writing ``runs_dir/run``; returns the last metrics row. `epochs` sets the number
    of steps; the loss of `val` is measured every ``eval_every`` steps. Raises DataError, and as `train.train` does."""
    config = config.trainable()
    algorithm = SFT()
    algorithm.validate(config)
    if val is None:
        refuse("no rows of --val", config, "eval_every")
    rows = await asyncio.to_thread(read_rows, data)
    held_out = await asyncio.to_thread(read_rows, val) if val is not None else []
    if epochs is not None:
        size = min(config.batch_size, len(rows))
        config = replace(config, steps=epochs * (len(rows) // size))
    with await asyncio.to_thread(RunLog, config.run_folder(data.stem), config, resume=resume, quiet=quiet) as log:
        loaded, policy, engine, renderer = await asyncio.to_thread(stack.load, config, None, log.say)
        try:
            trees = [await told(row, renderer, engine.max_context, policy.vocab_size) for row in rows]
            val_trees = [await told(row, renderer, engine.max_context, policy.vocab_size) for row in held_out]
            digest = await asyncio.to_thread(sha256, data)
            facts = {"task": f"sft {data.name}", "seed": config.seed, "data_sha256": digest}
            await asyncio.to_thread(log.manifest, **stack.facts(loaded, policy, renderer), **facts)
            trainer = Trainer(policy, config, algorithm, log.folder / "skipped")
            return await _loop(trainer, log, trees, val_trees, resume, stop)
        finally:
            await asyncio.to_thread(policy.close)


async def _loop(
    trainer: Trainer,
    log: RunLog,
    trees: list[TokenTree],
    val_trees: list[TokenTree],
    resume: bool,
    stop: Callable[[], bool],
) -> dict[str, Any]:
    config, policy = trainer.config, trainer.policy
    saving = Saving(config, log, policy, trainer)
    done = (await saving.restore())[0] if resume else 0
    held_out = micro_batches(val_trees, config)
    row: dict[str, Any] = {}
    if done == 0 and held_out and not stop():
        row = {"step": 0, "val_loss": await trainer.measure(held_out)}
        await asyncio.to_thread(log.step, row)
    for step in range(done + 1, config.steps + 1):
        if stop():
            return row or {"step": done}
        began = time.perf_counter()
        forests = micro_batches(schedule(trees, config, step), config)
        metrics = await trainer.update(Batch([forests]))
        row = {
            "step": step,
            **{name: value for name, value in metrics.items() if not name.startswith(NOT_OURS)},
            "trained_tokens": float(sum(int(forest.trained_T.sum()) for forest in forests)),
            "tokens": float(sum(map(len, forests))),
            "weight_version": policy.version,
            "weights_sha256": await policy.run(policy.weights_sha256),
        }
        last = step == config.steps
        if held_out and (last or (config.eval_every and step % config.eval_every == 0)):
            row["val_loss"] = await trainer.measure(held_out)
        row["seconds_step"] = time.perf_counter() - began
        await asyncio.to_thread(log.step, row)
        if trainer.problem:
            log.warn(trainer.problem)
        if last or step % config.save_every == 0 or stop():
            await saving.save(step, {})
    return row


def run(data: Path, config: Config, **options: Any) -> dict[str, Any]:
    """`train` for callers without an event loop; signals end it as `interrupt` says."""
    return interrupt.run(lambda stop: train(data, config, **options, stop=stop))
