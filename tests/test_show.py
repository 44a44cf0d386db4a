"""show.py: a fabricated run folder, as a terminal, a pipe and a program read it."""

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.console import Console

from minirllm.cli import cli
from minirllm.config import Config
from minirllm.errors import UserError
from minirllm.log import RunLog
from minirllm.store import EpisodeStore
from minirllm.tools import show
from minirllm.tools.runs import find_run
from minirllm.tools.show import Wanted
from minirllm.types import Episode, Message, Step, TerminationReason, ToolCall, Trajectory


def episode(task: str, index: int, reward: float | None, text: str, **changes: object) -> Episode:
    step = Step(
        id=f"{task}{index}",
        messages=[Message("system", "Be brief."), Message("user", f"Question {task}?")],
        response=Message("assistant", text),
        finish_reason="stop",
    )
    found = Episode(
        id=f"{task}:{index}",
        task_id=task,
        rollout_idx=index,
        reward=reward,
        is_correct=reward == 1,
        termination_reason=TerminationReason.ENV_DONE,
        trajectories=[Trajectory(steps=[step])],
    )
    for name, value in changes.items():
        setattr(found, name, value)
    return found


@pytest.fixture
def run(tmp_path, monkeypatch) -> Path:
    """Three steps of a run named ``r``; the episodes of steps 2 and 3; step 4 was killed."""
    monkeypatch.chdir(tmp_path)
    folder = Path("runs") / "r"
    with RunLog(folder, Config(model="tiny", seed=3, steps=5), console=Console(file=io.StringIO())) as log:
        log.manifest(task="letters", level="exact")
        log.step({"step": 0, "eval_reward": 0.25})
        for step, reward in ((1, 0.25), (2, 0.5), (3, 0.75)):
            log.step({"step": step, "reward_mean": reward, "groups_with_signal": 6.0, "loss": float("nan")})
    store = EpisodeStore(folder / "episodes")
    store.append(2, episode("old", 0, 0.5, "older"))
    for e in (
        episode("a", 0, 0.5, "middling"),
        episode("b", 0, 1.0, "the best answer"),
        episode("b", 1, 0.0, "the worst answer"),
        episode("c", 0, None, "", reason="the grader hung", termination_reason=TerminationReason.GRADING_TIMEOUT),
    ):
        store.append(3, e)
    store.append(4, episode("late", 0, 1.0, "unfinished step"))
    return folder


def printed(folder: Path, **options: object) -> str:
    console = Console(file=io.StringIO(), highlight=False)
    show.show(folder, Wanted(**options), console)  # type: ignore[arg-type]
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_the_whole_page(run):
    text = printed(run)
    assert text.splitlines()[0] == "runs/r: task letters, level exact, model tiny, seed 3, 3 of 5 steps"
    assert "   reward   • train   ○ held-out\n     0.75 │" in text
    titles = next(line for line in text.splitlines() if line.startswith("step"))
    assert titles.split() == ["step", "reward", "held-out", "signal", "loss"]
    assert next(line for line in text.splitlines() if line.startswith("   2")).split() == ["2", "0.500", "6", "nan"]
    assert "Conversations of step 3: 3 graded, 1 ungraded" in text
    question = "system: Be brief.\nuser: Question b?\n"
    best = f"best: task b, rollout 0, reward 1, env_done, 1 call\n{question}assistant: the best answer\n"
    worst = f"worst: task b, rollout 1, reward 0, env_done, 1 call\n{question}assistant: the worst answer\n"
    assert best in text
    assert worst in text
    assert text.index(best) < text.index(worst)
    for absent in ("middling", "older", "unfinished step", "\x1b"):
        assert absent not in text


def test_more_episodes_are_never_shown_twice(run):
    text = printed(run, episodes=2)
    headings = [line.split(",")[0] for line in text.splitlines() if line.startswith(("best: ", "worst: "))]
    assert headings == ["best: task b", "best: task a", "worst: task b"]
    assert "best:" not in printed(run, episodes=0)


