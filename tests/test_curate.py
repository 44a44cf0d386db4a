"""Rejection sampling: the filter's language, what is taken, and that the three commands work one after another."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from minirllm import cli, sft
from minirllm.errors import UserError
from minirllm.store import EpisodeStore
from minirllm.tools import curate
from minirllm.tools.curate import Wanted, figures, predicate, split
from minirllm.types import Episode, Message, Step, ToolCall, Trajectory

TOOL = {"type": "function", "function": {"name": "run"}}


def episode(task: str, index: int, reward: float | None, text: str = "yes", tokens: float = 5.0) -> Episode:
    call = ToolCall("c", "run", "{}")
    first = Step("1", messages=[Message("user", task)], response=Message("assistant", "", (call,)), tools=[TOOL])
    result = [Message("tool", "ok", tool_call_id="c")]
    last = Step("2", messages=result, response=Message("assistant", text), parent="1")
    title = {"auxiliary": "title"}
    aside = Step("3", messages=[Message("user", "title?")], response=Message("assistant", "T"), metadata=title)
    return Episode(
        id=f"{task}:{index}", task_id=task, rollout_idx=index, reward=reward, is_correct=(reward or 0) >= 1,
        trajectories=[Trajectory(steps=[first, last, aside])], metrics={"response_tokens": tokens},
    )  # fmt: skip


def place(folder: Path, *episodes: Episode) -> Path:
    for one in episodes:
        EpisodeStore(folder / "episodes").append(0, one)
    return folder


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("solved", True), ("not solved", False), ("n == 4", True), ("n_correct >= 2 and avg < 0.7", True),
        ("avg > 0.6 or worst == 0", True), ("0 < avg <= 0.5", False), ("best == 1 and worst == 0", True),
        ("pass@1 == 0.5", True), ("pass@2 > 0.83 and pass@2 < 0.84", True), ("pass@9 == 1", True),
        ("avg == 0.625", True), ("worst > -1", True), ("n != 4", False), ("True", True), (" solved\n", True),
    ],
)  # fmt: skip
def test_filters_by_hand(text: str, holds: bool) -> None:
    """Rewards 1, 1, 0.5 and 0, of which two are correct: of two drawn, none is with chance 1 / 6."""
    values = figures([episode("a", i, reward) for i, reward in enumerate([1.0, 1.0, 0.5, 0.0])])
    assert predicate(text)(values) is holds


@pytest.mark.parametrize(
    "text",
    ["", "solvd", "__import__('os')", "n + 1", "n if n else 0", "[n]", "n is 1", "pass@x", "pass@0", "avg.real",
     "(" * 3000, "pass_at(n)", "'a'", "lambda: 1"],
)  # fmt: skip
def test_whatever_else_is_refused_in_a_sentence(text: str) -> None:
    with pytest.raises(UserError, match="cannot be read") as refused:
        predicate(text)
    assert len(str(refused.value)) < 600


def taken(folder: Path, **wanted) -> list[tuple[str, int]]:
    return [(row["task_id"], row["rollout_idx"]) for row in curate.curate([folder], Wanted(**wanted))[0]]


def test_what_is_taken(tmp_path: Path) -> None:
    episodes = [episode("a", 0, 0.5, "x"), episode("a", 1, 1.0, "y", 9.0), episode("a", 2, 1.0, "y", 7.0)]
    episodes += [episode("b", 0, 0.0), episode("b", 1, 0.2), episode("c", 0, None)]
    folder = place(tmp_path / "e", *episodes)
    place(folder, Episode(id="d:0", task_id="d", reward=1.0, is_correct=True))  # said nothing
    assert taken(folder) == [("a", 1), ("a", 2)]
    assert taken(folder, filter="n > 0", select="all") == [("a", 0), ("a", 1), ("a", 2), ("b", 0), ("b", 1)]
    assert taken(folder, filter="n > 0", select="best") == [("a", 1), ("b", 1)]
    assert taken(folder, filter="n > 0", select="best-n", most=2) == [("a", 1), ("a", 2), ("b", 1), ("b", 0)]
    assert taken(folder, select="shortest") == [("a", 2)]
    assert taken(folder, most=1) == [("a", 1)]
    assert taken(folder, dedup=True) == [("a", 1)]
    assert taken(folder, filter="n > 0", select="all", min_reward=0.2) == [("a", 0), ("a", 1), ("a", 2), ("b", 1)]
    assert taken(folder, filter="not solved") == []
    nothing = CliRunner().invoke(cli.cli, ["dataset", "from-eval", str(folder), "--out", "rows", "--filter", "n > 99"])
    assert nothing.exit_code == 2
    assert "No episode of 4 tasks was taken: --filter and --select choose others." in nothing.stderr
    for select, most in (("best-n", None), ("best", 2), ("shortest", 2)):
        with pytest.raises(UserError, match="--max-per-task"):
            taken(folder, select=select, most=most)
    with pytest.raises(UserError, match="--min-reward must be a number, got nan"):
        taken(folder, min_reward=float("nan"))
    with pytest.raises(UserError, match="holds no episodes"):
        taken(tmp_path)


def test_a_row_is_the_conversation_with_its_tools_and_without_side_calls(tmp_path: Path) -> None:
    (row,), count = curate.curate([place(tmp_path, episode("a", 0, 1.0))], Wanted())
    assert count == 1
    call = {"id": "c", "type": "function", "function": {"name": "run", "arguments": "{}"}}
    assert row == {
        "messages": [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "ok", "tool_call_id": "c"},
            {"role": "assistant", "content": "yes"},
        ],
        "tools": [TOOL], "task_id": "a", "rollout_idx": 0, "reward": 1.0,
    }  # fmt: skip


def test_tasks_are_split_whole_and_always_alike() -> None:
    rows = [{"task_id": f"t{i // 2}", "n": i} for i in range(400)]
    kept, held = split(rows, 0.25, 0)
    assert {row["task_id"] for row in kept}.isdisjoint({row["task_id"] for row in held})
    assert 70 < len(held) < 130
    assert split(rows[::-1], 0.25, 0)[1] == held[::-1]
    assert split(rows, 0.25, 1)[1] != held
    assert (split(rows, 0.0, 0)[1], split(rows, 1.0, 0)[0]) == ([], [])


TASK = """
from minirllm import Task, evaluator, rollout
from minirllm.client import chat

