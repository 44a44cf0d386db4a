"""A run that is killed, interrupted, out of space, damaged or doubled: real processes and signals, a really full disk.

Every run here has the tiny model. The long form of the kills is ``benchmarks/reproducibility.py kills``.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.proofs.kills import Killer
from benchmarks.proofs.phases import PHASES
from minirllm.log import read_metrics
from minirllm.store import EpisodeStore

ROOT = Path(__file__).parents[1]
TASK = str(ROOT / "tests/delayed.py")
STEPS = 3
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # several whole runs each, on a machine that may be busy
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}


def command(runs: Path, name: str, *options: str, task: str = TASK) -> list[str]:
    where = ["--runs-dir", str(runs), "--run", name, "--steps", str(STEPS)]
    return [sys.executable, "-m", "minirllm.train", task, *where, *options]


def start(runs: Path, name: str, *options: str, task: str = TASK, **environment: str) -> subprocess.Popen[str]:
    """In a process group of its own, as a shell starts it: the terminal's Ctrl-C goes to all of the group."""
    return subprocess.Popen(
        command(runs, name, *options, task=task), env={**ENVIRONMENT, **environment}, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, process_group=0,
    )  # fmt: skip


def run(runs: Path, name: str, *options: str, **more: str) -> subprocess.CompletedProcess[str]:
    process = start(runs, name, *options, **more)
    out, err = process.communicate()
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def hashes(folder: Path) -> list[str]:
    return [row["weights_sha256"] for row in read_metrics(folder / "metrics.jsonl") if row["step"]]


def episodes(folder: Path, step: int) -> dict[tuple[str, int], float]:
    """Of each finished rollout what tells one run of it from another: how long it took."""
    return {key: e.metrics["seconds"] for key, e in EpisodeStore(folder / "episodes").finished(step).items()}


def wait_until(what: Callable[[], Any], process: subprocess.Popen[str]) -> None:
    while not what():  # on a busy machine this takes a while; the test's own limit ends it
        assert process.poll() is None, f"ended early: {process.communicate()}"
        time.sleep(0.02)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that nothing disturbed."""
    runs = tmp_path_factory.mktemp("whole")
    done = run(runs, "whole")
    assert done.returncode == 0, done.stderr
    assert len(set(hashes(runs / "whole"))) == STEPS
    return runs / "whole"


@pytest.fixture
def copy(whole: Path, tmp_path: Path) -> Path:
    """The same, to be damaged; as if it had ended before the last step was taken."""
    return Path(shutil.copytree(whole, tmp_path / "copy"))


def test_killed_in_the_middle_of_anything_it_resumes_to_the_same_weights(tmp_path: Path) -> None:
    killer = Killer(tmp_path, steps=STEPS, seed=1)
    done = [killer.kill(phase, phase) for phase in ("grading", "forward_backward", "optimizer", "checkpoint_write")]
    assert [one["same"] for one in done] == [True] * 4
    assert all(one["hit"] in (*PHASES, "between") for one in done)
    assert sum(one["episodes"] for one in done) > 0
    assert [one["episodes_kept"] for one in done] == [one["episodes"] for one in done]  # none was run again


# ---- signals ----


def test_ctrl_c_finishes_the_step_saves_it_and_says_how_to_go_on(tmp_path: Path, whole: Path) -> None:
    process = start(tmp_path, "r", "--set", "save_every=100", DELAY="3")
    folder = tmp_path / "r"
    wait_until(lambda: (folder / "episodes").is_dir() and len(episodes(folder, 1)) > 2, process)
    os.killpg(process.pid, signal.SIGINT)  # agents and graders are in the middle of it
    out, err = process.communicate()
    assert process.returncode == 0, err
    assert "Stopping once this step is done and saved. Ctrl-C again stops at once." in err
    how = f"minirllm train {TASK} --run r --runs-dir {tmp_path} --resume"
    assert f"Stopped after step 1 of {STEPS}. Continue with: {how}" in err
    assert "Traceback" not in err
    assert "Done" not in out
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step_000001"]
    assert hashes(folder) == hashes(whole)[:1]
    before = episodes(folder, 1)
    done = run(tmp_path, "r", "--resume")
    assert done.returncode == 0, done.stderr
    assert "Resuming after step 1" in done.stdout
    assert hashes(folder) == hashes(whole)
    assert episodes(folder, 1) == before


@pytest.mark.parametrize("signals", [[signal.SIGINT, signal.SIGINT], [signal.SIGTERM]])
def test_a_second_ctrl_c_or_sigterm_stops_at_once(tmp_path: Path, whole: Path, signals: list[signal.Signals]) -> None:
    process = start(tmp_path, "r", DELAY="10")
    folder = tmp_path / "r"
    wait_until(lambda: (folder / "episodes").is_dir() and len(episodes(folder, 1)) > 0, process)
    for number in signals:
        os.killpg(process.pid, number)
        time.sleep(0.5)
    _, err = process.communicate()
    assert process.returncode == (143 if signals == [signal.SIGTERM] else 130), err
    assert "Stopping at once. Finished episodes are kept, and the run can be resumed." in err
    assert f"Stopped. Continue with: minirllm train {TASK} --run r --runs-dir {tmp_path} --resume" in err
    assert "Traceback" not in err
    before = episodes(folder, 1)
    assert 0 < len(before) < 12  # in the middle of the first step
    done = run(tmp_path, "r", "--resume")
    assert done.returncode == 0, done.stderr
    assert hashes(folder) == hashes(whole)
    kept = episodes(folder, 1)
    assert {key: kept[key] for key in before} == before
    (first, *_) = read_metrics(folder / "metrics.jsonl")
    assert 0 < first["tokens_kept"] < first["tokens_generated"]


# ---- attempts ----

FLAKY = """
import os
from pathlib import Path
from minirllm import Task, rollout
from tests import delayed

