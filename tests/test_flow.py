"""flow.py: decorators, finding and checking task files."""

from pathlib import Path
from typing import Any

import pytest

from minirllm import flow
from minirllm.config import Config
from minirllm.errors import ConfigError, TaskError
from minirllm.flow import AgentFlow, Evaluator, evaluator, load_task, rollout
from minirllm.types import AgentConfig, Episode, Task

CONFIG = AgentConfig("http://localhost/v1", "m")

WHOLE = """
from dataclasses import dataclass
from minirllm import Task, rollout, evaluator
DEFAULTS = {"steps": 3}
DATA_REVISION = "abc"

@dataclass
class Row:
    x: "int"

@rollout
async def solve(task, config):
    return "hi"

@evaluator
def score(task, episode):
    return 1.0

def train(config):
    return [Task(id="org/a:1"), Task(id="b")]

def held_out(config):
    return [Task(id="c")]
"""


def write(folder: Path, text: str, name: str = "mine.py") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_rollout_with_and_without_arguments_stays_callable() -> None:
    @rollout
    def plain(task: Task, config: AgentConfig) -> str:
        """What it does."""
        return task.id + config.model

    @rollout(name="solver", register="ignored")
    async def named(task: Task, config: AgentConfig) -> None: ...

    assert isinstance(plain, AgentFlow)
    assert (plain.name, plain.is_async, plain.__doc__) == ("plain", False, "What it does.")
    assert plain(Task("t"), CONFIG) == "tm"
    assert isinstance(named, AgentFlow)
    assert (named.name, named.is_async) == ("solver", True)
    assert rollout(plain) is plain


def test_objects_with_run_arun_and_evaluate() -> None:
    class Sync:
        def run(self, task: Task, config: AgentConfig) -> str:
            return "sync"

    class Both(Sync):
        async def arun(self, task: Task, config: AgentConfig) -> str:
            return "async"

    class Grader:
        def evaluate(self, task: Task, episode: Episode) -> float:
            return 0.5

    assert rollout(Sync())(Task("t"), CONFIG) == "sync"
    assert rollout(Both()).is_async
    assert rollout(Both()).name == "Both"
    assert evaluator(Grader())(Task("t"), Episode()) == 0.5
    with pytest.raises(TaskError, match="an instance and not the class"):
        rollout(Both)
    with pytest.raises(TaskError, match="a function or an object with evaluate"):
        evaluator(3)  # type: ignore[call-overload]


def test_first_parameter_gets_the_dict_only_when_it_says_so() -> None:
    def by_type(t: dict, episode: Episode) -> Any:  # type: ignore[type-arg]
        return t

    def by_text(t: "dict[str, Any]", episode: Episode) -> Any:
        return t

    def by_name(task_info, episode):  # type: ignore[no-untyped-def]
        return task_info

    def plain(metadata, episode):  # type: ignore[no-untyped-def]
        return metadata

    task = Task("t", metadata={"answer": 3})
    assert [evaluator(f)(task, Episode()) for f in (by_type, by_text, by_name, plain)] == [{"answer": 3}] * 3 + [task]


def test_a_whole_task_file(tmp_path: Path) -> None:
    task = load_task(str(write(tmp_path, WHOLE)))
    assert (task.name, task.path, task.defaults, task.data_revision) == (
        "mine",
        tmp_path / "mine.py",
        {"steps": 3},
        "abc",
    )
    assert [t.id for t in task.train(Config())] == ["org/a:1", "b"]
    assert [t.id for t in task.held_out(Config())] == ["c"]
    assert (task.flow.name, task.evaluator.name) == ("solve", "score")


