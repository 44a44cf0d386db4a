"""cli.py: options, their precedence, what errors look like, what reaches the modules that do the work."""

import json
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from minirllm import cli
from minirllm.commands import options
from minirllm.config import FIELDS, Config
from minirllm.errors import EngineError, UserError
from minirllm.interrupt import Terminated

TASK = """
from minirllm import Task, evaluator, rollout

DEFAULTS = {"steps": 7, "lr": 0.5, "max_tokens": 9}

@rollout
async def solve(task, config):
    return "x"

@evaluator
def score(task, episode):
    return 1.0

def train(config):
    return [Task(id="a")]

def held_out(config):
    return [Task(id="b")]
"""


class Work(types.ModuleType):
    """Stands where ``minirllm.train``, ``evaluate`` and ``providers.serving`` do: remembers how it was called."""

    def __init__(self, error: BaseException | None = None):
        super().__init__("minirllm.work")
        self.error, self.row, self.calls = error, {"step": 20}, list[tuple[str, Any, dict[str, Any]]]()

    def run(self, task: Any, config: Config, **options: Any) -> dict[str, Any]:
        self.calls.append((task.name, config, options))
        if self.error is not None:
            raise self.error
        return self.row

    def serve(self, config: Config, *, ready: Any, **options: Any) -> None:
        self.calls.append(("serve", config, options))
        host, port = options["address"]
        ready(f"http://{host}:{port}", "tiny")
        if self.error is not None:
            raise self.error


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    """A working folder with a task file in it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(TASK)
    return tmp_path


@pytest.fixture
def work(monkeypatch) -> Work:
    fake = Work()
    for name in ("train", "evaluate", "providers.serving"):
        monkeypatch.setitem(sys.modules, f"minirllm.{name}", fake)
    return fake


def invoke(*args: str) -> Result:
    return CliRunner().invoke(cli.cli, args, prog_name="minirllm")


def python(*args: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(Path(cli.__file__).parents[1])}
    return subprocess.run([sys.executable, *args], capture_output=True, text=True, cwd=cwd, env=environment, timeout=60)


def test_every_option_shows_the_one_copy_of_its_meaning():
    text = " ".join(invoke("train", "--help").output.split())
    for name in options.TRAIN:
        assert f"--{name.replace('_', '-')} " in text
        assert FIELDS[name].metadata["doc"] in text.replace("- ", "-") or FIELDS[name].metadata["doc"] in text
    assert "optimizer steps in the whole run [default: 20]" in text
    for flag in ("--set", "--config", "--resume", "--quiet"):
        assert flag in text


@pytest.mark.parametrize("names", [options.TRAIN, options.EVAL, options.SERVE, options.FROM_RUN])
def test_the_lists_of_options_are_fields(names):
    assert set(names) <= set(FIELDS)
    assert len(set(names)) == len(names)


def test_what_wins(place, work):
    (place / "c.toml").write_text("steps = 8\nlr = 0.25\nseed = 8\n")
    result = invoke(
        "train",
        "mine.py",
        "--config",
        "c.toml",
        "--set",
        "lr=0.125",
        "--set",
        "seed=9",
        "--seed",
        "10",
        "--determinism",
        "off",
    )
    assert result.exit_code == 0, result.output
    ((name, config, options),) = work.calls
    assert (name, options) == ("mine", {"resume": False, "quiet": False})
    assert (config.max_tokens, config.steps, config.lr, config.seed, config.determinism) == (9, 8, 0.125, 10, "off")
    assert config.batch_size == Config().batch_size
    run = "runs/mine-smollm2-135m-10"
    assert result.stdout == f"Done. Weights: {run}/checkpoints. Look at it: minirllm show {run}\n"


def test_quiet_says_nothing(place, work):
    result = invoke("train", "mine.py", "--quiet")
    assert (result.exit_code, result.output) == (0, "")
    assert work.calls[0][2]["quiet"] is True


def test_resume_takes_the_runs_own_options_below_the_users(place, work):
    run = place / "runs" / "old"
    run.mkdir(parents=True)
    (run / "config.toml").write_text(Config(steps=3, lr=0.75, batch_size=2, run="renamed", runs_dir="moved").to_toml())
    assert invoke("train", "mine.py", "--run", "old", "--resume", "--steps", "5").exit_code == 0
    ((_, config, options),) = work.calls
    assert options["resume"] is True
    assert (config.steps, config.lr, config.batch_size) == (5, 0.75, 2)
    assert config.run_folder("mine") == Path("runs/old")
    work.row = {}
    assert (
        "Nothing to do: all 3 steps were done before; --steps takes the run further."
        in invoke("train", "mine.py", "--run", "old", "--resume").stdout
    )


def test_resuming_a_run_that_is_not_there_says_so(place, work):
    result = invoke("train", "mine.py", "--run", "odl", "--resume")
    assert result.exit_code == 2
    assert result.stderr == "error: There is no run runs/odl to resume: name one with --run, or leave out --resume.\n"
    assert work.calls == []


def test_interrupting_says_how_to_go_on(place, work):
    work.error = KeyboardInterrupt()
    result = invoke("train", "mine.py", "--run", "r", "--runs-dir", "out")
    assert result.exit_code == 130
    assert result.stderr == "\nStopped. Continue with: minirllm train mine.py --run r --runs-dir out --resume\n"


def test_interrupting_any_other_command_leaves_no_traceback(place, work):
    work.error = KeyboardInterrupt()
    result = invoke("eval", "mine.py")
    assert (result.exit_code, result.stderr) == (130, "\nStopped.\n")


def test_a_run_that_stopped_early_is_not_done_and_says_how_to_go_on(place, work):
    work.row = {"step": 3}
    result = invoke("train", "mine.py", "--run", "r", "--quiet")
    assert (result.exit_code, result.stdout) == (0, "")
    assert result.stderr == "Stopped after step 3 of 7. Continue with: minirllm train mine.py --run r --resume\n"
    work.error = Terminated()
    result = invoke("train", "mine.py", "--run", "r")
    assert result.exit_code == 143
    assert result.stderr == "\nStopped. Continue with: minirllm train mine.py --run r --resume\n"


def test_a_failed_engine_says_how_to_go_on(place, work):
    work.error = EngineError("the engine failed: RuntimeError: out of memory")
    failed = invoke("train", "mine.py", "--run", "r")
    assert failed.exit_code == 2
    assert failed.stderr == (
        "error: The engine failed: RuntimeError: out of memory. What was finished is kept; continue with: "
        "minirllm train mine.py --run r --resume\n"
    )
    failed = invoke("eval", "mine.py")
    assert (failed.exit_code, failed.stderr) == (2, "error: The engine failed: RuntimeError: out of memory.\n")


def test_a_user_error_is_one_line(place, work):
    work.error = UserError("This cannot be:\ndo that instead.")
    result = invoke("train", "mine.py")
    assert (result.exit_code, result.stdout, result.stderr) == (2, "", "error: This cannot be: do that instead.\n")


def test_any_other_error_is_not_hidden(place, work):
    work.error = ZeroDivisionError("ours")
    assert isinstance(invoke("train", "mine.py").exception, ZeroDivisionError)


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (("--set", "stpes=3"), "error: Unknown option 'stpes' (did you mean steps?).\n"),
        (("--set", "steps"), "error: --set takes key=value, got 'steps'.\n"),
        (("--steps", "0"), "error: steps must be at least 1 and at most 1e+30, got 0.\n"),
        (("--max-tokens", "-5"), "error: max_tokens must be at least 1 and at most 1e+30, got -5.\n"),
        (("--lr", "nan"), "error: lr must be at least 0.0 and at most 1e+30, got nan.\n"),
        (("--config", "none.toml"), "error: Cannot read config file none.toml: No such file or directory.\n"),
        (("--run", "a/b"), "error: run is a name, not a path, got 'a/b'; the folder around it is runs_dir.\n"),
    ],
)
def test_wrong_values_are_named_before_anything_starts(place, work, args, sentence):
    result = invoke("train", "mine.py", *args)
    assert (result.exit_code, result.stderr, work.calls) == (2, sentence, [])


@pytest.mark.parametrize(
    ("args", "part"),
    [
        (
            ("train", "mine.py", "--stpes", "3"),
            "No such option '--stpes'. (Did you mean one of: '--set', '--steps', '--threads'?)",
        ),
        (("train", "mine.py", "--steps", "many"), "Invalid value for '--steps': 'many' is not a valid integer."),
        (("train", "mine.py", "--determinism", "exat"), "'exat' is not one of 'auto', 'exact', 'fixed', 'off'."),
        (("trian", "mine.py"), "No such command 'trian'. Did you mean 'train'?"),
        (("train",), "Missing argument 'TASK'."),
        (("serve", "--port", "70000"), "70000 is not in the range 0<=x<=65535."),
        (("eval", "mine.py", "--n", "0"), "0 is not in the range x>=1."),
    ],
)
def test_wrong_flags_suggest_the_nearest(place, work, args, part):
    result = invoke(*args)
    assert result.exit_code == 2
    assert part in result.stderr
    assert work.calls == []


def test_a_task_that_is_not_there_or_not_whole(place, work):
    result = invoke("train", "none.py")
    assert result.exit_code == 2
    assert result.stderr.startswith("error: There is no task file ")
    (place / "half.py").write_text("x = 1\n")
    result = invoke("train", "half.py")
    assert result.exit_code == 2
    assert result.stderr.startswith("error: Task half ")
    assert result.stderr.count("\n") == 1


def test_eval_passes_its_options_on(place, work):
    work.row = "pass@1 0.500"
    result = invoke(
        "eval",
        "mine.py",
        "--n",
        "4",
        "--tasks",
        "5",
        "--split",
        "train",
        "--temperature",
        "0.5",
        "--output",
        "out",
        "--model",
        "tiny",
    )
    assert (result.exit_code, result.stdout, result.stderr) == (0, "pass@1 0.500\n", "")
    ((_, config, options),) = work.calls
    assert options == {"n": 4, "split": "train", "checkpoint": None, "output": Path("out")}
    assert (config.eval_tasks, config.eval_temperature, config.temperature, config.model, config.max_tokens) == (
        5,
        0.5,
        1.0,
        "tiny",
        9,
    )


@pytest.mark.parametrize("given", ["old", "runs/old", "runs/old/checkpoints/step_000002"])
def test_a_checkpoint_brings_the_model_it_fits_with(place, work, given):
    (place / "runs" / "old" / "checkpoints" / "step_000002").mkdir(parents=True)
    (place / "runs" / "old" / "config.toml").write_text(Config(model="tiny", lora_rank=4, steps=3, seed=5).to_toml())
    assert invoke("eval", "mine.py", "--checkpoint", given).exit_code == 0
    ((_, config, options),) = work.calls
    assert options["checkpoint"] == Path("runs/old" if given == "old" else given)
    assert (config.model, config.lora_rank, config.steps, config.seed) == ("tiny", 4, 7, 0)


def test_a_checkpoint_that_is_not_there_names_the_nearest_run(place, work):
    (place / "runs" / "older").mkdir(parents=True)
    (place / "runs" / "older" / "config.toml").write_text("")
    result = invoke("eval", "mine.py", "--checkpoint", "oldre")
    assert result.exit_code == 2
    assert result.stderr == "error: No run named 'oldre' in runs (did you mean older?): it has older.\n"


def test_serve_prints_where_the_key_and_an_example(place, work):
    work.error = KeyboardInterrupt()
    result = invoke("serve", "--model", "tiny", "--port", "1234", "--key", "secret")
    assert result.exit_code == 0
    assert "base URL: http://127.0.0.1:1234/v1\nkey: secret\nmodel: tiny\n" in result.stdout
    assert "export OPENAI_BASE_URL=http://127.0.0.1:1234/v1 OPENAI_API_KEY=secret\n" in result.stdout
    assert "export ANTHROPIC_BASE_URL=http://127.0.0.1:1234 ANTHROPIC_API_KEY=secret\n" in result.stdout
    curl = result.stdout.splitlines()[-1]
    assert curl.startswith("curl http://127.0.0.1:1234/v1/chat/completions -H 'Authorization: Bearer secret'")
    assert json.loads(curl.split("-d '")[1].rstrip("'"))["messages"][0]["role"] == "user"
    ((_, config, options),) = work.calls
    assert config.model == "tiny"
    assert options == {"address": ("127.0.0.1", 1234), "keys": ("secret", ""), "checkpoint": None}


def test_serve_makes_a_key_of_its_own(place, work):
    keys = set()
    for _ in range(2):
        assert invoke("serve").exit_code == 0
        keys.add(work.calls[-1][2]["keys"][0])
    assert len(keys) == 2
    assert all(len(key) > 30 for key in keys)


def test_help_and_show_import_nothing_heavy(place):
    code = """
import sys
from minirllm.cli import cli
cli(sys.argv[1:], standalone_mode=False)
print("torch" in sys.modules, "transformers" in sys.modules)
"""
    for command in (("train", "--help"), ("options",), ("harness", "list"), ("harness", "show", "pi")):
        assert python("-c", code, *command, cwd=place).stdout.endswith("False False\n"), command
    (place / "config.toml").write_text("")
    result = python("-c", code, "show", ".", cwd=place)
    assert result.stdout.endswith("False False\n"), result.stderr


def test_as_a_program(place):
    result = python("-m", "minirllm.cli", "train", "none.py", cwd=place)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("error: There is no task file ")
    assert "Traceback" not in result.stderr
    assert python("-m", "minirllm.cli", "--version").stdout == "minirllm, version 0.1.0\n"


def test_python_m_minirllm_train_offers_the_same(place):
    same = [python("-m", *command, "--help", cwd=place) for command in (("minirllm.train",), ("minirllm.cli", "train"))]
    assert same[0].returncode == 0, same[0].stderr
    assert same[0].stdout == same[1].stdout