DEFAULTS = {**delayed.DEFAULTS, "batch_size": 1, "group_size": 2, "retries": 3, "concurrency": 1}
evaluator, train, held_out = delayed.score, delayed.train, delayed.held_out

@rollout
async def talk(task, config):
    \"\"\"Fails the first time, whatever its seed, and ends the process the second.\"\"\"
    count = Path(os.environ["COUNT"])
    tries = int(count.read_text()) if count.exists() else 0
    count.write_text(str(tries + 1))
    answer = await delayed.talk.fn(task, config)
    if tries == 0:
        raise OSError("the network was away")
    if tries == 1:
        os.kill(os.getpid(), 9)
    return answer
"""


def test_a_resumed_rollout_goes_on_with_the_attempt_that_was_running(tmp_path: Path) -> None:
    """What made the first attempt fail is gone: made again, it would succeed, with other samples than the second."""
    (tmp_path / "flaky.py").write_text(FLAKY)
    options = command(tmp_path, "r", "--steps", "1", task=str(tmp_path / "flaky.py"))
    environment = {**ENVIRONMENT, "COUNT": str(tmp_path / "count")}
    killed = subprocess.run(options, env=environment, capture_output=True, text=True, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    resumed = subprocess.run([*options, "--resume"], env=environment, capture_output=True, text=True, check=False)
    assert resumed.returncode == 0, resumed.stderr
    ended = EpisodeStore(tmp_path / "r/episodes").finished(1)
    assert [(key[1], episode.attempt, episode.metadata["seed"][-1]) for key, episode in sorted(ended.items())] == [
        (0, 1, 1), (1, 0, 0),
    ]  # fmt: skip


# ---- disks ----


def unshared() -> list[str]:
    """The start of a command that may mount file systems of its own."""
    prefix = ["unshare", "--user", "--map-root-user", "--mount"]
    try:
        tried = subprocess.run([*prefix, "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True, check=False)
    except FileNotFoundError:
        pytest.skip("needs unshare")
    if tried.returncode:
        pytest.skip(f"may not mount here: {tried.stderr.decode()}")
    return prefix


FULL = """
mount -t tmpfs -o size=1500k none "$0" || exit 99
"$@"
status=$?
rm -f "$0"/ballast
cp -r "$0"/r "$0"/../kept
exit $status
"""
FILLING = """
import shutil
from pathlib import Path
from minirllm import evaluator
from tests import delayed

