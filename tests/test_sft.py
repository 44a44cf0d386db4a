"""Fine-tuning on given conversations: exact boundaries, the plain definition of the loss, resumption, bad rows."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from minirllm import sft, stack
from minirllm.cli import cli
from minirllm.config import Config, load
from minirllm.errors import ConfigError, DataError
from minirllm.log import explain, read_json, read_metrics
from minirllm.models import tiny
from minirllm.renderer import Renderer
from minirllm.sft import Row, micro_batches, read_rows, told
from minirllm.types import Message
from tests.chat_templates import ALL, TOOLS, call, calling, renderer
from tests.sampled import plain_attention

TINY = Config(model="tiny", lora_rank=4, lr=1e-2, batch_size=2, threads=1)
ROWS = [
    {"messages": [{"role": "user", "content": f"say {word}"}, {"role": "assistant", "content": word * 2}]}
    for word in ("ab", "cd", "ef", "gh")
]


def rows_file(folder: Path, rows: list[Any], name: str = "rows.jsonl") -> Path:
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def conversation(*texts: str, **more: Any) -> Row:
    roles = ("user", "assistant")
    return Row([Message(roles[i % 2], text) for i, text in enumerate(texts)], more.get("tools", []), "row")


def learned(it: Renderer, tree: Any) -> list[str]:
    return [it.decode(node.tokens) for node in tree.nodes if node.sampled]


async def test_every_token_of_every_answer_is_learned_and_nothing_else() -> None:
    it = Renderer(tiny.build_tokenizer())
    tree = await told(conversation("hi", "Hello!", "more", "Yes."), it, 4000, 512)
    end = it.decode([min(it.eos_ids)])
    assert learned(it, tree) == [f"Hello!{end}", f"Yes.{end}"]
    (forest,) = micro_batches([tree], Config(micro_batch_tokens=4000))
    assert "".join(it.decode([id]) for id in forest.token_T[forest.trained_T]) == f"Hello!{end}Yes.{end}"
    count = forest.trained_T.sum()
    assert forest.weight_T[forest.trained_T].tolist() == pytest.approx([1 / count] * count)
    assert (forest.weight_T[~forest.trained_T] == 0).all()


@pytest.mark.parametrize("name", sorted(ALL))
async def test_answers_are_what_the_template_writes_in_every_style(name: str) -> None:
    """Told turn by turn, a conversation has the tokens of the template's own rendering of it, or is refused."""
    it, row = await asyncio.to_thread(renderer, name), conversation("one", "two", "three", "four")
    if name == "deepseek_r1":  # its turns begin inside the reasoning, and these have none
        with pytest.raises(DataError, match="row: The chat template writes this assistant turn otherwise"):
            await told(row, it, 4000, 10**6)
        return
    tree = await told(row, it, 4000, 10**6)
    texts = learned(it, tree)
    assert [text.count(word) for text, word in zip(texts, ("two", "four"), strict=True)] == [1, 1]
    for node in tree.nodes:
        if node.sampled:
            assert node.tokens[-1] in it.eos_ids
            assert it.parse(node.tokens).content in ("two", "four")


async def test_calls_are_learned_in_the_models_own_syntax() -> None:
    it = await asyncio.to_thread(renderer, "tiny")
    messages = [Message("user", "go"), calling(call()), Message("tool", "done", tool_call_id="a")]
    tree = await told(Row([*messages, Message("assistant", "ok")], TOOLS, "row"), it, 4000, 10**6)
    first = next(node for node in tree.nodes if node.sampled)
    assert len(it.parse(first.tokens, TOOLS).tool_calls) == 1


async def test_the_loss_is_the_mean_of_cross_entropies_one_sequence_at_a_time(tmp_path: Path) -> None:
    loaded, policy, engine, it = await asyncio.to_thread(stack.load, TINY)
    rows = await asyncio.to_thread(read_rows, rows_file(tmp_path, ROWS))
    trees = [await told(row, it, engine.max_context, policy.vocab_size) for row in rows]
    trainer = sft.Trainer(policy, TINY, sft.SFT())
    losses = []
    for row in rows:
        prompt, answer = it.prompt(row.messages[:1]), it.turn(row.messages)
        ids = torch.tensor([*prompt, *answer])
        with plain_attention(policy):
            logits = policy.model(input_ids=ids[None], use_cache=False).logits[0].float()
        scores, targets = logits[len(prompt) - 1 : -1], ids[len(prompt) :]
        losses.append(torch.nn.functional.cross_entropy(scores, targets, reduction="none"))
    wanted = torch.cat(losses).mean().item()
    settings = [{"micro_batch_tokens": 4000}, {"micro_batch_tokens": 30}, {"packing": "paths"}]
    forests = [micro_batches(trees, Config(**more)) for more in settings]
    assert list(map(len, forests)) == [1, 4, 4]
    for micro in forests:
        assert await trainer.measure(micro) == pytest.approx(wanted, rel=1e-5)
    assert loaded.name == "tiny"
    await asyncio.to_thread(policy.close)


