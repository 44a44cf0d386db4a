"""Distillation as a whole: options, runs, resumption, replay, the command."""

from __future__ import annotations

import asyncio
import json
import math
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from minirllm import flow, train
from minirllm.cli import cli
from minirllm.config import Config
from minirllm.errors import ConfigError, ModelError, UserError
from minirllm.log import explain, read_json, read_metrics
from minirllm.policy import Policy
from minirllm.renderer import Renderer
from minirllm.tools.replay import replay
from tests.distilled import DISTILL, taught
from tests.scoring import Scorer, answering

SMOKE = flow.load_task("smoke")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"algorithm": "grpo"}, "teacher has no effect with algorithm = grpo, `minirllm distill` has it"),
        ({"teacher": ""}, "Who teaches"),
        ({"teacher": "self"}, "teacher = self thinks as the student does"),
        ({"teacher_model": "m"}, "teacher_model has no effect with teacher = base"),
        ({"teacher_tokenizer": "m"}, "teacher_tokenizer has no effect with teacher = base"),
        ({"key_env": "KEY"}, "key_env has no effect with teacher = base, which is no URL: leave it out"),
        ({"norm_std": False}, "norm_std has no effect with distill"),
        ({"baseline": "task"}, "baseline has no effect with distill"),
        ({"refill": 1}, "refill has no effect with distill"),
        ({"overlong_buffer": 4}, "overlong_buffer has no effect with distill"),
        ({"teacher_top_k": 4, "clip_low": 0.1}, "clip_low has no effect with distill by teacher_top_k"),
        ({"temperature": 0.5}, "distill compares distributions at temperature 1, got 0.5"),
        ({"roles": "judge=grpo"}, "roles has no effect with distill"),
    ],
)
async def test_options_that_contradict_each_other_are_refused(
    tmp_path: Path, options: dict[str, Any], words: str
) -> None:
    config = Config(**{**DISTILL, "runs_dir": str(tmp_path), **options})
    with pytest.raises(ConfigError, match=words):
        await train.train(SMOKE, config, quiet=True)


async def test_a_teacher_that_is_none_is_named(student: tuple[Policy, Renderer], tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"^smolm is no run .*, not in .* either, and no model\. .*no model 'smolm'"):
        await taught(student, [], teacher="smolm", runs_dir=str(tmp_path))
    (tmp_path / "empty" / "checkpoints").mkdir(parents=True)
    with pytest.raises(UserError, match=r"empty holds no whole checkpoint\.$"):
        await taught(student, [], teacher="empty", runs_dir=str(tmp_path))
    (tmp_path / "empty" / "checkpoints" / "step_000001").mkdir()
    with pytest.raises(
        UserError, match=r"holds no whole checkpoint\. Checkpoint .*step_000001 is not whole: .*[^.]\.$"
    ):
        await taught(student, [], teacher="empty", runs_dir=str(tmp_path))


# ---- whole runs ----


