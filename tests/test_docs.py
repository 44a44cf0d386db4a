"""The documents are true: commands and options exist, the tree shows the files, the example is a task."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import sys
from pathlib import Path

import click
import pytest

from benchmarks import methods
from minirllm import algorithms, flow, train
from minirllm.cli import cli
from minirllm.commands.options import chosen
from minirllm.config import Config, load
from tests.test_architecture import ROWS

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text()


def blocks(text: str, language: str) -> list[str]:
    """The fenced code blocks of a language; "" for those without one."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def commands() -> list[list[str]]:
    lines = [line for block in blocks(README, "bash") for line in block.splitlines()]
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def check_minirllm(words: list[str]) -> None:
    """Every named command and option exists, and option values and arguments parse."""
    command = cli.commands[words[0]]
    command.make_context(words[0], list(words[1:]), parent=click.Context(cli))


def test_readme_commands_exist() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for words in commands():
        match words:
            case ["make", target]:
                assert target in targets
            case ["minirllm" | ".venv/bin/minirllm", *rest]:
                check_minirllm(rest)
            case ["python", "-m", module, *rest]:
                assert importlib.util.find_spec(module) is not None
                check_minirllm([module.rpartition(".")[2], *rest])
            case _:
                pytest.fail(f"README shows {' '.join(words)}, which this test does not know")


def written(words: list[str]) -> Path | None:
    """The run folder that a command begins; None for one that begins none."""
    command = cli.commands.get(words[0])
    if words[0] not in ("train", "distill", "sft") or command is None or "--resume" in words:
        return None
    given = command.make_context(words[0], list(words[1:]), parent=click.Context(cli)).params
    if words[0] == "distill":
        given["algorithm"] = "distill"
    name = str(given.get("task") or given.pop("data"))
    defaults = flow.load_task(name).defaults if (ROOT / "tasks" / f"{name}.py").exists() else {}
    return chosen(given, defaults).run_folder(Path(name).stem)


@pytest.mark.parametrize("page", ["README.md", "docs/distillation.md", "docs/frameworks.md", "docs/multi_agent.md"])
def test_commands_of_a_page_can_be_given_one_after_the_other(page: str) -> None:
    """No two of them begin the same run: the second would be refused."""
    text = "\n".join(blocks((ROOT / page).read_text(), "bash")).replace("python -m minirllm.train", "minirllm train")
    ours = re.findall(r"^(?:\.venv/bin/)?minirllm (.*)$", text, re.MULTILINE)
    folders = [folder for line in ours if (folder := written(shlex.split(line, comments=True))) is not None]
    assert len(folders) > 2
    assert sorted(folders) == sorted(set(folders))


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.md")), ids=lambda page: page.name)
def test_commands_and_links_of_every_page_lead_somewhere(page: Path) -> None:
    text = page.read_text()
    for line in re.findall(r"^minirllm (.*)$", text, re.MULTILINE):
        if line.count("|") == 0:  # else it is the name of several
            check_minirllm(shlex.split(line, comments=True))
    for link in re.findall(r"\]\((?!https:)([^)]+)\)", text):
        path, _, part = link.partition("#")
        there = page.parent / path if path else page
        assert there.exists(), link
        headings = re.findall(r"^#+ (.*)$", there.read_text(), re.MULTILINE) if part else []
        assert part in ["", *(re.sub(r"[^\w -]", "", one.lower()).replace(" ", "-") for one in headings)], link


def test_a_wrong_option_would_be_noticed() -> None:
    with pytest.raises(click.NoSuchOption):
        check_minirllm(["train", "first_letter", "--stepz", "3"])
    with pytest.raises(KeyError):
        check_minirllm(["trane"])


