"""replay.py: real runs of the tiny model, replayed whole and in parts, and caught wherever their folder is changed."""

from __future__ import annotations

import io
import json
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from rich.console import Console

from minirllm import AgentConfig, AgentTrainer, Episode, Step, Task, Trajectory, evaluator, flow, rollout, train
from minirllm.cli import cli
from minirllm.client import chat
from minirllm.config import Config
from minirllm.errors import UserError
from minirllm.log import read_metrics
from minirllm.store import EpisodeStore
from minirllm.tools.ledger import batch_of
from minirllm.tools.replay import replay, seed_of
from minirllm.tools.runs import Call, Run, calls
from tests.test_diff import edit

OPTIONS = {"batch_size": 2, "group_size": 2, "max_tokens": 4, "save_every": 3, "keep_checkpoints": 2}


def trained(folder: Path, *, resume: bool = False, **options: Any) -> Path:
    """A run of the task with delays, two turns and two side calls in each episode."""
    task = flow.load_task(str(Path(__file__).with_name("delayed.py")))
    values = {**task.defaults, **OPTIONS, **options, "runs_dir": str(folder.parent), "run": folder.name}
    train.run(task, Config(**values), resume=resume, quiet=True)
    return folder


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four steps, with checkpoints of steps 3 and 4."""
    return trained(tmp_path_factory.mktemp("runs") / "made", steps=4)


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Path:
    """A copy, to be changed."""
    return Path(shutil.copytree(made, tmp_path / "run"))


def replayed(folder: Path, **what: Any) -> tuple[bool, str]:
    console = Console(file=io.StringIO(), highlight=False)
    return replay(folder, console=console, **what), console.file.getvalue()  # type: ignore[attr-defined]


def recorded(folder: Path, step: int, task: str = "", index: int = 0) -> Episode:
    found = EpisodeStore(folder / "episodes").finished(step)
    return found[min(found)] if not task else found[task, index]


def test_a_whole_run_a_step_an_episode_and_a_call_match(made: Path) -> None:
    before = {path: path.read_bytes() for path in made.rglob("*") if path.is_file()}
    same, text = replayed(made)
    assert same, text
    level = json.loads((made / "manifest.json").read_text())["level"]
    assert f"level {level}: every call and every update comes out the same" in text
    assert [line for line in text.splitlines() if line.startswith("step")] != []
    assert all(f"step {step}: 16 calls with " in text for step in (1, 2, 3, 4))
    assert "\nMatch: 64 calls, " in text
    assert text.rstrip().endswith(" tokens, 4 updates.")
    episode = recorded(made, 2)
    same, text = replayed(made, episode=episode.session_id)
    assert same
    assert "Match: 4 calls" in text
    assert "step 1: its update matches" in text, "the weights before step 2 are derived from those of the seed"
    same, text = replayed(made, call=calls(episode)[1].id)
    assert same
    assert "Match: 1 calls" in text
    assert {path: path.read_bytes() for path in made.rglob("*") if path.is_file()} == before, "nothing is written"


def test_a_step_begins_at_the_newest_checkpoint_before_it_or_is_derived(run: Path) -> None:
    same, text = replayed(run, step=4)
    assert same, text
    assert "its update matches\n" not in text, "the checkpoint of step 3 is where it begins"
    shutil.rmtree(run / "checkpoints")
    same, text = replayed(run, step=4)
    assert same, text
    assert [f"step {step}: its update matches\n" in text for step in (1, 2, 3)] == [True] * 3


def test_what_cannot_be_derived_is_said_and_the_rest_is_replayed(run: Path) -> None:
    file = run / "episodes/step_00002.jsonl"
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:3]))
    same, text = replayed(run)
    assert same, text
    assert "step 2: 12 calls with " in text
    assert "no update to compare: step 2 has 3 of its 4 episodes" in text
    assert f"Step 3 of {run} cannot be derived: step 2 has 3 of its 4 episodes, and no whole checkpoint of" in text
    assert "step 4: 16 calls with " in text
    assert ", 2 updates." in text
    with pytest.raises(UserError, match=r"Step 3 of .* cannot be derived: step 2 has 3 of its 4 episodes"):
        replayed(run, step=3)
    (run / "metrics.jsonl").write_text("".join((run / "metrics.jsonl").read_text().splitlines(keepends=True)[:1]))
    same, text = replayed(run, step=2)
    assert same
    assert "no update to compare: step 2 was not finished" in text


def first_sampled(episode: dict[str, Any]) -> dict[str, Any]:
    """The node of the first turn's sample."""
    call = episode["trajectories"][0]["steps"][0]["id"]
    found: dict[str, Any] = next(node for node in episode["tree"]["nodes"] if node.get("call_id") == call)
    return found


