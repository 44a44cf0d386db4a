"""log.py and trackers: what a run folder holds, what the console says, and who may write."""

import asyncio
import fcntl
import io
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from minirllm import log, machine, trackers
from minirllm.config import Config, load
from minirllm.errors import ConfigError, UserError
from minirllm.log import RunLog

ROW = {
    "step": 3,
    "reward_mean": 0.640625,
    "reward_std": 0.25,
    "episodes": 64.0,
    "calls": 70.0,
    "ungraded": 2.0,
    "ungraded/timeout": 2.0,
    "truncated": 3.0,
    "malformed_tool_calls": 0.0,
    "groups": 8.0,
    "groups_with_signal": 5.0,
    "groups_too_easy": 2.0,
    "groups_too_hard": 1.0,
    "groups_uniform": 0.0,
    "mismatch_max": 0.0,
    "entropy": 1.234,
    "grad_norm": 0.5,
    "tokens_generated": 1200,
    "seconds_generate": 4.0,
    "seconds_train": 2.25,
    "seconds_step": 6.5,
    "weights_sha256": "abc",
}


def console() -> Console:
    """A console as it is when the output is piped."""
    return Console(file=io.StringIO(), highlight=False, width=80)


def said(log: RunLog) -> str:
    return log.console.file.getvalue()  # type: ignore[attr-defined]


def nothing_learned(**changes: float) -> dict[str, float]:
    return {"episodes": 64, "calls": 64, "groups": 8, "groups_with_signal": 0, **changes}


def test_a_step_is_one_row_on_disk_and_one_plain_line(tmp_path):
    with RunLog(tmp_path / "r", Config(), console=console()) as run:
        run.manifest(level="exact")
        run.step(ROW)
        assert json.loads((tmp_path / "r" / "metrics.jsonl").read_text()) == ROW  # before close
        run.step({"step": 4, "loss": math.nan, "high": math.inf, "low": -math.inf, "accuracy": None, "done": True})
    text = (tmp_path / "r" / "metrics.jsonl").read_text()
    assert json.loads(text.splitlines()[1]) == {
        "step": 4,
        "loss": "nan",
        "high": "inf",
        "low": "-inf",
        "accuracy": None,
        "done": True,
    }
    rows = log.read_metrics(tmp_path / "r" / "metrics.jsonl")
    assert math.isnan(rows[1]["loss"])
    assert (rows[1]["high"], rows[1]["low"], rows[0]["weights_sha256"]) == (math.inf, -math.inf, "abc")
    lines = said(run).splitlines()
    assert lines == [
        "step 3/20 | reward 0.641 ± 0.25 | "
        "signal in 5 of 8 groups, 2 too easy, 1 too hard, 3 truncated, 2 ungraded | "
        "mismatch 0 | entropy 1.23 | gradient 0.5 | 300 tok/s | generate 4.0 s | train 2.2 s | "
        "determinism exact | 2 min left",
        "step 4/20 | determinism exact",
    ]
    assert load(tmp_path / "r" / "config.toml") == Config()


def test_explain_leaves_out_what_was_not_measured_and_survives_what_is_not_finite():
    assert (
        log.explain({"step": 0, "eval_reward": 0.5, "eval_low": 0.4, "eval_high": 0.6}, 20)
        == "step 0/20 | held-out 0.500 [0.40, 0.60]"
    )
    assert log.explain({"step": 20, "reward_mean": math.nan, "mismatch_max": 3.14e-5, "seconds_step": 3.0}, 20) == (
        "step 20/20 | reward nan ± ? | mismatch 3.1e-05"
    )
    assert log.explain({"step": 1, "seconds_step": 60.0}, 11).endswith("10 min left")
    assert log.explain({"step": 1, "seconds_step": 600.0}, 11).endswith("1.7 h left")


