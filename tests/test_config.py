"""config.py: bounds, types, precedence, round trip, and messages that name the thing."""

import dataclasses
import importlib.util
import re
import tomllib
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minirllm import config as c
from minirllm.engines import ENGINES
from minirllm.errors import ConfigError
from minirllm.trackers import TRACKERS
from minirllm.types import MOST


def test_defaults_are_within_their_own_bounds_and_documented():
    values = c.Config().to_dict()
    assert values["model"] == "smollm2-135m"
    assert set(values) == set(c.FIELDS)
    for name, f in c.FIELDS.items():
        assert f.metadata["doc"].strip(), name
        assert "\n" not in f.metadata["doc"], name
        if isinstance(values[name], int | float) and not isinstance(values[name], bool):
            assert f.metadata["low"] is not None, f"{name} has no lower bound"


def test_config_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        c.Config().steps = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"stpes": 3}, "Unknown option 'stpes' (did you mean steps?)."),
        ({"zzzzqq": 3}, "Unknown option 'zzzzqq'."),
        ({"steps": 0}, "steps must be at least 1 and at most 1e+30, got 0."),
        ({"steps": 2.5}, "steps must be of type int, got 2.5."),
        ({"steps": True}, "steps must be of type int, got True."),
        ({"steps": float("inf")}, "steps must be of type int, got inf."),
        ({"steps": "many"}, "steps must be of type int, got 'many'."),
        ({"steps": None}, "steps must be of type int, got None."),
        ({"max_tokens": -1}, "max_tokens must be at least 1 and at most 1e+30, got -1."),
        ({"lr": float("nan")}, "lr must be at least 0.0 and at most 1e+30, got nan."),
        ({"lr": "inf"}, "lr must be at least 0.0 and at most 1e+30, got inf."),
        ({"lr": 1e31}, "lr must be at least 0.0 and at most 1e+30, got 1e+31."),
        ({"temperature": 2.5}, "temperature must be at least 0.0 and at most 2.0, got 2.5."),
        ({"lr": True}, "lr must be of type float, got True."),
        ({"clip_low": 1.5}, "clip_low must be at least 0.0 and at most 1.0, got 1.5."),
        ({"seed": 2**64}, "seed must be at least 0 and at most 9223372036854775807, got 18446744073709551616."),
        ({"steps": 10**400}, "steps must be at least 1 and at most 1e+30"),
        ({"norm_std": 1}, "norm_std must be of type bool, got 1."),
        ({"norm_std": "maybe"}, "norm_std must be of type bool, got 'maybe'."),
        ({"history": "kep"}, "history must be one of keep, rerender, got 'kep' (did you mean keep?)."),
        ({"history": ["keep"]}, "history must be one of keep, rerender, got ['keep'] (did you mean keep?)."),
        ({"data": 3}, "data must be of type str, got 3."),
        ({"data": "\udcff"}, "data must be of type str, got '\\udcff'."),
    ],
)
def test_a_wrong_value_is_one_sentence_that_names_it(values, message):
    with pytest.raises(ConfigError) as caught:
        c.from_mapping(values)
    assert str(caught.value).startswith(message)


def test_text_becomes_the_type_of_the_field():
    got = c.from_mapping(
        {"steps": "7", "lr": "1e-3", "norm_std": "no", "gradient_checkpointing": "TRUE", "slots": 4.0, "lora_alpha": 8}
    )
    assert (got.steps, got.lr, got.norm_std, got.gradient_checkpointing) == (7, 1e-3, False, True)
    assert (got.slots, type(got.slots)) == (4, int)
    assert (got.lora_alpha, type(got.lora_alpha)) == (8.0, float)


def test_later_sources_win(tmp_path):
    file = tmp_path / "c.toml"
    file.write_text("steps = 3\nlr = 3.0\nseed = 3\n")
    got = c.load(
        file,
        ("lr=4", "seed=4"),
        {"seed": 5, "group_size": None},
        {"steps": 2, "lr": 2.0, "seed": 2, "batch_size": 2, "group_size": 2},
    )
    assert (got.batch_size, got.group_size, got.steps, got.lr, got.seed) == (2, 2, 3, 4.0, 5)
    assert got.save_every == c.Config().save_every