@pytest.fixture(scope="module")
def master(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that learned to answer in lower-case letters."""
    runs = tmp_path_factory.mktemp("runs")
    task = SMOKE
    train.run(task, Config(**{**task.defaults, "steps": 12, "runs_dir": str(runs), "run": "master"}), quiet=True)
    return runs / "master"


def learned(master: Path, name: str, steps: int = 6, resume: bool = False, **options: Any) -> list[dict[str, Any]]:
    task = SMOKE
    where = {"runs_dir": str(master.parent), "run": name, "save_every": 1, "eval_every": 0}
    more = {"algorithm": "distill", "teacher": "master", "steps": steps, **options}
    train.run(task, Config(**{**task.defaults, **where, **more}), resume=resume, quiet=True)
    return read_metrics(master.parent / name / "metrics.jsonl")


@pytest.mark.parametrize("how", [{}, {"teacher_top_k": 16}])
def test_the_student_comes_to_agree_with_its_teacher(master: Path, how: dict[str, Any]) -> None:
    """From a reward of nothing, which it never learns from."""
    rows = learned(master, f"student{len(how)}", **how)
    first, last = rows[1], rows[-1]
    assert last["teacher_kl"] < 0.25 * first["teacher_kl"]
    assert last["teacher_agreement"] > first["teacher_agreement"] + 0.1
    assert last["eval_reward"] > rows[0]["eval_reward"] + 0.3
    assert "KL to the teacher" in explain(last, 6)
    assert "agreement" in explain(last, 6)


def test_groups_of_one_teach_too_and_the_run_repeats_resumes_and_is_replayed(master: Path) -> None:
    whole = learned(master, "whole", steps=4, group_size=1)
    assert whole[-1]["groups_with_signal"] == 4
    learned(master, "cut", steps=2, group_size=1)
    again = learned(master, "cut", steps=4, group_size=1, resume=True)
    digests = [[row["weights_sha256"] for row in rows if row["step"]] for rows in (whole, again)]
    assert len(set(digests[0])) == 4
    assert digests[0] == digests[1]
    manifest = read_json(master.parent / "whole" / "manifest.json")
    assert (manifest["teacher"], manifest["teacher_model"], len(manifest["teacher_sha256"])) == ("master", "tiny", 64)
    assert replay(master.parent / "whole", step=2)


@pytest.mark.parametrize("how", [{}, {"teacher_top_k": 8}], ids=str)
def test_with_a_lag_it_repeats_resumes_and_is_replayed_too(master: Path, how: dict[str, Any]) -> None:
    options, name = {"lag": 1, "group_size": 1, **how}, f"ahead{len(how)}"
    whole = learned(master, name, steps=4, **options)
    again = learned(master, f"{name}-again", steps=4, concurrency=1, **options)
    learned(master, f"{name}-cut", steps=2, **options)
    cut = learned(master, f"{name}-cut", steps=4, resume=True, **options)
    digests = [[row["weights_sha256"] for row in rows if row["step"]] for rows in (whole, again, cut)]
    assert len(set(digests[0])) == 4
    assert digests[0] == digests[1] == digests[2]
    assert [row["lag_mean"] for row in whole if row["step"]] == [0, 1, 1, 1]
    assert replay(master.parent / name, step=3)


def test_a_teacher_that_fails_ends_the_run_with_what_was_learned_saved(master: Path, tmp_path: Path) -> None:
    scorer, calls = Scorer(5), [0]

    def failing(path: str, body: Any) -> tuple[int, Any]:
        calls[0] += body is not None
        return (400, {"error": "no more"}) if calls[0] > 40 else scorer(path, body)

    async def work() -> None:
        task = SMOKE
        async with answering(failing) as (url, _):
            options = {"algorithm": "distill", "teacher": url, "eval_tasks": 0, "runs_dir": str(tmp_path), "run": "r"}
            with pytest.raises(UserError, match=r"HTTP 400: .*no more.*from step 2: it is sampled"):
                await train.train(task, Config(**{**task.defaults, **options}), quiet=True)

    asyncio.run(work())
    assert [path.name for path in (tmp_path / "r" / "checkpoints").glob("step_*")] == ["step_000001"]


def test_the_command(master: Path) -> None:
    options = ["--runs-dir", str(master.parent), "--run", "command", "--steps", "1", "--set", "eval_tasks=0"]
    done = CliRunner().invoke(cli, ["distill", "smoke", "--teacher", str(master), "--top-k", "8", *options])
    assert done.exit_code == 0, done.output
    assert "KL to the teacher" in done.output
    config = read_json(master.parent / "command" / "manifest.json")["config"]
    assert (config["algorithm"], config["teacher_top_k"]) == ("distill", 8)
    other = CliRunner().invoke(cli, ["distill", "smoke", "--teacher", str(master), "--set", "algorithm=rloo", *options])
    assert (other.exit_code, "leave --set algorithm out" in other.output) == (2, True)
    refused = CliRunner().invoke(cli, ["distill", "smoke", *options])
    assert (refused.exit_code, "Who teaches?" in refused.output) == (2, True)
    assert json.dumps(config)
    assert math.isfinite(read_metrics(master.parent / "command" / "metrics.jsonl")[-1]["teacher_kl"])