@pytest.mark.parametrize(
    ("changes", "config", "sentence"),
    [
        ({"groups_with_signal": 1}, Config(), ""),
        ({"groups_too_hard": 8}, Config(), "0 of 64 answers were graded above 0, so nothing was learned. Easier tasks"),
        (
            {"groups_too_hard": 8, "ungraded": 4, "truncated": 40},
            Config(),
            "0 of 60 answers were graded above 0, so nothing was learned. 40 were cut off at 256 tokens: raise --max-t",
        ),
        (
            {"groups_too_hard": 8, "malformed_tool_calls": 33},
            Config(),
            "0 of 64 answers were graded above 0, so nothing was learned. 33 had tool calls that could not be parsed",
        ),
        ({"groups_too_easy": 8}, Config(), "All 64 answers got the full reward"),
        (
            {"groups_too_easy": 5, "groups_uniform": 3},
            Config(),
            "In each of the 8 groups all answers got the same reward (5 too easy, 3 all alike)",
        ),
        (
            {"groups": 0, "ungraded": 64, "ungraded/error": 60, "ungraded/timeout": 4},
            Config(),
            "None of the 64 answers could be graded (error 60, timeout 4)",
        ),
        (
            {"groups": 0, "ungraded": 64, "ungraded/error": 64, "ungraded_reason": "agent failed: it broke"},
            Config(),
            "None of the 64 answers could be graded (error 64; the first: agent failed: it broke)",
        ),
        ({"groups_uniform": 8}, Config(group_size=1), "Nothing was learned: with --group-size 1"),
    ],
)
def test_a_step_that_taught_nothing_says_why_and_what_to_do(changes, config, sentence):
    found = log.diagnose(nothing_learned(**changes), config, "mine")
    assert found.startswith(sentence)
    assert bool(found) == bool(sentence)


def test_the_diagnosis_reaches_the_console_even_when_quiet(tmp_path):
    with RunLog(tmp_path / "r", Config(), quiet=True, console=console()) as run:
        run.say("hello")
        run.step({"step": 1, **nothing_learned(groups_too_hard=8)})
    assert said(run).startswith("0 of 64 answers were graded above 0")
    assert f"minirllm show {tmp_path / 'r'}`" in said(run)  # wherever it lies
    assert len(said(run).splitlines()) == 1


def test_numpy_numbers_are_numbers_and_other_things_are_refused(tmp_path):
    with RunLog(tmp_path / "r", Config(), console=console()) as run:
        run.step({"step": np.int64(1), "a": np.float32(0.5), "b": np.float64(0.25)})
        for value, name in (([1.0], "list"), (np.zeros(1), "ndarray"), (1j, "complex")):
            with pytest.raises(UserError, match=f"Metric 'mine' must be a number, got {name}"):
                run.step({"step": 2, "mine": value})
    assert log.read_metrics(tmp_path / "r" / "metrics.jsonl") == [{"step": 1, "a": 0.5, "b": 0.25}]


def test_a_used_folder_needs_resume_and_keeps_what_it_has(tmp_path):
    with RunLog(tmp_path / "r", Config(), console=console()) as run:
        run.manifest(level="exact", threads=2)
        for step in (1, 2, 3):
            run.step({"step": step, "loss": float(step)})
    metrics = tmp_path / "r" / "metrics.jsonl"
    with pytest.raises(UserError, match=r"already holds a run: continue it with --resume, or name another with --run"):
        RunLog(tmp_path / "r", Config(steps=5), console=console())
    assert load(tmp_path / "r" / "config.toml").steps == 20  # the refused run left no trace
    metrics.write_text(metrics.read_text() + '{"step": 4, "lo')  # the power went
    with RunLog(tmp_path / "r", Config(lr=1e-5), resume=True, console=console()) as run:
        run.manifest(level="exact", threads=1)
        assert "lr = 0.0003" in (tmp_path / "r" / "config.toml").read_text()  # until the resumption has succeeded
        run.rewind(1)
        assert "lr = 1e-05" in (tmp_path / "r" / "config.toml").read_text()
        run.step({"step": 2, "loss": 20.0})
    assert log.read_metrics(metrics) == [{"step": 1, "loss": 1.0}, {"step": 2, "loss": 20.0}]
    manifest = json.loads((tmp_path / "r" / "manifest.json").read_text())
    assert (manifest["threads"], manifest["config"]["lr"]) == (2, 3e-4)
    assert manifest["resumed"][0]["changed"] == {"config.lr": [3e-4, 1e-5], "threads": [2, 1]}
    assert manifest["resumed"][0]["after"] == 1
    assert "config.lr 0.0003 -> 1e-05, threads 2 -> 1" in said(run)


def test_resuming_what_stopped_before_its_first_step_begins_it(tmp_path):
    with RunLog(tmp_path / "r", Config(), resume=True, console=console()) as run:
        run.rewind(0)
        run.manifest(level="fixed")
        run.step({"step": 1})
    assert "resumed" not in json.loads((tmp_path / "r" / "manifest.json").read_text())


