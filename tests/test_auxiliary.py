"""Side calls of a harness (titles, summaries): answered, recorded and shown like others, and never trained on."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from minirllm import AgentConfig, AgentTrainer, Episode, Step, Task, Trajectory
from minirllm.algorithms import create
from minirllm.batch import build, select
from minirllm.client import chat
from minirllm.config import Config
from minirllm.flow import rollout
from minirllm.rollouts import Job
from minirllm.store import EpisodeStore, episode_from_dict, episode_to_dict
from minirllm.tools import ledger, show
from minirllm.tools.replay import replay
from minirllm.tools.show import Wanted
from minirllm.types import ModelRequest, TerminationReason
from tests.agent_server import Place, serving

TITLE = [{"role": "system", "content": "Name the chat."}, {"role": "user", "content": "hi"}]


class Program:
    """An agent as a harness wraps it: it asks for a title first, then makes `turns` calls of its own."""

    def __init__(self, turns: int = 2, labels: bool = False):
        self.turns, self.labels = turns, labels

    def auxiliary(self, request: ModelRequest) -> str | None:
        assert request.messages is not None
        return "title" if request.messages[0].content == "Name the chat." else None

    async def run(self, task: Task, config: AgentConfig) -> Trajectory | None:
        messages = [{"role": "user", "content": str(task.instruction)}]
        for turn in range(self.turns):
            reply = await chat(config, messages)
            messages += [{"role": "assistant", "content": reply.output}, {"role": "user", "content": f"{turn}?"}]
        await chat(config, TITLE)
        steps = [Step(action=turn, metadata={"auxiliary": "", "mine": turn}) for turn in range(self.turns)]
        return Trajectory(steps=steps) if self.labels else None


async def run(place: Place, program: Program, index: int = 0) -> Episode:
    place.engine.answer = lambda prompt, seed: f"A title {index}" if "Name the chat" in prompt else f"Hello {index}"
    grade = lambda task, episode: float(index)  # noqa: E731
    return await place.runner(program, grade).run(Job(Task("t", "hi"), index))


async def test_they_are_marked_counted_and_kept_out_of_training() -> None:
    async with serving() as place:
        made = [await run(place, Program(), index) for index in range(2)]
    for episode in (made[0], episode_from_dict(episode_to_dict(made[0]))):
        steps = episode.trajectories[0].steps
        assert [(step.auxiliary, step.metadata["match"]) for step in steps] == [
            ("", "conversation"), ("", "extended"), ("title", "conversation"),
        ]  # fmt: skip
        assert episode.answer == "Hello 0", "a title is no answer"
        assert [episode.metrics[name] for name in ("calls", "turns", "auxiliary", "drift")] == [3, 2, 1, 0]
    batch = build(made, Config(norm_std=False, group_size=2), create("grpo"), 7)
    own, side = 4 * len("Hello 0."), 2 * len("A title 0.")  # a token a letter, and the end of the turn
    counts = ("trained_tokens", "discarded_tokens", "discarded/auxiliary", "auxiliary", "groups_with_signal")
    assert [batch.metrics[name] for name in counts] == [own, side, side, 2, 1]
    (forest,) = batch.forests
    assert forest.trained_T.sum() == own
    assert (forest.weight_T != 0).sum() == (forest.advantage_T != 0).sum() == own
    assert not any(call == steps[2].id for _, call in batch.members)


async def test_an_ungraded_episode_says_why_each_call_is_not_trained() -> None:
    async with serving() as place:
        episode = await run(place, Program(turns=1))
    episode.reward = None
    batch = select([episode], Config(), create("grpo"))
    assert [batch.metrics[f"discarded/{why}"] for why in ("ungraded", "auxiliary")] == [8, 10]


async def test_the_labels_of_an_agent_are_those_of_its_own_calls() -> None:
    async with serving() as place:
        episode = await run(place, Program(labels=True))
    assert episode.reason == ""
    assert [(s.action, s.metadata.get("mine"), s.auxiliary) for s in episode.trajectories[0].steps] == [
        (0, 0, ""), (1, 1, ""), (None, None, "title"),
    ]  # fmt: skip


async def test_an_agent_cannot_take_the_mark_off() -> None:
    class Sly(Program):
        async def run(self, task: Task, config: AgentConfig) -> Trajectory:
            title, own = await chat(config, TITLE), await chat(config, [{"role": "user", "content": "hi"}])
            return Trajectory(steps=[Step(id=call.id, metadata={"auxiliary": ""}) for call in (title, own)])

    async with serving() as place:
        episode = await run(place, Sly())
    assert [step.auxiliary for step in episode.trajectories[0].steps] == ["title", ""]
    assert episode.metrics["unclaimed_calls"] == 0


async def test_an_agent_that_makes_no_others_made_no_calls() -> None:
    async with serving() as place:
        episode = await run(place, Program(turns=0))
    assert (episode.reward, episode.termination_reason) == (None, TerminationReason.NO_CALLS)
    assert episode.reason == "the agent made auxiliary calls only, so there is nothing to learn from"
    assert [step.auxiliary for step in episode.trajectories[0].steps] == ["title"]


def test_a_decorated_agent_keeps_its_classifier() -> None:
    program = Program()
    assert rollout(program).auxiliary == rollout(rollout(program), name="other").auxiliary == program.auxiliary
    assert rollout(lambda task, config: None).auxiliary is None


def test_a_run_shows_them_and_is_replayed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = {"model": "tiny", "steps": 2, "batch_size": 1, "group_size": 2, "max_tokens": 8, "threads": 1}
    grade = lambda task, episode: float(episode.rollout_idx)  # noqa: E731
    trainer = AgentTrainer(Program(), grade, {**options, "runs_dir": str(tmp_path), "run": "r"}, [Task("t", "hi")])
    row = trainer.train()
    assert (row["auxiliary"], row["calls"], row["drift"]) == (2, 6, 0)
    assert f"({int(row['discarded/auxiliary'])} of auxiliary calls)" in capsys.readouterr().out

    def printed(verb: object, **what: object) -> str:
        console = Console(file=io.StringIO(), highlight=False)
        verb(tmp_path / "r", Wanted(**what), console)  # type: ignore[operator]
        return console.file.getvalue()  # type: ignore[attr-defined]

    first = EpisodeStore(tmp_path / "r" / "episodes").finished(2)["t", 0].trajectories[0].steps[0].id
    shown = printed(show.show, episode="t:0")
    assert f"call 2: extends call {first}\n" in shown
    assert "call 3: auxiliary call (title), not trained; a new conversation\nsystem: Name the chat." in shown
    assert "; auxiliary call (title), not trained; a new conversation; discarded: it is a" in printed(ledger.show)
    assert replay(tmp_path / "r", console=Console(file=io.StringIO()))
