"""diff.py: fabricated runs that differ in one thing each, two real ones, and the exit codes."""

from __future__ import annotations

import io
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from rich.console import Console

from minirllm import flow, train
from minirllm.cli import cli
from minirllm.config import Config
from minirllm.log import RunLog
from minirllm.store import EpisodeStore
from minirllm.tools.diff import diff
from minirllm.tools.runs import Call, calls, part
from minirllm.tree import TokenTree
from minirllm.types import Completion, Episode, Step, TerminationReason, Trajectory

ANSWERS = {"c0": ([1, 2], [5, 6, 7]), "c1": ([1, 2, 5, 6, 7, 3], [8, 9])}
LOGPROB = float(np.float32(-1.1))


def episode(task: str, index: int, order: tuple[str, ...] = ("c0", "c1")) -> Episode:
    """Two calls, the second of which continues the first."""
    tree, steps = TokenTree(), []
    for name in order:
        prompt, answer = ANSWERS[name]
        call = f"{task}{index}{name}"
        node = tree.add(prompt, Completion(answer, [LOGPROB] * len(answer), "stop", 0), call)
        steps.append(Step(id=call, node=node, finish_reason="stop"))
    return Episode(
        id=f"{task}:{index}", task_id=task, rollout_idx=index, tree=tree, reward=0.5, signals={"length": 2.0},
        trajectories=[Trajectory(steps=steps)], termination_reason=TerminationReason.ENV_DONE,
    )  # fmt: skip


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """``runs/a`` and its copy ``runs/b``: an evaluation, two steps of two episodes, a third in flight."""
    monkeypatch.chdir(tmp_path)
    folder = Path("runs/a")
    with RunLog(folder, Config(model="tiny", steps=3), console=Console(file=io.StringIO())) as log:
        log.manifest(task="letters", level="exact", threads=1, data_revision="d1", template_hash="t1")
        log.step({"step": 0, "eval_reward": 0.25, "seconds_eval": 1.0})
        for step in (1, 2):
            row = {"step": step, "reward_mean": 0.5, "loss": math.nan, "ungraded_reason": "a text"}
            log.step({**row, "weights_sha256": f"hash{step}", "seconds_step": 1.5})
    store = EpisodeStore(folder / "episodes")
    for step in (1, 2, 3):
        for index in range(2) if step < 3 else (1,):
            store.append(step, episode("t", index))
    shutil.copytree(folder, "runs/b")
    return folder, Path("runs/b")


def compared(one: Path, other: Path) -> tuple[bool, str]:
    console = Console(file=io.StringIO(), highlight=False)
    return diff(one, other, console), console.file.getvalue()  # type: ignore[attr-defined]


def edit(path: Path, line: int, change: Callable[[Any], Any]) -> None:
    """Change one JSON line of a file."""
    lines = path.read_text().splitlines()
    value = json.loads(lines[line])
    change(value)
    lines[line] = json.dumps(value)
    path.write_text("\n".join(lines) + "\n")


def test_equal_runs_are_equal_whatever_the_clock_and_the_machine_say(runs: tuple[Path, Path]) -> None:
    assert compared(*runs) == (True, compared(*runs)[1])
    assert "Equal: 3 steps, 5 episodes, 10 calls, 25 tokens." in compared(*runs)[1]
    manifest = json.loads((runs[1] / "manifest.json").read_text())
    manifest |= {"cpu": "another", "commit": "abc", "time": "later", "threads": 2, "data_revision": "d2"}
    manifest |= {"template_hash": "t2", "resumed": [{"after": 1, "changed": {"config.steps": [2, 3]}}]}
    manifest["packages"]["torch"] = "0.1"
    manifest["environment"]["OMP_NUM_THREADS"] = "64"
    manifest["config"] |= {"run": "b", "lr": 0.5}
    (runs[1] / "manifest.json").write_text(json.dumps(manifest))
    edit(runs[1] / "metrics.jsonl", 1, lambda row: row.update(seconds_step=9.0, ungraded_reason="other", tokens_kept=9))
    edit(runs[1] / "episodes/step_00001.jsonl", 0, lambda e: e["metrics"].update(seconds=8.0) if "metrics" in e else e)
    same, text = compared(*runs)
    assert same
    for line in (
        "cpu: A ", "B another", "commit: A ", "threads: A 1, B 2", "data_revision: A d1, B d2", "packages.torch: A ",
        "template_hash: A t1, B t2", "environment.OMP_NUM_THREADS: A ", "config.lr: A 0.0003, B 0.5",
        "resumed after step 1 with other config.steps",
    ):  # fmt: skip
        assert line in text
    assert "later" not in text