@pytest.mark.parametrize("name", ["seed", "model", "task"])
def test_another_run_does_not_continue_this_one(tmp_path, name):
    facts = {"seed": 0, "model": "tiny", "task": "smoke"}
    with RunLog(tmp_path / "r", Config(), console=console()) as run:
        run.manifest(**facts)
        run.step({"step": 1})
    before = {path.name: path.read_text() for path in (tmp_path / "r").iterdir() if path.name != "lock"}
    with (
        RunLog(tmp_path / "r", Config(steps=9), resume=True, console=console()) as run,
        pytest.raises(UserError, match=f"began with {name} .*, not 'other'"),
    ):
        run.manifest(**{**facts, name: "other"})
    assert before == {path.name: path.read_text() for path in (tmp_path / "r").iterdir() if path.name != "lock"}


@pytest.mark.parametrize("left", ["episodes/step_00001.jsonl", "checkpoints/step_000001"])
def test_a_run_killed_in_its_first_step_is_a_run(tmp_path, left):
    (tmp_path / "r" / left).mkdir(parents=True)
    with pytest.raises(UserError, match="already holds a run"):
        RunLog(tmp_path / "r", Config(), console=console()).close()
    RunLog(tmp_path / "r", Config(), resume=True, console=console()).close()


def test_rewinding_keeps_numbers_that_are_not_finite(tmp_path):
    with RunLog(tmp_path / "r", Config(), console=console()) as run:
        run.step({"step": 1, "loss": math.inf})
        run.rewind(1)
    assert (tmp_path / "r" / "metrics.jsonl").read_text() == '{"step": 1, "loss": "inf"}\n'


def test_the_manifest_names_what_bits_depend_on(tmp_path, monkeypatch):
    monkeypatch.setenv("MKL_CBWR", "COMPATIBLE")
    monkeypatch.delenv("MKL_NUM_THREADS", raising=False)
    with RunLog(tmp_path / "r", Config(seed=7), console=console()) as run:
        run.manifest(level="exact", threads=2, template_hash="t", dataset_revision="d")
    manifest = json.loads((tmp_path / "r" / "manifest.json").read_text())
    assert (manifest["level"], manifest["threads"], manifest["template_hash"], manifest["dataset_revision"]) == (
        "exact",
        2,
        "t",
        "d",
    )
    assert manifest["config"] == Config(seed=7).to_dict()
    assert manifest["environment"]["MKL_CBWR"] == "COMPATIBLE"
    assert manifest["environment"]["MKL_NUM_THREADS"] is None
    assert manifest["packages"]["numpy"] == np.__version__
    assert manifest["cpu"]
    assert manifest["python"].startswith("3.")


def test_the_commit_is_this_checkouts_and_no_one_elses(tmp_path, monkeypatch):
    git = ("git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b")
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "x"], check=True)
    head = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    monkeypatch.setattr(machine, "__file__", str(tmp_path / "minirllm" / "log.py"))
    assert machine._commit() == head
    (tmp_path / "file").write_text("x")
    subprocess.run([*git, "add", "file"], check=True)
    assert machine._commit() == head + "+changes"
    monkeypatch.setattr(machine, "__file__", str(tmp_path / "venv" / "lib" / "site-packages" / "minirllm" / "log.py"))
    assert machine._commit() is None