async def test_a_run_learns_measures_and_repeats_and_a_killed_one_goes_on_to_the_same_weights(tmp_path: Path) -> None:
    data, val = rows_file(tmp_path, ROWS), rows_file(tmp_path, ROWS[:1], "val.jsonl")
    config = Config(**{**TINY.to_dict(), "runs_dir": str(tmp_path), "eval_every": 2, "save_every": 1})

    async def run(name: str, **more: Any) -> list[dict[str, Any]]:
        settings = Config(**{**config.to_dict(), "run": name})
        await sft.train(data, settings, val=val, epochs=3, quiet=True, **more)
        return await asyncio.to_thread(read_metrics, tmp_path / name / "metrics.jsonl")

    whole = await run("whole")
    assert [row["step"] for row in whole] == [0, 1, 2, 3, 4, 5, 6]
    assert [row["step"] for row in whole if "val_loss" in row] == [0, 2, 4, 6]
    assert whole[-1]["loss"] < whole[1]["loss"]
    assert whole[-1]["val_loss"] < whole[0]["val_loss"]
    assert {"val_loss", "loss", "entropy", "lr", "trained_tokens"} <= whole[-1].keys()
    assert not any(name.startswith(("mismatch", "ratio")) for name in whole[-1])
    asked = iter([False] * 3 + [True] * 100)
    await run("cut", stop=lambda: next(asked))
    again = await run("cut", resume=True)
    assert [row["weights_sha256"] for row in again[1:]] == [row["weights_sha256"] for row in whole[1:]]
    manifest = await asyncio.to_thread(read_json, tmp_path / "whole" / "manifest.json")
    assert (manifest["task"], len(manifest["data_sha256"])) == ("sft rows.jsonl", 64)


SAID = '{"role": "assistant", "content": "x"}'
ASKED = '{"messages": [{"role": "user", "content": "x"}, '


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", r"line 2 is no JSON"),
        ("[" * 100_000, r"line 2 is no JSON"),
        ('{"messages": ' + "9" * 5000 + "}", r"line 2 is no JSON"),
        ("[]", r"line 2 must be a JSON object with a list of messages"),
        ('{"text": "x"}', r"line 2 must be a JSON object with a list of messages"),
        ('{"messages": []}', r"line 2: messages must be a list with at least one message"),
        ('{"messages": [{"role": "robot", "content": "x"}]}', r"line 2: messages\[0\]\.role must be one of"),
        ('{"messages": [{"role": "user", "content": "x"}]}', r"line 2 has no assistant message"),
        ('{"messages": [], "messages": [1]}', r"line 2 is no JSON: of the keys messages, messages one is there twice"),
        (
            '{"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y", "weight": 0}]}',
            r"line 2: messages\[1\]\.weight is 0, but all assistant messages count alike: leave weight out",
        ),
        ('{"messages": [{"role": "assistant", "content": "x"}]}', r"line 2 begins with a message of role assistant"),
        ('{"messages": [{"role": "tool", "content": "x", "tool_call_id": "c"}, ' + SAID + "]}", "of role tool: user"),
        (ASKED + '{"role": "assistant"}]}', r"line 2: messages\[1\] has neither content nor tool_calls"),
        (ASKED + '{"role": "assistant", "content": null, "tool_calls": []}]}', r"messages\[1\] has neither content"),
        (ASKED + SAID + ', {"role": "assistant", "contents": "typo"}]}', r"messages\[2\] has neither content"),
    ],
)
def test_bad_rows_are_named_by_their_line(tmp_path: Path, line: str, words: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(ROWS[0]) + "\n" + line + "\n")
    with pytest.raises(DataError, match=words):
        read_rows(path)


@pytest.mark.parametrize("packed", [b'{"messages": "\xe9"}', gzip.compress(b"{}", mtime=0), "{}".encode("utf-16")])
def test_what_is_no_text_is_named_by_its_line(tmp_path: Path, packed: bytes) -> None:
    (tmp_path / "rows").write_bytes(json.dumps(ROWS[0]).encode() + b"\n" + packed)
    with pytest.raises(DataError, match=r"rows line 2 is no text in UTF-8: unpack the file if"):
        read_rows(tmp_path / "rows")


def test_a_mark_of_the_byte_order_is_no_part_of_a_row(tmp_path: Path) -> None:
    (tmp_path / "rows").write_text(json.dumps(ROWS[0]) + "\r\n", encoding="utf-8-sig")
    assert len(read_rows(tmp_path / "rows")) == 1