def test_parallel_calls_may_have_arrived_in_another_order(runs: tuple[Path, Path]) -> None:
    for folder, order in zip(runs, (("c0", "c1"), ("c1", "c0")), strict=True):
        EpisodeStore(folder / "episodes").append(3, episode("u", 0, order))
    assert compared(*runs)[0]


def other_id(episode: dict[str, Any]) -> None:
    episode["tree"]["nodes"][1]["call_id"] = episode["trajectories"][0]["steps"][0]["id"] = "x"


TOKEN = "episode t:1, call t1c0, token 2 of 3"
EDITS: dict[str, tuple[str, int, Callable[[Any], Any], str]] = {
    "token": (
        "episodes/step_00002.jsonl", 1, lambda e: e["tree"]["nodes"][1]["tokens"].__setitem__(1, 99),
        f"step 2, {TOKEN}:\n  A: id 6, logprob {LOGPROB!r}\n  B: id 99, logprob {LOGPROB!r}\n"
        "Equal before that: 1 steps, 3 episodes, 6 calls, 15 tokens.",
    ),
    "logprob": (
        "episodes/step_00001.jsonl", 1,
        lambda e: e["tree"]["nodes"][1]["logprobs"].__setitem__(1, math.nextafter(LOGPROB, 0)),
        f"step 1, {TOKEN}:\n  A: id 6, logprob {LOGPROB!r}\n  B: id 6, logprob {math.nextafter(LOGPROB, 0)!r}",
    ),
    "prompt": (
        "episodes/step_00001.jsonl", 0, lambda e: e["tree"]["nodes"][0]["tokens"].__setitem__(1, 4),
        "step 1, episode t:0, call t0c0, prompt token 2 of 2:\n  A: id 2\n  B: id 4",
    ),
    "reward": (
        "episodes/step_00001.jsonl", 0, lambda e: e.__setitem__("reward", None),
        "step 1, episode t:0, reward:\n  A: 0.5\n  B: none",
    ),
    "reason": (
        "episodes/step_00001.jsonl", 0, lambda e: e.__setitem__("termination_reason", "timeout"),
        "step 1, episode t:0, termination reason:\n  A: env_done\n  B: timeout",
    ),
    "call": (
        "episodes/step_00001.jsonl", 0, other_id,
        "step 1, episode t:0, the id of a call with equal tokens:\n  A: t0c0\n  B: x",
    ),
    "metric": ("metrics.jsonl", 2, lambda row: row.update(reward_mean=0.75), "step 2, metric reward_mean:\n  A: 0.5"),
    "hash": (
        "metrics.jsonl", 1, lambda row: row.update(weights_sha256="other"),
        "step 1, metric weights_sha256:\n  A: hash1\n  B: other",
    ),
    "evaluation": ("metrics.jsonl", 0, lambda row: row.update(eval_reward=0.0), "step 0, metric eval_reward:"),
}  # fmt: skip


@pytest.mark.parametrize("name", EDITS)
def test_the_first_difference_is_named_with_both_values(runs: tuple[Path, Path], name: str) -> None:
    file, line, change, expected = EDITS[name]
    edit(runs[1] / file, line, change)
    same, text = compared(*runs)
    assert not same
    assert f"They part at {expected}" in text
    assert compared(runs[1], runs[0])[0] is False