@rollout
async def say(task, config):
    return (await chat(config, [{"role": "user", "content": task.instruction}])).output

@evaluator
def score(task, episode):
    return float(len(episode.answer) % 2 == 0)

def train(config):
    return [Task(name, f"say {name}") for name in "abcd"]

held_out = train
"""


@pytest.mark.slow
def test_three_commands_from_an_evaluation_to_new_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "task.py").write_text(TASK)

    def minirllm(*words: str) -> str:
        done = CliRunner().invoke(cli.cli, words, prog_name="minirllm", catch_exceptions=False)
        assert done.exit_code == 0, done.output
        return done.output

    minirllm("eval", "task.py", "--model", "tiny", "--n", "4", "--max-tokens", "8", "--output", "out")
    said = minirllm("dataset", "from-eval", "out", "--out", "rows.jsonl", "--val", "val.jsonl", "--val-fraction", "0.3")
    rows = sft.read_rows(tmp_path / "rows.jsonl")
    assert f"{len(rows)} rows of " in said
    assert all(json.loads(line)["reward"] == 1.0 for line in (tmp_path / "rows.jsonl").read_text().splitlines())
    told = minirllm("sft", "rows.jsonl", "--model", "tiny", "--epochs", "1", "--batch-size", "2", "--run", "tuned")
    assert "loss" in told
    assert (tmp_path / "runs" / "tuned" / "checkpoints").is_dir()


def test_a_source_given_twice_counts_once_and_two_outputs_need_two_files(tmp_path: Path) -> None:
    place(tmp_path, episode("a", 0, 1.0))
    source, out = str(tmp_path), tmp_path / "rows.jsonl"

    def from_eval(*words: str) -> Result:
        return CliRunner().invoke(cli.cli, ["dataset", "from-eval", *words, "--out", str(out)], prog_name="minirllm")

    assert from_eval(source, f"{source}/").exit_code == 0
    assert len(out.read_text().splitlines()) == 1
    said = from_eval(source, "--val", f"{source}/episodes/../rows.jsonl")
    assert (said.exit_code, said.stderr.count("\n")) == (2, 1)
    assert "the same file" in said.stderr
    assert len(out.read_text().splitlines()) == 1


def test_rows_fall_to_both_files_or_to_none(tmp_path: Path) -> None:
    """A file without rows is no data for `sft`, so the command that would be told fails."""
    place(tmp_path, episode("a", 0, 1.0), episode("b", 0, 1.0))
    out, val = tmp_path / "rows.jsonl", tmp_path / "val.jsonl"

    def from_eval(*words: str) -> Result:
        arguments = ["dataset", "from-eval", str(tmp_path), "--out", str(out), *words]
        return CliRunner().invoke(cli.cli, arguments, prog_name="minirllm")

    both = ["--val", str(val), "--val-fraction"]
    found = {seed: from_eval(*both, "0.5", "--seed", str(seed)) for seed in range(12)}
    assert {result.exit_code for result in found.values()} == {0, 2}
    for result in found.values():
        if result.exit_code:
            assert "All 2 tasks that were taken fell to --" in result.stderr
            assert "set another --val-fraction than 0.5, or another --seed, or take more tasks." in result.stderr
        else:
            assert "1 rows of 1 of 2 tasks" in result.stdout
    assert (len(sft.read_rows(out)), len(sft.read_rows(val))) == (1, 1)
    for fraction in ("0", "1", "nan", "-1"):
        assert f"--val-fraction must be between 0 and 1, got {fraction}." in from_eval(*both, fraction).stderr
    for words in (("--val-fraction", "0.5"), ("--seed", "1")):
        assert "name a file by --val" in from_eval(*words).stderr