def token(episode: dict[str, Any]) -> None:
    first_sampled(episode)["tokens"][0] ^= 1


def one_ulp(episode: dict[str, Any]) -> None:
    values = first_sampled(episode)["logprobs"]
    values[0] = math.nextafter(values[0], 0)


def prompt(episode: dict[str, Any]) -> None:
    episode["tree"]["nodes"][0]["tokens"][-1] ^= 1


def seed(episode: dict[str, Any]) -> None:
    episode["metadata"]["seed"][0] += 1


def version(episode: dict[str, Any]) -> None:
    first_sampled(episode)["weight_version"] = 7


def fewer(episode: dict[str, Any]) -> None:
    step = episode["trajectories"][0]["steps"][0]
    step["params"]["max_tokens"] = 2


def reward(episode: dict[str, Any]) -> None:
    episode["reward"] = episode["trajectories"][0]["reward"] = 0.987


EPISODES = "episodes/step_00001.jsonl"
CALL = "episode E, call C"
ALL_CHANGED = f"{CALL}: its prompt, its id or the episode's seed was changed:"
TAMPERED: dict[str, tuple[str, Callable[[Any], Any], str]] = {
    "token": (EPISODES, token, CALL + r", token 1 of \d:\n  recorded: id \d+, logprob .*\n  replayed: id"),
    "logprob": (EPISODES, one_ulp, CALL + r", token 1 of \d:\n  recorded: id (\d+), .*\n  replayed: id \1,"),
    "prompt": (EPISODES, prompt, ALL_CHANGED),
    "seed": (EPISODES, seed, ALL_CHANGED),
    "version": (EPISODES, version, CALL + r", weight version:\n  recorded: 7\n  replayed: 0"),
    "parameters": (EPISODES, fewer, CALL + r", token 3 of \d:\n  recorded: id .*\n  replayed: no token"),
    "reward": (EPISODES, reward, r"reward_mean:\n  recorded: "),
    "metric": ("metrics.jsonl", lambda row: row.update(loss=row["loss"] + 1), r"loss:\n  recorded: .*\n  replayed: "),
    "hash": (
        "metrics.jsonl",
        lambda row: row.update(weights_sha256="0" * 64),
        r"weights_sha256:\n  recorded: 0{64}\n  replayed: [0-9a-f]{64}\n",
    ),
}


@pytest.mark.parametrize("name", TAMPERED)
def test_a_changed_folder_is_caught_and_the_place_is_named(run: Path, name: str) -> None:
    file, change, expected = TAMPERED[name]
    line = json.loads((run / file).read_text().splitlines()[0])
    names = {"episode E,": f"episode {line.get('id')},", "call C": f"call {calls(recorded(run, 1))[0].id}"}
    if file == EPISODES:  # lines lie in the order in which episodes ended
        first = recorded(run, 1, line["task_id"], line.get("rollout_idx", 0))
        names["call C"] = f"call {calls(first)[0].id}"
    edit(run / file, 0, change)
    same, text = replayed(run, step=1)
    assert not same
    for short, whole in names.items():
        expected = expected.replace(short, whole)
    assert re.search("First difference: step 1, " + expected, text), text
    assert "Machine and versions are those of the manifest, so a file of the run was changed" in text


def test_a_change_before_the_step_that_was_asked_for_is_found_on_the_way(run: Path) -> None:
    def one_float32_ulp(episode: dict[str, Any]) -> None:
        values = first_sampled(episode)["logprobs"]
        values[0] = float(np.nextafter(np.float32(values[0]), np.float32(0)))

    edit(run / EPISODES, 0, one_float32_ulp)
    shutil.rmtree(run / "checkpoints")
    same, text = replayed(run, step=3)
    assert not same
    assert re.search(r"First difference: step 1, \w+:\n  recorded: ", text), text


def test_a_checkpoint_of_other_weights_is_named(run: Path) -> None:
    edit(run / "metrics.jsonl", 2, lambda row: row.update(weights_sha256="0" * 64))
    same, text = replayed(run, step=4)
    assert not same
    assert f"First difference: step 3, weights in step_000003:\n  recorded: {'0' * 64}" in text