def test_the_episodes_of_a_given_step(run):
    assert "assistant: older" in printed(run, step=2)
    with pytest.raises(UserError, match=r"runs/r has no episodes of step 1: there are episodes of steps 2 to 4"):
        printed(run, step=1)


def test_when_nothing_could_be_graded_the_reason_is_shown(run):
    store = EpisodeStore(run / "episodes")
    store.append(
        5,
        episode(
            "d",
            0,
            None,
            "hm",
            reason="the grader raised ValueError",
            termination_reason=TerminationReason.GRADING_ERROR,
        ),
    )
    text = printed(run, step=5)
    assert "Conversations of step 5: 0 graded, 1 ungraded" in text
    assert "ungraded: task d, rollout 0, no reward, grading_error, 1 call (the grader raised ValueError)" in text


def test_torn_last_lines_are_left_out(run):
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "rew')
    episodes = next(path for path in (run / "episodes").iterdir() if "3" in path.name)
    with episodes.open("a") as file:
        file.write('{"task_id": "z')
    text = printed(run)
    assert "3 of 5 steps" in text
    assert "Conversations of step 3: 3 graded, 1 ungraded" in text


def test_a_run_that_has_just_begun(tmp_path):
    with RunLog(tmp_path / "r", Config(), console=Console(file=io.StringIO())) as log:
        assert printed(tmp_path / "r") == f"{tmp_path / 'r'}: no step has finished yet\n"
        log.manifest(level="fixed")
        assert "level fixed, model smollm2-135m, seed 0, no step has finished yet" in printed(tmp_path / "r")


def test_runs_are_found_by_path_and_by_name(run, tmp_path):
    assert find_run("runs/r") == Path("runs/r")
    assert find_run("r") == Path("runs/r")
    assert find_run("r", str(tmp_path / "runs")) == tmp_path / "runs" / "r"
    with pytest.raises(UserError, match=r"No run named 'rr' in runs \(did you mean r\?\): it has r\."):
        find_run("rr")
    with pytest.raises(UserError, match=r"^runs is not a run folder: it has no metrics.jsonl\."):
        find_run("runs")
    with pytest.raises(UserError, match=r"No run named 'r': there are no runs in elsewhere"):
        find_run("r", "elsewhere")


def test_the_curve_goes_up_when_the_reward_does():
    rows = [{"step": s, "reward_mean": s / 10} for s in range(11)] + [{"step": 10, "eval_reward": 0.0}]
    assert show.plot(rows, 11, height=3).splitlines() == [
        "   reward   • train   ○ held-out",
        "        1 │        •••",
        "          │   •••••",
        "        0 │•••       ○",
        "          └───────────",
        "     step  0        10",
    ]
    assert show.plot([{"step": 1, "reward_mean": 0.5}], 80) == ""
    assert show.plot([{"step": s, "reward_mean": float("nan")} for s in range(9)], 80) == ""
    flat = show.plot([{"step": s, "reward_mean": 0.5} for s in range(2)], 80, height=3).splitlines()
    assert flat[:4] == ["   reward   • train", "        1 │", "          │• •", "        0 │"]


def test_a_long_run_has_a_short_table_with_its_ends():
    rows = [{"step": s, "reward_mean": 0.5} for s in range(1, 1001)]
    grid = show.table(rows)
    assert grid.row_count == show.TABLE_ROWS
    steps = list(grid.columns[0].cells)
    assert (steps[0], steps[-1]) == ("1", "1000")
    assert len(set(steps)) == show.TABLE_ROWS
    rows[499]["eval_reward"] = 0.5
    assert list(show.table(rows).columns[0].cells) == sorted([*steps, "500"], key=int)


def test_the_table_of_a_fine_tuning_has_the_held_out_loss_of_each_measured_step():
    rows = [{"step": s, "loss": 0.5} for s in range(1, 1001)]
    rows[499]["val_loss"] = 0.25
    columns = {str(column.header): list(column.cells) for column in show.table(rows).columns}
    assert dict(zip(columns["step"], columns["held-out loss"], strict=True))["500"] == "0.2500"


