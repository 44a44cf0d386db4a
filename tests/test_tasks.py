"""tasks/: every task is whole, its reference scores 1, garbage scores 0; agents are run over a scripted endpoint."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from minirllm.config import FIELDS, Config, load
from minirllm.errors import TaskError
from minirllm.evaluate import evaluate
from minirllm.flow import TaskModule, import_path, load_task, names
from minirllm.returns import verdict
from minirllm.types import Episode, Task
from tests.agent_server import running

NAMES = ["addition", "countdown", "first_letter", "gsm8k", "guess_number", "make_file", "python_function"]
NAMES += ["self_play", "self_verification", "smoke", "solver_judge", "uppercase"]
GARBAGE = ["", "?", "NO ANSWER!", "\ufffd\x00", "ZZZ 999999999", "É" * 5000]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("data") / "rows.jsonl"
    made = [
        {"question": f"What is {i} + 1000?", "answer": f"{i} + 1000 = {i + 1000:,}\n#### {i + 1000:,}"}
        for i in range(20)
    ]
    path.write_text("\n".join(map(json.dumps, made)) + "\n")
    return str(path)


@pytest.fixture(params=NAMES)
def task(request: pytest.FixtureRequest) -> TaskModule:
    return load_task(request.param)


def graded(task: TaskModule, problem: Task, answer: str) -> float:
    name = problem.metadata.get("name", "out.txt")  # of the file, where the task is to write one
    made = task.evaluator(problem, Episode(artifacts={"answer": answer, "files": {name: answer}}))
    reward = verdict(asyncio.run(made) if task.evaluator.is_async else made).reward
    assert reward is not None
    return reward


def reference(task: TaskModule) -> Callable[[Task], str]:
    assert task.path is not None
    return import_path(task.path).reference  # type: ignore[no-any-return]


def test_every_task_is_known_by_name_and_by_path() -> None:
    assert set(NAMES) <= set(names("tasks"))
    assert load_task("tasks/addition.py").path == Path("tasks/addition.py").resolve()


def test_references_score_1_and_garbage_0(task: TaskModule, rows: str) -> None:
    config, answer = Config(data=rows), reference(task)
    problems = task.train(config)[:100] + task.held_out(config)[:100]
    assert [problem.id for problem in problems if graded(task, problem, answer(problem)) != 1.0] == []
    assert [(p.id, text) for p in problems[:20] for text in GARBAGE if graded(task, p, text) >= 0.05] == []


def test_train_and_held_out_share_nothing(task: TaskModule, rows: str) -> None:
    config = Config(data=rows)
    train, held_out = task.train(config), task.held_out(config)
    assert {t.id for t in train}.isdisjoint(t.id for t in held_out)
    assert {t.instruction for t in train}.isdisjoint(t.instruction for t in held_out)
    assert [t.id for t in task.train(config)] == [t.id for t in train]


def test_defaults_make_a_config(task: TaskModule) -> None:
    config = load(defaults=task.defaults)
    assert set(task.defaults) <= set(FIELDS)
    assert config.group_size > 1


REWARDS = {
    "first_letter": ({"word": "plum"}, {"p": 1, " P.\n": 1, "pl": 0, "p is": 0, "u": 0}),
    "uppercase": ({"word": "plum"}, {"PLUM": 1, " PLUM.": 1, "Plum": 0, "PLUMS": 0, "PLUM PLUM": 0}),
    "addition": ({"a": 9, "b": 5}, {"14": 1, "14.": 1, "9 + 5 = 14": 0, "4": 0, "145": 0}),
    "gsm8k": ({"answer": "1200"}, {"#### 1,200": 1, "so $1,200.00": 1, "#### 12\n1200": 0, "1200 or 5": 0}),
    "countdown": ({"numbers": [3, 5, 2], "target": 16}, {"(3+5)*2": 1, "3+5+2": 0.1, "16": 0, "8*2": 0}),
    "guess_number": (
        {"low": 21, "number": 26},
        {"24 26": 1, "21 22 23 26": 0.9, "24 20 26": 0.5 * 2 / 3 + 0.5, "? ? ?": 0, "24 24 24": 0.5 / 3},
    ),
    "make_file": (
        {"name": "a.txt", "text": "one two"},
        {"one two": 1, "one two\n": 1, "one  two": 0.5, " one two": 0.5, "one": 0.04, "?": 0, "": 0},
    ),
    "python_function": (
        {"function": "f", "calls": [[[1], 2], [[2], 3]]},
        {"def f(x): return x + 1": 1, "f = lambda x: 2": 0.25, "def f(x): return x": 0, "print(2)": 0},
    ),
    "self_play": ({"heap": 5}, {"1 1 1 1 1": 1, "3 2": 1, "3 1": 0, "3 3": 0, "2 0": 0, "0": 0, "-5": 0}),
    "self_verification": ({"word": "plum"}, {"p": 1, " P.\n": 1, "pl": 0, "1": 0}),
    "solver_judge": ({"numbers": [3, 5, 2], "target": 16}, {"(3+5)*2": 1, "3+5+2": 0.1, "16": 0, "2": 0}),
    "smoke": ({}, {"abcd": 1, "ab1!": 0.5, "ab": 0.5, "ABCD": 0, "abcde": 0}),
}


def test_rewards(task: TaskModule) -> None:
    metadata, rewards = REWARDS[task.name]
    assert {text: graded(task, Task("x", metadata=metadata), text) for text in rewards} == pytest.approx(rewards)


CALLS = {"guess_number": 4, "solver_judge": 3, "self_verification": 4}  # 1 of the others


async def test_every_agent_talks_to_the_endpoint(task: TaskModule, rows: str) -> None:
    problems = await asyncio.to_thread(task.held_out, Config(data=rows))
    async with running(task, lambda prompt, seed: "42", rows) as runner:
        result = await evaluate(runner, problems[:2])
    assert (result.graded, result.errors, result.ungraded) == (2, {}, {})
    assert {episode.metrics["turns"] for episode in result.episodes} == {CALLS.get(task.name, 1)}
    extended = {episode.metrics["extended"] for episode in result.episodes}
    assert extended == ({3.0} if task.name == "guess_number" else {0.0})
    assert not any(episode.metrics.get("unclaimed_calls") for episode in result.episodes)


def test_guess_number_hints() -> None:
    module = import_path(Path("tasks/guess_number.py"))
    game = module.Game(21, 26)
    assert [game.hint(None), game.hint(24), game.hint(90), game.hint(25)] == [
        "Say a number from 21 to 27.", "Higher: from 25 to 27.", "Lower: from 25 to 27.", "Higher: from 26 to 27.",
    ]  # fmt: skip
    assert [game.allows(guess) for guess in (25, 26, 27, 28, None)] == [False, True, True, False, False]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "gave no tasks"),
        ("{", "line 1 is not JSON"),
        ('{"question": "q"}', "row 0 needs the texts 'question' and 'answer'"),
        ("[1]", "row 0 needs"),
        ('{"question": "q", "answer": "#### none"}', "row 0 has no number"),
    ],
)
def test_bad_rows_are_named(tmp_path: Path, text: str, sentence: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(text)
    with pytest.raises(TaskError, match=sentence):
        load_task("gsm8k").train(Config(data=str(path)))
    with pytest.raises(TaskError, match="Cannot read --data"):
        load_task("gsm8k").train(Config(data=str(tmp_path / "gone")))


def test_gsm8k_from_a_local_copy_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TaskError, match=r"Cannot load openai/gsm8k .* --data rows.jsonl"):
        import_path(Path(__file__).parent.parent / "tasks/gsm8k.py").train(Config())