def test_no_rows_and_no_file_are_said(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n\n")
    with pytest.raises(DataError, match="holds no rows"):
        read_rows(tmp_path / "empty")
    for path, why in ((tmp_path / "absent", "No such file"), (tmp_path, "Is a directory")):
        with pytest.raises(DataError, match=f"{path} cannot be read: {why}"):
            read_rows(path)


async def test_a_row_that_is_too_long_is_named_with_its_length(tmp_path: Path) -> None:
    both = {"messages": [*ROWS[0]["messages"], *ROWS[1]["messages"]]}
    rows = await asyncio.to_thread(read_rows, rows_file(tmp_path, [ROWS[0], both]))
    it = Renderer(tiny.build_tokenizer())
    length = len(await _ids(rows[1], it))
    with pytest.raises(DataError, match=rf"line 2 has {length} tokens, but max_context is {length - 1}"):
        await told(rows[1], it, length - 1, 512)
    assert await told(rows[1], it, length, 512)


async def _ids(row: Row, it: Renderer) -> list[int]:
    tree = await told(row, it, 4000, 512)
    return tree.ids(len(tree.nodes) - 1)


async def test_options_of_rollouts_and_rewards_are_refused(tmp_path: Path) -> None:
    refused = {"kl_beta": 0.1, "algorithm": "rloo", "group_size": 4, "temperature": 0.5}
    refused |= {"partial_calls": 2, "sandbox": "local", "retries": 3, "matcher": "a:b", "eval_tasks": 8}
    refused |= {"key_env": "KEY", "slots": 4, "prefill_chunk": 64}
    for option, value in refused.items():
        config = Config(**{**TINY.to_dict(), option: value})
        with pytest.raises(ConfigError, match=f"{option} has no effect with sft"):
            await sft.train(rows_file(tmp_path, ROWS), config)
    with pytest.raises(ConfigError, match="eval_every has no effect with no rows of --val: leave it at 10"):
        await sft.train(rows_file(tmp_path, ROWS), Config(**{**TINY.to_dict(), "eval_every": 2}))
    with pytest.raises(ConfigError, match="provider's model cannot be trained"):
        await sft.train(rows_file(tmp_path, ROWS), Config(provider="openai"))


def test_the_line_of_a_step() -> None:
    row = {"step": 2, "loss": 1.5, "trained_tokens": 40.0, "val_loss": 2.25}
    assert explain(row, 2) == "step 2/2 | loss 1.5000 | held-out loss 2.2500"


def test_the_command_resumes_with_the_runs_own_options_and_says_how_it_ended(tmp_path: Path) -> None:
    data, runs = rows_file(tmp_path, ROWS), str(tmp_path / "runs")
    common = ["sft", str(data), "--runs-dir", runs, "--run", "r"]
    absent = CliRunner().invoke(cli, [*common, "--resume"])
    assert absent.stderr == f"error: There is no run {runs}/r to resume: name one with --run, or leave out --resume.\n"
    both = CliRunner().invoke(cli, [*common, "--epochs", "2", "--set", "steps=5"])
    assert both.stderr == "error: Give --epochs or --steps, not both.\n"
    own = ["--model", "tiny", "--batch-size", "2", "--lora-rank", "4", "--lr", "0.01", "--threads", "1"]
    first = CliRunner().invoke(cli, [*common, *own, "--epochs", "1"])
    assert first.output.endswith(f"Done. Weights: {runs}/r/checkpoints. Look at it: minirllm show {runs}/r\n")
    more = CliRunner().invoke(cli, [*common, "--resume", "--steps", "3"])
    assert "Resuming after step 2 of 3." in more.output
    assert load(tmp_path / "runs" / "r" / "config.toml").lr == 0.01, "not the default, which was not asked for"
    again = CliRunner().invoke(cli, [*common, "--resume", "--quiet"])
    assert (again.exit_code, "Nothing" in again.output) == (0, False)
    assert "Nothing to do: all 3 steps were done before" in CliRunner().invoke(cli, [*common, "--resume"]).output


def test_an_interrupted_command_says_how_to_go_on(tmp_path: Path) -> None:
    data, runs = rows_file(tmp_path, ROWS), str(tmp_path / "runs")
    command = ["sft", str(data), "--val", str(data), "--runs-dir", runs, "--run", "r"]
    how = f"Continue with: minirllm sft {data} --val {data} --run r --runs-dir {runs} --resume\n"
    process = subprocess.Popen(
        [sys.executable, "-m", "minirllm.cli", *command, "--model", "tiny", "--steps", "100000", "--set", "threads=1"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": os.getcwd()},
    )  # fmt: skip
    metrics = tmp_path / "runs" / "r" / "metrics.jsonl"
    while not (metrics.exists() and len(metrics.read_text().splitlines()) > 2):
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, "Done" in out) == (0, False)
    assert re.search(rf"Stopped after step \d+ of 100000\. {re.escape(how)}", err), err
