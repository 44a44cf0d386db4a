"""What ``--help`` and ``minirllm options`` tell a reader who knows nothing else."""

from __future__ import annotations

from collections.abc import Iterator

import click
import pytest
from click.testing import CliRunner

from minirllm.algorithms import ALGORITHMS
from minirllm.algorithms.credit import CREDITS
from minirllm.cli import cli
from minirllm.config import FIELDS
from minirllm.engines import ENGINES
from minirllm.sandboxes import SANDBOXES
from minirllm.trackers import TRACKERS


def said(*arguments: str) -> str:
    result = CliRunner().invoke(cli, arguments, prog_name="minirllm", terminal_width=80)
    assert result.exit_code == 0, result.output
    return result.output


def groups() -> Iterator[tuple[tuple[str, ...], click.Group]]:
    """The command line, and each command that has commands of its own."""
    yield (), cli
    for name, command in cli.commands.items():
        if isinstance(command, click.Group):
            yield (name,), command


@pytest.mark.parametrize(("path", "group"), [*groups()])
def test_a_list_of_commands_says_each_in_one_whole_line(path: tuple[str, ...], group: click.Group) -> None:
    listed = said(*path, "--help").split("Commands:\n")[1].splitlines()
    assert {line.split()[0] for line in listed} == set(group.commands)
    assert len(listed) == len(group.commands)  # none goes on in a second line
    assert [line for line in listed if line.endswith("...")] == []


def test_what_a_newcomer_runs_first_stands_first() -> None:
    assert said("--help").split("Commands:\n")[1].split()[0] == "train"


@pytest.mark.parametrize(
    ("option", "names"),
    [
        *(("algorithm", ALGORITHMS), ("credit", CREDITS), ("engine", ENGINES)),
        *(("sandbox", SANDBOXES), ("trackers", TRACKERS)),
    ],
)
def test_an_option_names_all_that_it_can_be(option: str, names: dict[str, str]) -> None:
    words = FIELDS[option].metadata["doc"].replace(":", " ").replace(",", " ").split()
    assert [name for name in names if name not in words] == []


def test_options_explains_every_option() -> None:
    text = " ".join(said("options").split())
    for name, field in FIELDS.items():
        assert f"{name} = {field.default}".strip() in text
        assert field.metadata["doc"] in text.replace("- ", "-") or field.metadata["doc"] in text
    assert "[token | sequence | constant]" in text
    assert "[flag --top-k]" in text


def test_options_finds_by_word() -> None:
    assert [line.split()[0] for line in said("options", "CLIP_low").splitlines() if line[2] != " "] == ["clip_low"]
    named = said("options", "teacher", "url")
    assert "teacher_tokenizer" in named
    assert "privileged" not in named
    nothing = CliRunner().invoke(cli, ["options", "xyzzy"])
    assert (nothing.exit_code, nothing.output) == (
        2,
        "error: No option is named or explained with 'xyzzy': `minirllm options` lists all.\n",
    )
