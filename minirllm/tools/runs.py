"""A run folder as the verbs read it: found by name, its rows and episodes by step, its calls as tokens.

Owns: `Run`, `Call`, where two recordings of one call part, and how a page is written. Writes nothing to the folder.
Does not know: torch, what is printed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from minirllm.config import Config, from_mapping, nearest
from minirllm.errors import UserError
from minirllm.log import CONFIG, MANIFEST, METRICS, printable, read_json, read_metrics
from minirllm.store import EpisodeStore
from minirllm.tree import TokenTree
from minirllm.types import Episode, SamplingParams, Step

PLAIN_WIDTH = 160  # columns when the output is not a terminal


def find_run(name: str, runs_dir: str = "runs") -> Path:
    """The run folder `name` means: a path, or a name in `runs_dir`. Raises UserError naming the nearest."""
    for folder in (Path(name), Path(runs_dir) / name):
        if any((folder / file).is_file() for file in (METRICS, MANIFEST, CONFIG)):
            return folder
    if Path(name).exists():
        raise UserError(f"{name} is not a run folder: it has no {METRICS}.")
    runs = sorted(path.parent.name for path in Path(runs_dir).glob(f"*/{CONFIG}"))
    if not runs:
        raise UserError(f"No run named {name!r}: there are no runs in {runs_dir}.")
    listed = ", ".join(runs[:20]) + (", ..." if len(runs) > 20 else "")
    raise UserError(f"No run named {name!r} in {runs_dir}{nearest(name, runs)}: it has {listed}.")


def page(console: Console | None = None) -> Console:
    """Where a verb writes: the terminal, or lines of a fixed width when the output is none."""
    console = console or Console(highlight=False)
    if not console.is_terminal:
        console.width = PLAIN_WIDTH
    return console


def write(console: Console, text: str, style: str = "") -> None:
    """Lines as they are, but for control characters."""
    console.print(Text(printable(text), style), soft_wrap=True)


class Run:
    """What a run recorded. Raises UserError when a file of it cannot be read."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.manifest = read_json(folder / MANIFEST) if (folder / MANIFEST).exists() else {}
        found = read_metrics(folder / METRICS) if (folder / METRICS).exists() else []
        self.rows: dict[int, dict[str, Any]] = {row["step"]: row for row in found}
        self.store = EpisodeStore(folder / "episodes")
        self.steps = sorted({*(step for step in self.rows if step), *self.store.steps()})  # of training

    def episodes(self, step: int) -> list[Episode]:
        """Those of a step, by task and rollout."""
        found = self.store.finished(step)
        return [found[key] for key in sorted(found)]

    def changes_before(self, step: int) -> Mapping[str, list[Any]]:
        """What a resumption before `step` had changed since the manifest was written: ``{name: [old, new]}``."""
        resumed = [entry for entry in self.manifest.get("resumed", ()) if entry.get("after", step) < step]
        return resumed[-1]["changed"] if resumed else {}

    def facts(self, step: int) -> dict[str, Any]:
        """The manifest as `step` ran under it: of what resumptions changed, the changes before it."""
        facts, values = dict(self.manifest), dict(self.manifest["config"])
        for name, (_, new) in self.changes_before(step).items():
            part_of, _, option = name.partition(".")
            if part_of == "config":
                values[option] = new
            elif not option:
                facts[name] = new
        return {**facts, "config": {name: value for name, value in values.items() if value is not None}}

    def config(self, step: int) -> Config:
        """The options that `step` ran under."""
        return from_mapping(self.facts(step)["config"])


@dataclass
class Call:
    """A model call as recorded. One without a `step` was cut off, or no trajectory claimed it."""

    id: str
    prompt_ids: list[int]
    token_ids: list[int]
    logprobs: list[float]
    temperature: float = 1.0
    version: int = 0  # of the weights; -1 of a call that was cut off
    step: Step | None = None

    @property
    def params(self) -> SamplingParams | None:
        """What the engine was told, or, without a step, what gives the tokens that there are. None: not recorded."""
        if self.step is None:
            return SamplingParams(max_tokens=len(self.token_ids), temperature=self.temperature)
        return self.step.params


def samples(episode: Episode) -> dict[int, Step | None]:
    """Every sample of an episode, by the node of its tree that ends it: those of its steps in order, then the rest."""
    nodes = episode.tree.nodes if episode.tree else []
    inner = {(node.parent, node.call_id) for node in nodes if node.sampled}  # a split sample has nodes before its last
    ends = [index for index, node in enumerate(nodes) if node.sampled and (index, node.call_id) not in inner]
    claimed = {step.node: step for step in episode.steps if step.node in ends}
    return {**claimed, **{end: None for end in ends if end not in claimed}}


def calls(episode: Episode) -> list[Call]:
    """Every call of an episode, in the order of `samples`."""
    found, tree = [], episode.tree or TokenTree()
    for end, step in samples(episode).items():
        node, (ids, logprobs) = tree.nodes[end], tree.response(end)
        name = step.id if step else node.call_id
        found.append(Call(name, tree.prompt_ids(end), ids, logprobs, node.temperature, node.weight_version, step))
    return found


def part(one: Call, other: Call) -> tuple[str, str, str] | None:
    """Where two recordings of a call part: (the place, what is there in the one, what in the other), or None."""
    place = _first(one.prompt_ids, other.prompt_ids)
    if place is not None:
        a, b = (f"id {ids[place]}" if place < len(ids) else "no token" for ids in (one.prompt_ids, other.prompt_ids))
        return f"prompt token {place + 1} of {len(one.prompt_ids)}", a, b
    samples = [list(zip_longest(call.token_ids, call.logprobs)) for call in (one, other)]
    place = _first(*samples)
    if place is not None:
        pairs = [sample[place] if place < len(sample) else None for sample in samples]
        a, b = ("no token" if pair is None else f"id {pair[0]}, logprob {pair[1]!r}" for pair in pairs)
        return f"token {place + 1} of {len(one.token_ids)}", a, b
    for name, a, b in (
        ("temperature", repr(one.temperature), repr(other.temperature)),
        ("weight version", str(one.version), str(other.version)),
    ):
        if a != b:
            return name, a, b
    return None


def _first(one: Sequence[Any], other: Sequence[Any]) -> int | None:
    """The first place at which two sequences differ; the end of the shorter one counts."""
    if one == other:
        return None
    short = min(len(one), len(other))
    return next((place for place in range(short) if one[place] != other[place]), short)


def equal(one: Any, other: Any) -> bool:
    """Equal values; of floats the same bits, but that one NaN is like another."""
    return bool(one == other or (one != one and other != other))
