"""Episodes survive the disk exactly, and crashes of any kind cost at most the line being written."""

from __future__ import annotations

import dataclasses
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minirllm.errors import CheckpointError
from minirllm.store import EpisodeStore, episode_from_dict, episode_to_dict
from minirllm.tree import TokenTree
from minirllm.types import (
    Completion,
    Episode,
    Message,
    SamplingParams,
    Step,
    Task,
    TerminationReason,
    ToolCall,
    Trajectory,
)


def episode(task_id: str = "a/b:c", rollout_idx: int = 0, **fields: Any) -> Episode:
    """An episode that uses every field."""
    tree = TokenTree()
    first = tree.add([1, 2, 3], Completion([4, 5], [-0.1, -1 / 3], "stop", 2, 0.7), "c0")
    tree.add([1, 2], Completion([9], [-2.5], "abort", -1), "c1")
    call = ToolCall("call_1", "f", '{"x": "\ud83d"}')  # half a surrogate pair, as models write them
    step = Step(
        id="c0",
        input={"a": [1, None]},
        output="text",
        reward=0.25,
        advantage=[0.5, -1 / 3],
        done=True,
        metadata={"k": "v"},
        messages=[Message("system", "s"), Message("user", "häß 😀\u2028")],
        parent="cx",
        response=Message("assistant", "", (call,), reasoning="r", malformed=True),
        node=first,
        prompt_length=3,
        response_length=2,
        finish_reason="tool_calls",
        weight_version=2,
        params=SamplingParams(max_tokens=8, temperature=0.7, stop=("END", "\n"), stop_token_ids=(3,), ignore_eos=True),
    )
    values: dict[str, Any] = {
        "id": f"{task_id}:{rollout_idx}",
        "task": Task(task_id, "do it", {"answer": 4}, Path("/data"), Path("x/y")),
        "trajectories": [
            Trajectory("solver", [step, Step(id="c2")], 0.1 + 0.2, "a task", 1, 2.5, {"s": 1.0}, {"m": [1]}),
            Trajectory("judge", [], None),
        ],
        "termination_reason": TerminationReason.ENV_DONE,
        "is_correct": True,
        "artifacts": {"answer": "4", "nested": {"deep": [True, 1.5]}},
        "metrics": {"turns": 2.0},
        "metadata": {"step": 3},
        "task_id": task_id,
        "rollout_idx": rollout_idx,
        "attempt": 1,
        "session_id": "train3:x:0:1",
        "reward": 1e-310,
        "reason": "why",
        "signals": {"length": -0.0},
        "tree": tree,
    }
    return Episode(**{**values, **fields})


def test_every_field_survives_the_disk(tmp_path: Path) -> None:
    store = EpisodeStore(tmp_path / "episodes")
    written, bare = episode(rollout_idx=5, retried=True), Episode()
    unused = [f.name for f in dataclasses.fields(Episode) if getattr(written, f.name) == getattr(bare, f.name)]
    assert unused == [], "the test's episode uses every field"
    store.append(1, written)
    assert EpisodeStore(tmp_path / "episodes").attempts(1) == {("a/b:c", 5): written}
    assert str(store.attempts(1)["a/b:c", 5].signals["length"]) == "-0.0"


def test_a_bare_episode_survives_the_disk() -> None:
    bare = Episode()
    assert episode_from_dict(json.loads(json.dumps(episode_to_dict(bare)))) == bare


def test_no_reward_is_not_zero() -> None:
    for reward in (None, 0.0, 1.0):
        read = episode_from_dict(json.loads(json.dumps(episode_to_dict(episode(reward=reward)))))
        assert read.reward == reward
        assert type(read.reward) is type(reward)


@given(st.floats(allow_nan=False), st.lists(st.floats(max_value=0), min_size=1, max_size=5))
@settings(max_examples=100, deadline=None)
def test_floats_survive_bit_for_bit(reward: float, logprobs: list[float]) -> None:
    tree = TokenTree()
    node = tree.add([1], Completion([2] * len(logprobs), logprobs, "stop", 1), "c")
    read = episode_from_dict(json.loads(json.dumps(episode_to_dict(episode(reward=reward, tree=tree)))))
    bits = [struct.pack("d", value) for value in (reward, *logprobs)]
    assert [struct.pack("d", value) for value in (read.reward, *read.tree.response(node)[1])] == bits


class Odd:
    def __repr__(self) -> str:
        raise RuntimeError("no repr either")