def test_frameworks_page_shows_what_is_run() -> None:
    """Every code block is a part of the file linked before it; every agent has one."""
    page = (ROOT / "docs" / "frameworks.md").read_text()
    shown = re.findall(r"\]\(examples/([\w.]+)\).*?^```\w+\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert [name for name, block in shown if block not in (ROOT / "docs" / "examples" / name).read_text()] == []
    agents = {path.name for path in (ROOT / "docs" / "examples").iterdir() if "agent" in path.name}
    assert len(shown) == len(agents) > 9
    assert {name for name, _ in shown} == agents
    lines = [line.split("#")[0] for block in blocks(page, "bash") for line in block.splitlines()]
    commands = [shlex.split(line) for line in lines if line.startswith("minirllm ")]
    assert len(commands) == 3
    for _, *words in commands:
        check_minirllm(words)
        assert (ROOT / words[1]).is_file()


def test_table_of_methods_shows_what_was_measured() -> None:
    measured = json.loads((ROOT / methods.OUT).read_text())
    assert methods.shown((ROOT / methods.PAGE).read_text()) == methods.table(measured)
    runs = [(name, run) for name, entry in measured["methods"].items() for run in entry["runs"]]
    ends = {(name, run["seed"]): methods.before_and_after(run) for name, run in runs}
    assert [where for where, (before, _, low, _) in ends.items() if low <= before] == []  # each rises
    for name, settings in methods.OPTIONS.items():
        chosen = load(settings=(f"algorithm={name}", *settings))
        algorithms.create(chosen.algorithm).validate(chosen)


def test_commands_of_the_page_on_several_roles_exist() -> None:
    page = (ROOT / "docs" / "multi_agent.md").read_text()
    lines = [line for block in blocks(page, "bash") for line in block.splitlines()]
    for _, *words in map(shlex.split, lines):
        check_minirllm(words)
        assert f"](../tasks/{words[1]}.py)" in page
        assert (ROOT / "tasks" / f"{words[1]}.py").is_file()


def test_readme_tree_shows_the_files_that_are_there() -> None:
    (tree,) = [block for block in blocks(README, "") if block.startswith("minirllm/\n")]
    shown = {(line.startswith("  "), line.split()[0]) for line in tree.splitlines()}
    inside = {path.name for path in (ROOT / "minirllm").glob("*.py")}
    inside |= {f"{path.name}/" for path in (ROOT / "minirllm").iterdir() if path.is_dir() and any(path.glob("*.py"))}
    assert {name for indented, name in shown if indented} == inside
    assert [name for indented, name in shown if not indented and not (ROOT / name).exists()] == []
    tops = {f"{path.name}/" for path in ROOT.iterdir() if path.is_dir() and any(path.rglob("*.py"))}
    ours = {name for name in tops if not name.startswith(".") and name not in ("build/", "dist/", "runs/")}
    assert ours - {name for indented, name in shown if not indented} == set()


def test_readme_names_files_and_tasks_that_exist() -> None:
    reading = re.search(r"^Read in this order: (.*?), then", README, re.MULTILINE | re.DOTALL)
    assert reading is not None
    for name in re.findall(r"`([^`]+)`", reading[1]):
        assert (ROOT / name).exists() or (ROOT / "minirllm" / name).exists(), name
    named = re.search(r"Tasks are named \((.*?)\)", README, re.DOTALL)
    assert named is not None
    assert sorted(re.findall(r"`(\w+)`", named[1])) == sorted(p.stem for p in (ROOT / "tasks").glob("[!_]*.py"))


def test_readme_example_is_a_whole_task(tmp_path: Path) -> None:
    example = next(block for block in blocks(README, "python") if "@rollout" in block)
    (tmp_path / "capital.py").write_text(example)
    task = flow.load_task(str(tmp_path / "capital.py"))
    assert (task.name, len(task.train(Config())), len(task.held_out(Config()))) == ("capital", 4, 1)
    options = {"model": "tiny", "steps": 1, "batch_size": 2, "group_size": 2, "max_tokens": 4, "eval_tasks": 1}
    row = train.run(task, Config(**options, runs_dir=str(tmp_path)), quiet=True)
    assert (row["step"], row["episodes"], row["ungraded"], row["eval_without_reward"]) == (1, 4, 0, 0)


def test_readme_trainer_takes_what_the_example_defines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    example, second = (block for block in blocks(README, "python"))
    (tmp_path / "capital.py").write_text(example)
    monkeypatch.syspath_prepend(str(tmp_path))
    exec(second.replace(".train()", ""), {})
    del sys.modules["capital"]


def test_architecture_shows_the_import_rows() -> None:
    rows = re.findall(r"^\| \d+ \| (.*) \|$", ARCHITECTURE, re.MULTILINE)
    assert rows == [" ".join(row.split()) for row in ROWS]


def test_architecture_explains_every_dependency() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    wanted = set(re.findall(r'^    "([\w-]+)>=', project, re.MULTILINE))
    table = ARCHITECTURE.split("## Dependencies")[1]
    explained = {name for line in re.findall(r"^\| ([\w, -]+) \| ", table, re.MULTILINE) for name in line.split(", ")}
    assert explained - {"package"} == wanted
    assert len(wanted) > 10