def test_conversations_show_tools_thoughts_branches_and_cuts():
    first = Step(
        id="1",
        messages=[Message("user", "go")],
        response=Message("assistant", "", (ToolCall("t", "look", '{"at": 1}'),), reasoning="hm"),
    )
    second = Step(
        id="2",
        parent="1",
        messages=[Message("tool", "x" * 3000)],
        response=Message("assistant", "<tool_call>{", malformed=True),
    )
    third = Step(
        id="3",
        parent="1",
        messages=[Message("user", "again")],
        response=Message("assistant", "wel"),
        finish_reason="length",
    )
    fourth = Step(id="4", messages=[Message("user", "new")], metadata={"match": "conversation", "auxiliary": "title"})
    lines = show.transcript(
        Episode(trajectories=[Trajectory("solver", [first, second, third, fourth]), Trajectory("judge")])
    )
    assert lines[:3] == [("trajectory", "solver"), ("user", "go"), ("assistant", '(thinks) hm\n-> look({"at": 1})')]
    assert lines[3] == ("call 2", "continues call 1")
    assert lines[4] == ("tool", f"{'x' * 1000}\n[... 1000 characters ...]\n{'x' * 1000}")
    assert lines[5:] == [
        ("assistant", "<tool_call>{ (a tool call that could not be parsed)"),
        ("call 3", "continues call 1"),
        ("user", "again"),
        ("assistant (cut off)", "wel"),
        ("call 4", "auxiliary call (title), not trained; a new conversation"),
        ("user", "new"),
        ("trajectory", "judge"),
    ]


@pytest.mark.parametrize(
    ("match", "parent", "text"),
    [
        ("conversation", None, "a new conversation"),
        ("edited", None, "a new conversation, made by editing an answer"),
        ("extended", "1", "extends call 1"),
        ("edited", "1", "continues call 1, a later answer edited"),
        ("rerendered", "1", "continues call 1, its history rewritten by the template"),
        ("unprovable", "1", "continues call 1, whose tokens it could not be proved to extend"),
    ],
)
def test_how_a_call_was_matched(match, parent, text):
    assert show.matched(Step(parent=parent, metadata={"match": match})) == text


def test_what_a_model_wrote_cannot_steer_the_terminal(run):
    EpisodeStore(run / "episodes").append(6, episode("e", 0, 1.0, "\x1b[2J[red]boo[/red]"))
    text = printed(run, step=6)
    assert "assistant: \\x1b[2J[red]boo[/red]\n" in text
    assert "\x1b" not in text


def test_the_command(run):
    result = CliRunner().invoke(cli, ["show", "r", "--episodes", "1", "--step", "3"])
    assert result.exit_code == 0, result.output
    assert "assistant: the best answer" in result.output
    result = CliRunner().invoke(cli, ["show", "nothing"])
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == "error: No run named 'nothing' in runs: it has r.\n"
    (run / "metrics.jsonl").write_text("{oops\n\n")
    result = CliRunner().invoke(cli, ["show", "r"])
    assert (result.exit_code, result.stderr) == (
        2,
        "error: runs/r/metrics.jsonl is damaged: line 1 is not a metrics row; delete that line.\n",
    )


def test_one_episode_and_a_number_of_them_are_refused(run):
    result = CliRunner().invoke(cli, ["show", "r", "--episode", "t:0", "--episodes", "2"])
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == "error: One episode is asked for by its id: give --episode without --episodes.\n"


def test_piped_output_is_plain_and_a_closed_pipe_is_no_error(run):
    environment = {**os.environ, "PYTHONPATH": str(Path(show.__file__).parents[2])}
    command = [sys.executable, "-m", "minirllm.cli", "show", "r"]
    result = subprocess.run(command, capture_output=True, env=environment, timeout=60)
    assert (result.returncode, result.stderr) == (0, b"")
    assert b"\x1b" not in result.stdout
    assert "assistant: the best answer" in result.stdout.decode()
    head = subprocess.run(["sh", "-c", '"$@" | true', "sh", *command], capture_output=True, env=environment, timeout=60)
    assert b"Traceback" not in head.stderr