def test_two_processes_cannot_share_a_folder(tmp_path):
    code = f"""
from pathlib import Path
from minirllm.config import Config
from minirllm.log import RunLog
with RunLog(Path({str(tmp_path / "r")!r}), Config()):
    print("held", flush=True)
    input()
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(log.__file__).parents[1])}
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as holder:
        assert holder.stdin is not None
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(
            UserError, match=rf"is in use by process {holder.pid}: wait for it, or name another run with --run"
        ):
            RunLog(tmp_path / "r", Config(), resume=True, console=console())
        holder.kill()
        holder.wait()
    RunLog(tmp_path / "r", Config(), resume=True, console=console()).close()  # a killed process leaves no lock behind


def test_a_failed_start_releases_the_folder(tmp_path):
    with pytest.raises(ConfigError, match="There is no tracker"):
        RunLog(tmp_path / "r", Config(trackers="tensorbord"), console=console())
    with (tmp_path / "r" / "lock").open() as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_folder_that_cannot_be_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"Cannot use run folder .*file/r: Not a directory"):
        RunLog(tmp_path / "file" / "r", Config(), console=console())


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_one_sentence(tmp_path):
    with RunLog(tmp_path / "r", Config(), console=console()) as run:
        (tmp_path / "r" / "metrics.jsonl").symlink_to("/dev/full")
        with pytest.raises(UserError, match=r"Cannot write .*metrics.jsonl: No space left on device"):
            run.step({"step": 1})


def test_a_damaged_file_is_named_with_its_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 2}\n{"step": 1}\n{"step": 2, "loss": 1.0}\n{"st')
    assert log.read_metrics(path) == [{"step": 1}, {"step": 2, "loss": 1.0}]
    for broken in ("{oops\n", '["step"]\n', '{"loss": 1}\n', '{"step": "1"}\n'):
        path.write_text('{"step": 1}\n' + broken + '{"step": 3}\n')
        with pytest.raises(UserError, match=r"metrics.jsonl is damaged: line 2 is not a metrics row"):
            log.read_metrics(path)


def test_a_terminal_shows_progress_and_a_pipe_does_not(tmp_path):
    with RunLog(tmp_path / "a", Config(), console=console()) as run:
        run.progress("step 1/20: rollouts", 3, 64, in_flight=8, tokens=100)
    assert said(run) == ""
    terminal = Console(
        file=io.StringIO(), force_terminal=True, width=120, color_system="standard", highlight=False, _environ={}
    )
    with RunLog(tmp_path / "b", Config(), console=terminal) as run:
        run.progress("step 1/20: rollouts", 0, 64)
        run.progress("step 1/20: rollouts", 3, 64, in_flight=8, tokens=100)
        assert run._bar is not None
        run._bar.refresh()
        assert "step 1/20: rollouts" in said(run)
        assert "3/64" in said(run)
        assert "8 in flight" in said(run)
        run.progress("step 1/20: train", 1, 5)
        assert [task.total for task in run._bar.tasks] == [5]
        run.step({"step": 1})
        assert run._bar is None
    with RunLog(tmp_path / "c", Config(), quiet=True, console=terminal) as run:
        run.progress("rollouts", 1, 2)
        assert run._bar is None


def test_text_from_elsewhere_cannot_steer_the_terminal(tmp_path):
    with RunLog(tmp_path / "r", Config(), console=console()) as run:
        run.warn("[red]bold[/red] \x1b[2J\x07 \udcff é\ta")
    assert said(run) == "[red]bold[/red] \\x1b[2J\\x07 \\xdcff é    a\n"


class Recorder:
    """A tracker of the user's own."""

    rows: list[tuple[int, dict[str, float]]] = []  # noqa: RUF012

    def __init__(self, folder: Path, config: Config):
        self.rows.clear()

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self.rows.append((step, metrics))

    def close(self) -> None:
        self.rows.append((-1, {}))


def test_a_tracker_gets_the_finite_numbers(tmp_path):
    with RunLog(tmp_path / "r", Config(trackers=f"{__name__}:Recorder"), console=console()) as run:
        run.step({"step": 1, "loss": 0.5, "bad": math.nan, "sha": "x", "none": None, "groups": 8})
    assert Recorder.rows == [(1, {"step": 1, "loss": 0.5, "groups": 8}), (-1, {})]


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("wanb", r"no tracker 'wanb' \(did you mean wandb\?\): use tensorboard, wandb, trackio, or module:attr\."),
        ("no_such_module:x", "The tracker 'no_such_module:x' cannot be imported: No module named 'no_such_module'"),
        ("json:x", "The tracker 'json:x' cannot be imported: .* has no attribute 'x'"),
    ],
)
def test_a_tracker_that_cannot_be_is_named(tmp_path, name, sentence):
    with pytest.raises(ConfigError, match=sentence):
        trackers.build(name, tmp_path, Config())


@pytest.mark.parametrize("name", list(trackers.TRACKERS))
def test_a_tracker_that_is_not_installed_names_its_extra(tmp_path, monkeypatch, name):
    for module in (name, f"{name}.summary"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=rf"Tracker {name} is not installed: pip install 'minirllm\[{name}\]'"):
        trackers.build(name, tmp_path, Config())


def test_tensorboard_writes_event_files(tmp_path):
    pytest.importorskip("tensorboard")
    (tracker,) = trackers.build("tensorboard", tmp_path, Config())
    tracker.log(1, {"reward_mean": 0.5})
    tracker.close()
    assert b"reward_mean" in next((tmp_path / "tensorboard").iterdir()).read_bytes()


async def test_what_a_run_says_from_the_event_loop_does_not_block_it(tmp_path):
    run = await asyncio.to_thread(RunLog, tmp_path / "r", Config(), console=console())
    await asyncio.to_thread(run.manifest, level="exact")
    run.say("a")
    run.warn("b")
    run.progress("step 1", 1, 2)
    await asyncio.to_thread(run.step, {"step": 1})
    run.close()
    assert said(run) == "a\nb\nstep 1/20 | determinism exact\n"