def test_what_differs_around_it_is_named(run: Path) -> None:
    manifest = json.loads((run / "manifest.json").read_text())
    manifest |= {"cpu": "Another CPU", "cpus": 96}
    manifest["packages"]["torch"] = "1.0"
    (run / "manifest.json").write_text(json.dumps(manifest))
    edit(run / "metrics.jsonl", 0, lambda row: row.update(weights_sha256="0" * 64))
    same, text = replayed(run, step=1)
    assert not same
    assert "Not as when the run was made: " in text
    for part in ("cpu 'Another CPU' -> ", "cpus 96 -> ", "packages.torch '1.0' -> "):
        assert part in text
    assert "config." not in text


def test_what_is_not_there_is_named_with_the_nearest(made: Path) -> None:
    session, call = recorded(made, 1).session_id, calls(recorded(made, 3))[0].id
    cases: dict[str, dict[str, Any]] = {
        r"has no step 9: it has 1 to 4; 4 is nearest\.": {"step": 9},
        rf"has no episode '{session}0' \(did you mean {session}\?\)": {"episode": session + "0"},
        rf"has no call '{call[:-1]}' \(did you mean {call}\?\)": {"call": call[:-1]},
        rf"has no call '{call}' in step 1\.": {"call": call, "step": 1},
    }
    for sentence, what in cases.items():
        with pytest.raises(UserError, match=sentence):
            replayed(made, **what)
    store = EpisodeStore(made / "episodes")
    key = next(iter(store.finished(4)))  # of the second epoch
    twice, first = store.finished(4)[key].id, next(step for step in (1, 2, 3) if key in store.finished(step))
    with pytest.raises(UserError, match=rf"episode '{twice}' is in steps {first}, 4: name one with --step"):
        replayed(made, episode=twice)
    assert replayed(made, episode=twice, step=4)[0]