def test_what_only_one_run_has_is_named(runs: tuple[Path, Path]) -> None:
    one, other = runs
    third = other / "episodes/step_00003.jsonl"
    third.unlink()
    assert "They part at step 3:\n  A: there\n  B: no such step\n" in compared(one, other)[1]
    shutil.copy(one / "episodes/step_00003.jsonl", third)
    rows = (other / "metrics.jsonl").read_text().splitlines(keepends=True)
    (other / "metrics.jsonl").write_text("".join(rows[:2]))
    assert "They part at step 2, its end:\n  A: done\n  B: no row of metrics\n" in compared(one, other)[1]
    lines = (other / "episodes/step_00001.jsonl").read_text().splitlines(keepends=True)
    (other / "episodes/step_00001.jsonl").write_text(lines[0])
    assert "They part at step 1, episode t:1:\n  A: there\n  B: no such episode\n" in compared(one, other)[1]
    (other / "manifest.json").unlink()
    assert "3 steps, no manifest" in compared(one, other)[1]


def test_samples_of_other_lengths_part_where_the_shorter_ends() -> None:
    whole, cut = Call("c", [1], [2, 3], [-1.0, -2.0]), Call("c", [1], [2], [-1.0])
    assert part(whole, cut) == ("token 2 of 2", "id 3, logprob -2.0", "no token")
    assert part(cut, whole) == ("token 2 of 1", "no token", "id 3, logprob -2.0")
    assert part(whole, whole) is None
    assert part(whole, Call("c", [1, 1], [2, 3], [-1.0, -2.0])) == ("prompt token 2 of 1", "no token", "id 1")
    assert part(whole, Call("c", [1], [2, 3], [-1.0, -2.0], 0.5)) == ("temperature", "1.0", "0.5")
    assert part(whole, Call("c", [1], [2, 3], [-1.0, -2.0], 1.0, 4)) == ("weight version", "0", "4")


def test_calls_of_a_split_sample_and_calls_without_a_step() -> None:
    made = episode("t", 0)
    made.tree.add([1, 2, 5, 4], Completion([11], [-0.5], "abort", -1, 0.7), "cut off", after=1)
    first, second, cut = calls(made)
    assert [(c.prompt_ids, c.token_ids) for c in (first, second)] == list(ANSWERS.values())
    assert (cut.id, cut.prompt_ids, cut.token_ids, cut.temperature, cut.step) == (
        "cut off",
        [1, 2, 5, 4],
        [11],
        0.7,
        None,
    )
    assert cut.params is not None
    assert (cut.params.max_tokens, cut.params.temperature) == (1, 0.7)
    assert first.params is None, "what was not recorded is not guessed"


def test_the_command_exits_like_diff(runs: tuple[Path, Path]) -> None:
    assert CliRunner().invoke(cli, ["diff", "a", "runs/b"]).exit_code == 0
    edit(runs[1] / "metrics.jsonl", 1, lambda row: row.update(weights_sha256="other"))
    found = CliRunner().invoke(cli, ["diff", "a", "b"])
    assert found.exit_code == 1
    assert "weights_sha256" in found.output
    unknown = CliRunner().invoke(cli, ["diff", "a", "bb"])
    assert unknown.exit_code == 2
    assert "did you mean b" in unknown.output


def test_real_runs_part_where_their_options_first_matter(tmp_path: Path) -> None:
    task = flow.load_task(str(Path(__file__).with_name("delayed.py")))
    common = {**task.defaults, "steps": 2, "batch_size": 2, "group_size": 2, "max_tokens": 4, "runs_dir": str(tmp_path)}
    for name, options in {"a": {}, "again": {}, "rate": {"lr": 2e-3}, "seed": {"seed": 1}}.items():
        train.run(task, Config(**{**common, **options, "run": name}), quiet=True)
    same, text = compared(tmp_path / "a", tmp_path / "again")
    assert same, text
    assert "manifests differ" not in text
    same, text = compared(tmp_path / "a", tmp_path / "rate")
    assert not same
    assert "They part at step 1, metric lr:\n  A: 0.001\n  B: 0.002" in text
    assert "Equal before that: 0 steps, 4 episodes, 16 calls" in text
    assert "config.lr: A 0.001, B 0.002" in text
    same, text = compared(tmp_path / "a", tmp_path / "seed")
    assert not same
    assert "seed: A 0, B 1" in text
    assert "They part at step 1, episode t:" in text