def test_set_takes_values_with_equals_signs_and_spaces_around():
    assert c.load(settings=("data = a=b.jsonl ",)).data == "a=b.jsonl"
    with pytest.raises(ConfigError, match="--set takes key=value, got 'steps'"):
        c.load(settings=("steps",))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"steps = \n", "is not valid TOML"),
        (b"data = '\xff'\n", "is not valid TOML"),
        (b"lr = 1e-3\nstpes = 3\n", r"Unknown option 'stpes' \(did you mean steps\?\)"),
        (b"[train]\nsteps = 3\n", "Unknown option 'train'"),
        (b"steps = [3]\n", "steps must be of type int"),
    ],
)
def test_a_broken_file_is_named(tmp_path, content, message):
    file = tmp_path / "c.toml"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=f"^Config file {re.escape(str(file))}.* {message}"):
        c.load(file)


def test_a_missing_file_and_a_folder_are_named(tmp_path):
    with pytest.raises(ConfigError, match=r"Cannot read config file .*no.toml: No such file"):
        c.load(tmp_path / "no.toml")
    with pytest.raises(ConfigError, match=r"Cannot read config file .*: Is a directory"):
        c.load(tmp_path)


def test_toml_round_trip_of_the_defaults(tmp_path):
    file = tmp_path / "c.toml"
    file.write_text(c.Config().to_toml())
    assert c.load(file) == c.Config()
    assert "# tasks (or rows, of fine-tuning) per step\nbatch_size = 8\n" in file.read_text()


@given(
    text=st.text(st.characters(codec="utf-8")),
    lr=st.floats(0, MOST),
    seed=st.integers(0, 2**63 - 1),
    norm_std=st.booleans(),
)
def test_toml_round_trip(text, lr, seed, norm_std):
    config = c.Config(data=text, lr=lr, seed=seed, norm_std=norm_std)
    assert c.from_mapping(tomllib.loads(config.to_toml())) == config


def test_run_folder_is_named_after_task_model_and_seed():
    assert c.Config(seed=3).run_folder("first_letter") == Path("runs/first_letter-smollm2-135m-3")
    assert c.Config(model="Qwen/Qwen3-0.6B@abc").run_folder("a b/c") == Path("runs/a-b-c-Qwen3-0.6B-0")
    assert c.Config(model="/models/mine/").run_folder("t") == Path("runs/t-mine-0")
    assert c.Config(run="mine", runs_dir="out").run_folder("t") == Path("out/mine")
    assert c.Config(algorithm="distill").run_folder("t") == Path("runs/t-distill-smollm2-135m-0")


@pytest.mark.parametrize("name", ["..", ".", "a/b", "../a", "/a", "a/"])
def test_run_must_be_a_name(name):
    with pytest.raises(ConfigError, match="run is a name, not a path"):
        c.Config(run=name).run_folder("t")


def test_a_family_member_is_found_by_name_or_address():
    table = {"whole": "fractions:Fraction"}
    assert c.find("number", "whole", table) is c.find("number", "fractions:Fraction", table) is Fraction
    for name, sentence in {
        "whol": "There is no number 'whol' (did you mean whole?): use whole, or module:attr.",
        "no_such_module:x": "The number 'no_such_module:x' cannot be imported: No module named 'no_such_module'.",
        "tests.fixtures.broken:x": "cannot be imported: ZeroDivisionError: division by zero (broken.py line 3)",
        "fractions:Fractoin": "The number 'fractions:Fractoin' cannot be imported: ",
        ":x": "There is no number ':x': use whole, or module:attr.",
        ".mine:x": "There is no number '.mine:x': use whole, or module:attr.",
    }.items():
        with pytest.raises(ConfigError, match=re.escape(sentence)):
            c.find("number", name, table)


@pytest.mark.parametrize(("kind", "table"), [("engine", ENGINES), ("tracker", TRACKERS)])
def test_the_tables_of_families_name_what_exists(kind, table):
    for name, address in table.items():
        if kind == "engine" or importlib.util.find_spec(name) is not None:
            assert c.find(kind, name, table).__name__ == address.partition(":")[2]


def test_options_of_an_adapter_are_refused_where_all_weights_are_trained():
    for option in ({"lora_alpha": 8.0}, {"lora_targets": "q_proj"}):
        (name,) = option
        with pytest.raises(ConfigError, match=f"{name} has no effect with lora_rank = 0: leave it at"):
            c.Config(lora_rank=0, **option).trainable()
        c.Config(**option).trainable()