def test_a_task_by_module_and_by_attribute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(
        tmp_path,
        WHOLE
        + "\nclass Space:\n    solve, score = solve, score\n"
        + "    train, held_out = staticmethod(train), staticmethod(held_out)\n",
        "flow_mod_x.py",
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert [t.id for t in load_task("flow_mod_x:Space").train(Config())] == ["org/a:1", "b"]
    with pytest.raises(TaskError, match=r"Module flow_mod_x has no 'Spice' \(did you mean Space\?\)"):
        load_task("flow_mod_x:Spice")
    with pytest.raises(TaskError, match="No module named 'flow_mod_y'"):
        load_task("flow_mod_y:x")


def test_a_task_file_may_use_its_neighbours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.path", list(__import__("sys").path))
    write(tmp_path, "N = 5\n", "flow_neighbour_x.py")
    path = write(tmp_path, "import flow_neighbour_x\n" + WHOLE + "\nDEFAULTS = {'steps': flow_neighbour_x.N}\n")
    assert load_task(path).defaults == {"steps": 5}


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("@rollout", "", "has no function decorated with @rollout"),
        ("@evaluator", "", "has no function decorated with @evaluator"),
        ("def train(", "def tr(", r"does not define train\(config\)"),
        ("def held_out(", "def ho(", r"does not define held_out\(config\)"),
        ('{"steps": 3}', '{"stepz": 3}', r"unknown option 'stepz' \(did you mean steps\?\)"),
        ('{"steps": 3}', "[1]", "DEFAULTS must be a dict"),
        ('{"steps": 3}', "1 / 0", r"ZeroDivisionError: division by zero \(mine.py line 4\)"),
        ("@dataclass", "def (", r"SyntaxError: .* \(mine.py line 7\)"),
        ("from dataclasses", "from dataclazzes", "No module named 'dataclazzes'"),
        ('{"steps": 3}', "__import__('sys').exit(3)", r"SystemExit: 3 \(mine.py line 4\)"),
        (
            "@evaluator",
            "@rollout\nasync def other(task, config): ...\n@evaluator",
            r"several functions decorated with @rollout \(solve, other\)",
        ),
    ],
)
def test_what_is_missing_is_named(tmp_path: Path, old: str, new: str, sentence: str) -> None:
    path = write(tmp_path, WHOLE.replace(old, new, 1))
    with pytest.raises(TaskError, match=sentence) as caught:
        load_task(path).agent()
    assert "mine" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ("(config): raise RuntimeError('data broke')", r"RuntimeError: data broke \(mine.py line \d+\)"),
        ("(config): yield Task('a'); [][1]", r"IndexError: list index out of range \(mine.py line \d+\)"),
        ("(): return [Task('a')]", r"takes 0 positional arguments but 1 was given"),
        ("(config): __import__('sys').exit('no data')", r"SystemExit: no data \(mine.py line \d+\)"),
    ],
)
@pytest.mark.parametrize("which", ["train", "held_out"])
def test_a_dataset_that_fails_is_the_tasks_error(tmp_path: Path, which: str, body: str, sentence: str) -> None:
    task = load_task(write(tmp_path, f"{WHOLE}\ndef {which}{body}\n"))
    with pytest.raises(TaskError, match=rf"{which}\(config\) of task mine: .*{sentence}"):
        getattr(task, which)(Config())


def test_an_error_for_the_user_passes_through_a_dataset(tmp_path: Path) -> None:
    text = "\nfrom minirllm.errors import ConfigError\ndef train(config): raise ConfigError('Say --data.')\n"
    with pytest.raises(ConfigError, match=r"^Say --data\.$"):
        load_task(write(tmp_path, WHOLE + text)).train(Config())


def test_unknown_names_are_answered_with_known_ones(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"no task 'first_leter' \(did you mean first_letter\?\)"):
        load_task("first_leter")
    with pytest.raises(TaskError, match=r"There is no task file .*gone.py"):
        load_task(tmp_path / "gone.py")
    with pytest.raises(TaskError, match=r"must end in \.py"):
        load_task(write(tmp_path, "x = 1", "task.txt"))


@pytest.mark.parametrize(
    ("tasks", "sentence"),
    [
        ([], "gave no tasks"),
        ([Task("a\ud800")], r"item 0 has the id 'a\\ud800'; an id is"),
        ([Task("a"), Task("b"), Task("a")], "items 0 and 2 have the same id 'a'"),
        ([Task("a"), {"id": "b"}], "item 1 is dict"),
        ([Task("")], "item 0 has the id ''"),
        ([Task(7)], "item 0 has the id 7"),  # type: ignore[arg-type]
        (None, "got NoneType"),
        ("ab", "got str"),
    ],
)
def test_datasets_are_checked(tasks: Any, sentence: str) -> None:
    with pytest.raises(TaskError, match=sentence):
        flow.check_tasks(tasks, "train(config)")


def test_a_task_of_parts() -> None:
    def agent(task: Task, config: AgentConfig) -> None: ...
    def grade(task: Task, episode: Episode) -> float:
        return 1.0

    task = flow.task_of(agent, grade, (Task(str(i)) for i in range(2)))
    assert [t.id for t in task.train(Config())] == [t.id for t in task.train(Config())] == ["0", "1"]
    assert task.held_out(Config()) == []
    assert isinstance(task.evaluator, Evaluator)
    by_config = flow.task_of(agent, grade, lambda config: [Task(config.model)], [Task("h")])
    assert [t.id for t in by_config.train(Config(model="m"))] == ["m"]
    assert [t.id for t in by_config.held_out(Config())] == ["h"]
    with pytest.raises(TaskError, match="gave no tasks"):
        flow.task_of(agent, grade, []).train(Config())
    with pytest.raises(TaskError, match="got int"):
        flow.task_of(agent, grade, 3).train(Config())
