"""The whole product at once: it learns, it repeats bit for bit, it survives a kill.

The proofs run at the level that the probe finds (`level` in the manifest). SmolLM2 runs the short form of what the tiny
model runs at length.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import openai
import pytest

from minirllm import AgentTrainer, Config, Episode, EvalOutput, Signal, Task, evaluator, flow, rollout, train
from minirllm.client import chat
from minirllm.config import read_toml
from minirllm.errors import ConfigError, TaskError, UserError
from minirllm.log import read_metrics
from minirllm.store import EpisodeStore

pytestmark = pytest.mark.timeout(900)  # several whole runs each, on a machine that may be busy
TASK = str(Path(__file__).with_name("delayed.py"))


def command(runs: Path, run: str, *options: str) -> list[str]:
    return [sys.executable, "-m", "minirllm.train", TASK, "--runs-dir", str(runs), "--run", run, "--quiet", *options]


def run(runs: Path, name: str, *options: str, **environment: str) -> list[dict[str, Any]]:
    """Train in a process of its own; its metrics rows."""
    done = subprocess.run(
        command(runs, name, *options), env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return read_metrics(runs / name / "metrics.jsonl")


def content(runs: Path, name: str, step: int) -> list[Any]:
    """What an episode consists of, without clock times."""
    episodes = EpisodeStore(runs / name / "episodes").finished(step)
    return [
        (key, e.reward, e.session_id, [(n.tokens, n.logprobs, n.parent, n.call_id) for n in sorted_nodes(e)])
        for key, e in sorted(episodes.items())
    ]


def sorted_nodes(episode: Episode) -> list[Any]:
    """Nodes in an order that does not depend on which of two parallel calls ended first, parents by content."""
    nodes = episode.tree.nodes
    path = [tuple(episode.tree.ids(i)) for i in range(len(nodes))]
    named = [type("N", (), {"tokens": n.tokens, "logprobs": n.logprobs, "call_id": n.call_id,
                            "parent": path[n.parent] if n.parent >= 0 else ()}) for n in nodes]  # fmt: skip
    return [n for _, n in sorted(zip(path, named, strict=True), key=lambda pair: (pair[0], pair[1].call_id))]


def hashes(rows: list[dict[str, Any]]) -> list[str]:
    return [row["weights_sha256"] for row in rows if row["step"]]


@pytest.mark.parametrize("determinism", ["auto", "fixed"])
def test_random_delays_change_nothing(tmp_path: Path, determinism: str) -> None:
    quick = run(tmp_path, "quick", "--steps", "3", "--determinism", determinism)
    slow = run(tmp_path, "slow", "--steps", "3", "--determinism", determinism, "--concurrency", "5", DELAY="0.15")
    assert len(set(hashes(quick))) == 3  # it did learn something each time
    assert hashes(quick) == hashes(slow)
    for step in (1, 2, 3):
        assert content(tmp_path, "quick", step) == content(tmp_path, "slow", step)
    level = json.loads((tmp_path / "quick/manifest.json").read_text())["level"]
    assert level in (("exact", "fixed") if determinism == "auto" else ("fixed",))
    if level == "exact":
        assert [row["mismatch_max"] for row in quick] == [0.0] * 3
        assert [row["ratio_max"] for row in quick] == [0.0] * 3
    assert max(row["mismatch_max"] for row in quick) <= 1e-4
    other = run(tmp_path, "other", "--steps", "1", "--determinism", determinism, "--seed", "1")
    assert hashes(other)[0] != hashes(quick)[0]


@pytest.mark.parametrize("determinism", ["auto", "fixed"])
def test_kill_and_resume_end_at_the_same_weights(tmp_path: Path, determinism: str) -> None:
    whole = run(tmp_path, "whole", "--determinism", determinism)
    options = command(tmp_path, "cut", "--determinism", determinism)
    with subprocess.Popen(options, env={**os.environ, "DELAY": "0.3"}) as process:
        episodes = tmp_path / "cut/episodes"
        deadline = time.monotonic() + 100
        while not any("step_00003" in path.name for path in episodes.glob("*")) and time.monotonic() < deadline:
            assert process.poll() is None, "ended before step 3"
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
    assert len(read_metrics(tmp_path / "cut/metrics.jsonl")) == 2
    finished = EpisodeStore(episodes).finished(3)
    rows = run(tmp_path, "cut", "--resume", "--determinism", determinism)
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert hashes(rows) == hashes(whole)
    for step in (3, 4):
        assert content(tmp_path, "cut", step) == content(tmp_path, "whole", step)
    kept = EpisodeStore(episodes).finished(3)
    assert all(kept[key].metrics == episode.metrics for key, episode in finished.items())  # not run again


@pytest.mark.parametrize("determinism", ["fixed", "off"])
def test_manifest_and_console_say_the_level(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], determinism: str
) -> None:
    task = flow.load_task(TASK)
    options = {"steps": 1, "batch_size": 1, "group_size": 2, "runs_dir": str(tmp_path), "run": "r"}
    train.run(task, Config(**{**task.defaults, **options, "determinism": determinism}))
    assert json.loads((tmp_path / "r/manifest.json").read_text())["level"] == determinism
    assert f"| determinism {determinism}" in capsys.readouterr().out


def test_resumed_with_another_learning_rate_it_samples_anew_what_other_weights_had_sampled(tmp_path: Path) -> None:
    task = flow.load_task(TASK)
    options = {**task.defaults, "runs_dir": str(tmp_path), "run": "r"}
    train.run(task, Config(**options), quiet=True)
    before = [content(tmp_path, "r", step) for step in (1, 2)]
    shutil.rmtree(tmp_path / "r/checkpoints")
    changed = Config(**{**options, "lr": 5e-3})
    asyncio.run(train.train(task, changed, resume=True, quiet=True, stop=lambda: True))  # interrupted once more
    train.run(task, changed, resume=True, quiet=True)
    rows = read_metrics(tmp_path / "r/metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert max(row["mismatch_max"] for row in rows) <= 1e-4  # every step learned from samples of its own weights
    assert content(tmp_path, "r", 1) == before[0]
    assert content(tmp_path, "r", 2) != before[1]


def test_resumed_with_fewer_rollouts_a_step_holds_no_others(tmp_path: Path) -> None:
    task = flow.load_task(TASK)
    options = {**task.defaults, "runs_dir": str(tmp_path), "run": "r", "steps": 1}
    train.run(task, Config(**options), quiet=True)
    shutil.rmtree(tmp_path / "r/checkpoints")
    train.run(task, Config(**{**options, "group_size": 3}), resume=True, quiet=True)
    (row,) = read_metrics(tmp_path / "r/metrics.jsonl")
    assert len(EpisodeStore(tmp_path / "r/episodes").finished(1)) == row["episodes"] == 9


def test_a_task_file_changed_before_resuming_is_said(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    for text, steps in (("", 1), ("\n# another reward\n", 2)):
        file.write_text(Path(TASK).read_text() + text)
        task = flow.load_task(file)
        options = {**task.defaults, "runs_dir": str(tmp_path), "run": "r", "steps": steps}
        train.run(task, Config(**options), resume=steps == 2, quiet=True)
    (resumed,) = json.loads((tmp_path / "r/manifest.json").read_text())["resumed"]
    assert set(resumed["changed"]) == {"config.steps", "task_sha256"}


def test_a_finished_run_and_a_used_folder_say_so(tmp_path: Path) -> None:
    rows = run(tmp_path, "once", "--steps", "1")
    done = subprocess.run(command(tmp_path, "once", "--steps", "1"), capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "--resume" in done.stderr
    assert "Traceback" not in done.stderr
    longer = run(tmp_path, "once", "--steps", "2", "--resume")
    assert hashes(longer)[0] == hashes(rows)[0]
    assert len(longer) == 2


def test_the_smoke_task_is_learned(tmp_path: Path) -> None:
    task = flow.load_task(Path(__file__).parent.parent / "tasks/smoke.py")
    last = train.run(task, Config(**{**task.defaults, "runs_dir": str(tmp_path), "run": "smoke"}), quiet=True)
    rows = read_metrics(tmp_path / "smoke/metrics.jsonl")
    assert rows[0]["step"] == 0
    assert last["eval_reward"] > rows[0]["eval_reward"] + 0.2
    assert last["reward_mean"] > 0.6


@rollout
def sync_agent(task: Task, config: Any) -> str:
    """A plain function with the official client, as written for a provider."""
    client = openai.OpenAI(base_url=config.base_url, api_key=config.api_key)
    with client:
        reply = client.chat.completions.create(
            model=config.model, messages=[{"role": "user", "content": str(task.instruction)}]
        )
    return reply.choices[0].message.content or ""


@evaluator
def length(task: Task, episode: Episode) -> EvalOutput:
    return EvalOutput(len(episode.answer) % 3 / 2, signals=[Signal("length", len(episode.answer))])


def test_agent_trainer_with_the_official_client(tmp_path: Path) -> None:
    tasks = [Task(str(i), f"Say {i}") for i in range(4)]
    options = {
        "model": "tiny",
        "steps": 2,
        "batch_size": 2,
        "group_size": 3,
        "max_tokens": 6,
        "runs_dir": str(tmp_path),
    }
    trainer = AgentTrainer(
        agent_flow=sync_agent,
        evaluator=length,
        config=options,
        train_dataset=tasks[:3],
        val_dataset=lambda _: tasks[3:],
    )
    last = trainer.train(quiet=True)
    assert last["step"] == 2
    assert last["episodes"] == 6
    assert "eval_reward" in last
    with pytest.raises(ConfigError, match="did you mean steps"):
        AgentTrainer(sync_agent, length, {"stepz": 1}, tasks)
    for wrong in (3, "steps", ["steps"]):
        with pytest.raises(ConfigError, match="Options are a mapping"):
            AgentTrainer(sync_agent, length, wrong, tasks)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="Unknown option '1'"):
        AgentTrainer(sync_agent, length, {1: 2}, tasks)  # type: ignore[dict-item]
    with pytest.raises(TaskError, match="There is no evaluator: give a function"):
        AgentTrainer(sync_agent, None, options, tasks)
    with pytest.raises(TaskError, match="There is no agent: give a function"):
        AgentTrainer(None, length, options, tasks)
    with pytest.raises(TaskError, match="no tasks"):
        AgentTrainer(sync_agent, length, {**options, "run": "empty"}, []).train(quiet=True)


def test_the_best_step_has_a_checkpoint_and_a_resumed_run_keeps_its_date(tmp_path: Path) -> None:
    held_out_rewards = iter([0.0, 1.0, 0.5, 0.5])  # of steps 0 to 3

    async def grade(task: Task, episode: Episode) -> float:
        return next(held_out_rewards) if episode.metadata["validation"] else len(episode.answer) % 3 / 2

    options = {
        "model": "tiny", "batch_size": 1, "group_size": 2, "max_tokens": 4, "eval_every": 1, "save_every": 10,
        "runs_dir": str(tmp_path), "run": "r",
    }  # fmt: skip
    tasks = [Task("a", "Say a"), Task("b", "Say b")]
    for more in ({"steps": 2, "date": "2020-01-02"}, {"steps": 3}):
        trainer = AgentTrainer(sync_agent, grade, {**options, **more}, tasks[:1], tasks[1:])
        trainer.train(quiet=True, resume=more["steps"] == 3)
    assert sorted(path.name for path in (tmp_path / "r/checkpoints").iterdir()) == [f"step_00000{n}" for n in (1, 2, 3)]
    assert read_toml(tmp_path / "r/config.toml")["date"] == "2020-01-02"


def test_a_token_of_unknown_origin_ends_the_run_and_nothing_earned_is_lost(tmp_path: Path) -> None:
    forge = True

    async def grade(task: Task, episode: Episode) -> float:
        if forge and (episode.metadata["step"], episode.rollout_idx) == (3, 1):
            episode.trajectories[0].steps[0].response_length += 1  # a grader that meddles with the record
        return episode.rollout_idx % 2

    def go(run: str, **more: Any) -> dict[str, Any]:
        options = {"model": "tiny", "steps": 4, "batch_size": 1, "group_size": 2, "max_tokens": 4, "eval_tasks": 0}
        tasks = [Task("a", "Say a")]
        return AgentTrainer(sync_agent, grade, {**options, "runs_dir": str(tmp_path), "run": run}, tasks).train(
            quiet=True, **more
        )

    with pytest.raises(UserError) as caught:
        go("r")
    call = EpisodeStore(tmp_path / "r/episodes").finished(3)["a", 1].trajectories[0].steps[0]
    at = call.prompt_length + call.response_length - 1
    where = f"Episode a:1, call {call.id}, token at position {at}"
    assert str(caught.value) == (
        f"{where}: its call is on record with {call.response_length} sampled tokens, not {call.response_length - 1}. "
        f"Nothing was learned from step 3: `minirllm show {tmp_path}/r --step 3 --episode 'a:1' --tokens` shows it; to "
        f"sample the step again, delete its file in {tmp_path}/r/episodes and --resume."
    )
    assert [path.name for path in (tmp_path / "r/checkpoints").iterdir()] == ["step_000002"]  # save_every is 10
    with pytest.raises(UserError, match=re.escape(where)):
        go("r", resume=True)
    forge = False
    (tmp_path / "r/episodes/step_00003.jsonl").unlink()
    assert go("r", resume=True)["weights_sha256"] == go("clean")["weights_sha256"]


@rollout
async def broken(task: Task, config: Any) -> Any:
    """Fails in a way that the task names."""
    if task.id == "raises":
        raise RuntimeError("the agent broke")
    if task.id == "silent":
        return "no call was made"
    await chat(config, [{"role": "user", "content": "Hi"}])
    if task.id == "hangs":
        await asyncio.sleep(1000)
    return 17 if task.id == "wrong" else "fine"


@evaluator
async def maybe(task: Task, episode: Episode) -> Any:
    return {"nan": float("nan"), "text": "good"}.get(task.id, len(episode.answer) % 2)


def test_whatever_an_agent_or_grader_does_is_named_and_the_run_goes_on(tmp_path: Path) -> None:
    tasks = [Task(name, name) for name in ("raises", "silent", "hangs", "wrong", "nan", "text", "good")]
    options = {
        "model": "tiny", "steps": 1, "batch_size": 7, "group_size": 2, "max_tokens": 4,
        "episode_timeout": 5.0, "retries": 0, "runs_dir": str(tmp_path), "run": "r",
    }  # fmt: skip
    row = AgentTrainer(broken, maybe, options, tasks).train(quiet=True)
    episodes = EpisodeStore(tmp_path / "r/episodes").finished(1)
    ended = {key[0]: episode for key, episode in episodes.items()}
    assert {name: e.termination_reason.value for name, e in ended.items()} == {
        "raises": "error", "silent": "no_calls", "hangs": "timeout", "wrong": "error", "nan": "grading_error",
        "text": "grading_error", "good": "env_done",
    }  # fmt: skip
    assert all((e.reward is None) == (name != "good") for name, e in ended.items())
    assert "the agent broke" in ended["raises"].reason
    assert "int" in ended["wrong"].reason
    assert "nan" in ended["nan"].reason
    assert row["ungraded"] == 12
    assert row["ungraded_reason"] in [e.reason for e in episodes.values()]


@pytest.mark.slow
def test_smollm2_trainer_and_sampler_agree_bit_for_bit(tmp_path: Path) -> None:
    options = ["--steps", "3", "--lr", "0.0003", "--set", "threads=2", "--lora-rank", "16"]
    rows = run(tmp_path, "a", *options, MODEL="smollm2-135m")
    again = run(tmp_path, "b", *options, MODEL="smollm2-135m", DELAY="0.2")
    assert hashes(rows) == hashes(again)
    assert all(row["trained_tokens"] for row in rows)
    level = json.loads((tmp_path / "a/manifest.json").read_text())["level"]
    for row in rows:
        assert row["mismatch_max"] <= 1e-4
        if level == "exact":
            assert row["mismatch_max"] == row["mismatch_kl"] == row["ratio_max"] == 0.0


@pytest.mark.slow
def test_smollm2_with_fixed_shapes_logs_how_far_trainer_and_sampler_differ(tmp_path: Path) -> None:
    options = ["--steps", "1", "--batch-size", "2", "--group-size", "2", "--determinism", "fixed"]
    (row,) = run(tmp_path, "a", *options, MODEL="smollm2-135m")
    assert json.loads((tmp_path / "a/manifest.json").read_text())["level"] == "fixed"
    assert row["trained_tokens"] > 0
    assert row["mismatch_max"] <= 1e-4