def test_any_value_of_the_users_can_be_written() -> None:
    endless: list[Any] = []
    endless.append(endless)
    artifacts = {
        "array": np.array([[1, 2]]),
        "number": np.float32(0.5),
        "long": np.longdouble(1),
        "set": {1},
        "odd": Odd(),
        "bytes": b"x",
        "tuple": (1, 2),
        "path": Path("/a"),
        "endless": endless,
        "huge": 10**5000,
        "nan": float("nan"),
        3: {None: 1},
        "message": Message("user", "hi"),
    }
    read = episode_from_dict(json.loads(json.dumps(episode_to_dict(episode(artifacts=artifacts)))))
    assert read.artifacts["array"] == [[1, 2]]
    assert read.artifacts["number"] == 0.5
    assert read.artifacts["set"] == "{1}"
    assert read.artifacts["odd"].startswith("<Odd instance at")
    assert read.artifacts["tuple"] == [1, 2]
    assert read.artifacts["path"] == "/a"
    assert read.artifacts["huge"] == hex(10**5000)
    assert read.artifacts["nan"] != read.artifacts["nan"]
    assert read.artifacts["3"] == {"None": 1}
    assert read.artifacts["message"] == {"role": "user", "content": "hi"}
    assert read.trajectories == episode().trajectories


def test_steps_are_kept_apart_and_the_last_of_two_equal_ones_counts(tmp_path: Path) -> None:
    store = EpisodeStore(tmp_path)
    assert store.finished(1) == {}
    assert store.steps() == []
    for step, idx, reward in ((1, 0, 0.0), (12, 0, 0.5), (12, 1, 0.5), (12, 0, 1.0)):
        store.append(step, episode(rollout_idx=idx, reward=reward))
    assert store.steps() == [1, 12]
    assert {key: e.reward for key, e in store.finished(12).items()} == {("a/b:c", 0): 1.0, ("a/b:c", 1): 0.5}


def test_a_failed_attempt_is_not_finished_and_says_which_is_next(tmp_path: Path) -> None:
    store = EpisodeStore(tmp_path)
    store.append(1, episode(rollout_idx=0, attempt=0, retried=True))
    store.append(1, episode(rollout_idx=1, attempt=0, retried=True))
    store.append(1, episode(rollout_idx=1, attempt=1, retried=False))
    assert {key[1]: e.attempt for key, e in store.finished(1).items()} == {1: 1}
    assert {key[1]: (e.attempt, e.retried) for key, e in store.attempts(1).items()} == {0: (0, True), 1: (1, False)}


@pytest.mark.parametrize("damage", ["cut", "newline only", "zeros", "zeros and newline", "nothing left"])
def test_a_crash_costs_at_most_the_last_line(tmp_path: Path, damage: str) -> None:
    store = EpisodeStore(tmp_path)
    for idx in range(3):
        store.append(1, episode(rollout_idx=idx))
    path = tmp_path / "step_00001.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    last = {
        "cut": lines[2][:-10],
        "newline only": lines[2][:-1],
        "zeros": b"\0" * len(lines[2]),
        "zeros and newline": b"\0" * 100 + b"\n",
        "nothing left": b"",
    }[damage]
    path.write_bytes(lines[0] + lines[1] + last)
    again = EpisodeStore(tmp_path)
    before = path.read_bytes()
    assert [key[1] for key in again.finished(1)] == [0, 1]
    assert path.read_bytes() == before, "reading changes nothing"
    again.append(1, episode(rollout_idx=7))
    assert path.read_bytes().startswith(lines[0] + lines[1] + b"{")
    assert [key[1] for key in again.finished(1)] == [0, 1, 7]


def test_damage_in_the_middle_is_named(tmp_path: Path) -> None:
    store = EpisodeStore(tmp_path)
    for idx in range(3):
        store.append(1, episode(rollout_idx=idx))
    path = tmp_path / "step_00001.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + lines[1][:50] + b"\n" + lines[2])
    with pytest.raises(CheckpointError, match=r"Line 2 of .*step_00001.jsonl is damaged"):
        store.finished(1)


def test_a_line_of_another_format_is_not_guessed_at(tmp_path: Path) -> None:
    data = {**episode_to_dict(episode()), "format": 2}
    with pytest.raises(ValueError, match="format 2"):
        episode_from_dict(data)


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="Cannot write"):
        EpisodeStore(tmp_path / "file" / "episodes").append(1, episode())


def test_a_full_disk_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    resource = pytest.importorskip("resource")
    signal = pytest.importorskip("signal")
    store = EpisodeStore(tmp_path)
    store.append(1, episode())
    path = tmp_path / "step_00001.jsonl"
    before = path.read_bytes()
    limits, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 100, limits[1]))  # the next line fits in part only
        with pytest.raises(CheckpointError, match="Cannot write"):
            store.append(1, episode(rollout_idx=1))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert path.read_bytes() == before
    store.append(1, episode(rollout_idx=1))
    assert len(store.finished(1)) == 2


def test_a_step_is_dropped(tmp_path: Path) -> None:
    store = EpisodeStore(tmp_path / "e")
    store.drop(3)  # nothing there yet
    for step in (1, 2, 3, 12):
        store.append(step, Episode(task_id="a"))
    store.drop(3)
    assert store.steps() == [1, 2, 12]
    store.append(3, Episode(task_id="b"))
    assert list(store.finished(3)) == [("b", 0)]