DEFAULTS = delayed.DEFAULTS
talk, train, held_out = delayed.talk, delayed.train, delayed.held_out
DISK = Path(__file__).parent / "disk"

@evaluator
def score(task, episode):
    \"\"\"In the second step the disk fills up: the episodes of two steps (100 kB) fit, a checkpoint does not.\"\"\"
    if episode.metadata["step"] == 2:
        try:
            with (DISK / "ballast").open("xb") as file:
                file.write(bytes(shutil.disk_usage(DISK).free - 170_000))
        except FileExistsError:
            pass
    return delayed.score.fn(task, episode)
"""


def test_a_full_disk_costs_the_checkpoint_and_not_the_run(tmp_path: Path, whole: Path) -> None:
    prefix, disk = unshared(), tmp_path / "disk"
    disk.mkdir()
    (tmp_path / "filling.py").write_text(FILLING)
    options = command(disk, "r", task=str(tmp_path / "filling.py"))
    done = subprocess.run(
        [*prefix, "sh", "-c", FULL, str(disk), *options], env=ENVIRONMENT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2, done.stdout + done.stderr  # the last step's weights are on no disk
    assert done.stderr.rstrip().endswith("All steps are done: --resume saves them later.")
    assert "Done" not in done.stdout
    said = " ".join((done.stdout + done.stderr).split())
    for step in (2, 3):
        assert f"Cannot save a checkpoint of step {step} in {disk}/r/checkpoints: No space left on device; " in said
    assert said.count("free some space. The last whole one is step_000001.") == 2
    kept = tmp_path / "kept"
    assert hashes(kept) == hashes(whole)  # it went on
    assert [path.name for path in (kept / "checkpoints").iterdir()] == ["step_000001"]
    (tmp_path / "disk/ballast").touch()
    resumed = run(tmp_path, "kept", "--resume", task=str(tmp_path / "filling.py"))  # there is room again
    assert resumed.returncode == 0, resumed.stderr
    assert hashes(kept) == hashes(whole)
    assert sorted(path.name for path in (kept / "checkpoints").iterdir()) == ["step_000002", "step_000003"]


# ---- damage ----


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    "damages", [[(cut, "optimizer.safetensors")], [(flip, "adapter_model.safetensors"), (flip, "state.json")]]
)
def test_a_damaged_checkpoint_is_said_and_the_one_before_is_used(copy: Path, damages: list[tuple[Any, str]]) -> None:
    wanted, before = hashes(copy), {step: episodes(copy, step) for step in (1, 2, 3)}
    for number, (damage, file) in enumerate(damages):  # the last one first
        damage(copy / f"checkpoints/step_{STEPS - number:06d}" / file)
    done = run(copy.parent, copy.name, "--resume")
    assert done.returncode == 0, done.stderr
    said = " ".join(done.stdout.split())
    for number, (_, file) in enumerate(damages):
        assert f"step_{STEPS - number:06d} is not whole: the bytes of {file} have changed since it was written." in said
    used = "Taking step_000002 instead." if len(damages) == 1 else "Taking none, so from step 1 on, instead."
    assert said.count(used) == len(damages)
    assert hashes(copy) == wanted
    assert {step: episodes(copy, step) for step in (1, 2, 3)} == before  # not one rollout again


# ---- two at once ----


def test_a_second_process_on_a_run_is_refused_and_a_dead_one_is_no_obstacle(tmp_path: Path, whole: Path) -> None:
    first = start(tmp_path, "r", DELAY="10")  # it lasts, however long the second takes to start
    folder = tmp_path / "r"
    wait_until(lambda: (folder / "episodes").is_dir() and len(episodes(folder, 1)) > 0, first)
    second = run(tmp_path, "r", "--resume")
    assert (second.returncode, second.stdout) == (2, "")
    assert second.stderr == (
        f"error: {folder} is in use by process {first.pid}: wait for it, or name another run with --run.\n"
    )
    first.kill()
    first.communicate()
    assert (folder / "lock").read_text() == str(first.pid)  # it had no time to clean up
    third = run(tmp_path, "r", "--resume")
    assert third.returncode == 0, third.stderr
    assert hashes(folder) == hashes(whole)