def test_folders_that_do_not_say_enough_are_refused(run: Path, tmp_path: Path) -> None:
    edit(run / EPISODES, 0, lambda e: [step.pop("params") for step in e["trajectories"][0]["steps"]])
    with pytest.raises(UserError, match="recorded without its sampling parameters"):
        replayed(run, step=1)
    manifest = json.loads((run / "manifest.json").read_text())
    del manifest["threads"]
    (run / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(
        UserError, match=r"manifest\.json does not say threads, so its first step cannot be begun again"
    ):
        replayed(run)
    shutil.rmtree(run / "episodes")
    (run / "metrics.jsonl").unlink()
    shutil.copy(Path(__file__).parent.parent / "pyproject.toml", run / "config.toml")
    (run / "manifest.json").write_text(json.dumps({**manifest, "threads": 1}))
    with pytest.raises(UserError, match="holds no step yet"):
        replayed(run)


def test_calls_of_another_engine_are_left_alone(run: Path) -> None:
    manifest = json.loads((run / "manifest.json").read_text())
    manifest["config"]["engine"] = "scripted"
    (run / "manifest.json").write_text(json.dumps(manifest))
    edit(run / EPISODES, 0, lambda e: e["trajectories"][0]["steps"][0].update(finish_reason="length"))
    same, text = replayed(run, step=1)
    assert same, text
    assert "The calls of engine scripted cannot be sampled again: only updates are replayed." in text
    assert "\nMatch: 1 updates." in text
    with pytest.raises(UserError, match=r"engine scripted cannot be sampled again: name a --step, whose update"):
        replayed(run, call=calls(recorded(run, 1))[0].id)


@pytest.mark.parametrize("level", ["fixed", "off"])
def test_the_other_levels_say_what_they_promise(tmp_path: Path, level: str) -> None:
    run = trained(tmp_path / "r", steps=1, determinism=level)
    same, text = replayed(run)
    assert f"level {level}: " in text
    assert ("no promise was made" in text) == (level == "off")
    if level == "fixed":
        assert same, text


def test_training_of_all_parameters_with_a_reference_is_replayed_from_the_seed_and_from_a_checkpoint(
    tmp_path: Path,
) -> None:
    run = trained(tmp_path / "r", steps=3, lora_rank=0, kl_beta=0.1, lr=1e-4, save_every=1, keep_checkpoints=2)
    for step in (None, 3):
        same, text = replayed(run, step=step)
        assert same, text
        assert "step 2: its update matches\n" not in text


def test_every_term_of_the_loss_is_replayed_from_the_seed_and_from_a_checkpoint(tmp_path: Path) -> None:
    terms = {"kl_beta": 0.5, "kl_in": "reward", "kl_estimator": "k1", "kl_target": 1e-5, "entropy_bonus": 0.01}
    options = {"mini_batches": 2, "inner_epochs": 2, "correction": "token", "lr": 1e-2}
    run = trained(tmp_path / "r", steps=3, save_every=1, keep_checkpoints=2, **terms, **options)
    rows = {row["step"]: row for row in read_metrics(run / "metrics.jsonl")}
    assert rows[2]["kl_beta"] != 0.5
    for step, row in rows.items():  # `show --tokens` knows what the KL took from the rewards, and so who was trained
        shown = batch_of(Run(run), step).metrics
        assert shown.items() <= row.items(), step
    for step in (None, 3):
        same, text = replayed(run, step=step)
        assert same, text


def test_a_run_resumed_with_other_options_is_replayed_under_each(tmp_path: Path) -> None:
    run = trained(tmp_path / "r", steps=2, lr_schedule="linear", save_every=1, keep_checkpoints=1)
    trained(run, resume=True, steps=3, lr=3e-3, lr_schedule="linear", lora_alpha=16.0, keep_checkpoints=1)
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step_000003"]
    same, text = replayed(run)
    assert same, text
    assert text.rstrip().endswith(", 3 updates.")
    manifest = json.loads((run / "manifest.json").read_text())
    manifest["resumed"][0]["changed"]["config.lr"][1] = 2e-3
    (run / "manifest.json").write_text(json.dumps(manifest))
    assert "First difference: step 3, lr:\n  recorded: " in replayed(run)[1]


@rollout
async def odd(task: Task, config: AgentConfig) -> list[Trajectory]:
    """Asks one thing twice, cuts an answer with a stop string, and claims not all of its calls."""
    question = [{"role": "user", "content": str(task.instruction)}]
    first = await chat(config, question)
    again = await chat(config, question, max_tokens=3)
    await chat(config, question, stop=["a", "e", "i"], temperature=0.1)
    claimed = {"one": first, "two": again}
    return [Trajectory(name, [Step(id=call.id)], output=call.output) for name, call in claimed.items()]


@evaluator
def length(task: Task, episode: Episode) -> float:
    return len(episode.answer) % 5 / 4


def test_repeated_stopped_unclaimed_and_cut_off_calls_are_sampled_again(tmp_path: Path) -> None:
    options = {"model": "tiny", "steps": 1, "batch_size": 2, "group_size": 3, "max_tokens": 8, "threads": 1}
    tasks = [Task(name, f"Say {name}") for name in ("hä", "x y/z")]
    AgentTrainer(odd, length, {**options, "runs_dir": str(tmp_path), "run": "r"}, tasks).train(quiet=True)
    same, text = replayed(tmp_path / "r")
    assert same, text
    assert "Match: 18 calls" in text
    found = recorded(tmp_path / "r", 1)
    assert [call.step is None for call in calls(found)] == [False, False, True]
    one, other, _ = calls(found)
    assert one.prompt_ids == other.prompt_ids
    assert seed_of(found, one, 200) != seed_of(found, other, 200)
    assert seed_of(found, Call(one.id, [*one.prompt_ids, 5], [], []), 200) is None

    def cut(episode: dict[str, Any]) -> None:
        aborted = (node for node in episode["tree"]["nodes"] if node.get("aborted"))
        node = next(aborted, None) or first_sampled(episode)
        node |= {"tokens": node["tokens"][:kept], "logprobs": node["logprobs"][:kept]}
        node |= {"aborted": True, "weight_version": -1}
        episode["trajectories"] = episode["trajectories"][-1:]

    line = next(
        place for place, text in enumerate((tmp_path / "r" / EPISODES).read_text().splitlines())
        if json.loads(text)["id"] == found.id
    )  # fmt: skip
    for kept in (1, 0):  # the client left after a token, or before the first
        edit(tmp_path / "r" / EPISODES, line, cut)
        assert len(calls(recorded(tmp_path / "r", 1))[1].token_ids) == kept
        same, text = replayed(tmp_path / "r", episode=found.id)
        assert same, text


def test_the_command_exits_0_or_1_or_says_in_one_line_what_is_wrong(run: Path) -> None:
    call = calls(recorded(run, 1))[0].id
    name = ["replay", run.name, "--runs-dir", str(run.parent)]
    assert CliRunner().invoke(cli, [*name, "--call", call]).exit_code == 0
    both = CliRunner().invoke(cli, [*name, "--call", call, "--episode", "x:0"])
    assert both.exit_code == 2
    assert both.output.splitlines() == ["error: A call has one episode: give --call without --episode."]
    unknown = CliRunner().invoke(cli, [*name, "--step", "7"])
    assert (unknown.exit_code, len(unknown.output.splitlines())) == (2, 1)
    edit(run / EPISODES, 0, token)
    changed = CliRunner().invoke(cli, [*name, "--step", "1"])
    assert changed.exit_code == 1
    assert "First difference: step 1, episode" in changed.output
