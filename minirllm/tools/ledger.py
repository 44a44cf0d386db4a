"""``minirllm show --tokens``: conversations token by token: where each comes from and what became of it.

Owns: the trace of an episode's tokens, its layout in the terminal. Does not know: why a call is trained on, or not
(`batch.select` says it, of the same episodes as the update had). Writes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from minirllm import batch, models
from minirllm.algorithms import roles
from minirllm.batch import Batch
from minirllm.errors import ModelError
from minirllm.log import printable
from minirllm.standing import NOTHING
from minirllm.tools.runs import Run, page, samples
from minirllm.tools.show import Wanted, choose, heading, matched
from minirllm.tree import TokenTree
from minirllm.types import Episode, Step

MARKS = {"trained": ("+", "green"), "context": (".", "dim"), "discarded": ("-", "red")}
LEGEND = "+ trained   . context: read only   - discarded: sampled, not trained   (under sampled tokens: logprobs)"
WHY = {
    "aborted": "it was cut off: its client left, the session ended or the engine failed",
    "auxiliary": "it is a side call of the harness",
    "ungraded": "the episode has no reward",
    "unclaimed": "no trajectory of the episode claims the call",
    "no_signal": "the rewards of its group give no advantage",
    "too_small": "its group has fewer than min_group_size trajectories",
    "dropped": "its episode ended in a way that is left out (drop_reasons)",
    "surplus": "there were enough rollouts or tasks without it (spare_rollouts, spare_tasks)",
    "truncated": "an answer of its trajectory was cut off at max_tokens (mask_truncated)",
}


class Token(NamedTuple):
    """One token of a tree. `position` counts from the root; tokens of prompts have no logprob."""

    position: int
    id: int
    mark: str  # of MARKS
    logprob: float | None = None


class Sample(NamedTuple):
    """One sample, finished or cut off. `tokens` are those of its path that no call before it in the trace has."""

    id: str
    step: Step | None  # its record, if it has one
    read: int  # tokens of its prompt
    sampled: int
    weight_version: int
    mark: str  # of what it sampled
    why: str
    tokens: list[Token]


def trace(episode: Episode, learned: Batch) -> list[Sample]:
    """Every token of an episode once: its calls in order, then those that are in its tree only."""
    tree = episode.tree or TokenTree()
    shown: set[int] = set()
    calls = []
    for end, step in samples(episode).items():
        last, own, position, tokens = tree.nodes[end], tree.completion_nodes(end), 0, list[Token]()
        fate = learned.fate(episode, last)
        mark = "trained" if fate == "trained" else "discarded"
        for index in tree.path(end):
            node = tree.nodes[index]
            if index not in shown:
                logprobs = node.logprobs if node.sampled else [None] * len(node.tokens)
                kind = mark if index in own else "context"
                tokens += [Token(position + i, id, kind, logprobs[i]) for i, id in enumerate(node.tokens)]
            position += len(node.tokens)
        shown.update(tree.path(end))
        sampled = sum(len(tree.nodes[index].tokens) for index in own)
        why = _why_trained(learned, episode, last.call_id) if fate == "trained" else WHY[fate]
        read, version = position - sampled, last.weight_version
        calls.append(Sample(last.call_id, step, read, sampled, version, mark, why, tokens))
    return calls


def _why_trained(learned: Batch, episode: Episode, call: str) -> str:
    member = learned.members[episode.id, call]
    values = np.atleast_1d(member.advantages[call])
    few = f"{values[0]:+.3g}" if np.ptp(values) == 0 else f"{values.min():+.3g} to {values.max():+.3g}"
    return f"reward {member.reward:g}, advantage {few}, {member.weight:.3g} of the loss per token"


def show(folder: Path, wanted: Wanted, console: Console | None = None) -> None:
    """Print the tokens of these episodes."""
    console, run = page(console), Run(folder)
    picked = choose(run, wanted)
    if picked is None:
        console.print(Text(f"{folder}: no episode has finished yet"))
        return
    learned = batch_of(run, picked.step)
    text, note = _texts(run.config(picked.step).model)
    lines = [Text(f"Tokens of step {picked.step}: {picked.counts}"), Text(LEGEND), *map(Text, note)]
    if picked.step not in run.rows:
        lines.append(Text("The step is not finished: the marks are those of the episodes so far."))
    for word, one in picked.shown:
        lines += [Text(""), Text(printable(heading(word, one)), "bold")]
        for number, call in enumerate(trace(one, learned), 1):
            lines += [Text(printable(_title(number, call))), *layout(call.tokens, text, console.width)]
    for line in lines:
        console.print(line, soft_wrap=True)


def batch_of(run: Run, step: int) -> Batch:
    """What the step's batch was; a baseline of the steps that were done as it was sampled is made of their episodes."""
    settings, standing = run.config(step), NOTHING
    for earlier in (number for number in run.steps if number < step - settings.lag and settings.baseline == "task"):
        then = run.config(earlier)
        found = batch.select(run.episodes(earlier), then, roles.of(then), standing)
        standing = standing.after(*found.means, then)
    return batch.select(run.episodes(step), settings, roles.of(settings), standing)


def _title(number: int, call: Sample) -> str:
    version = "" if call.weight_version < 0 else f" with weights {call.weight_version}"
    new = sum(token.logprob is None for token in call.tokens)
    parts = [f"call {number} ({call.id}): read {call.read} tokens, {new} of them new, sampled {call.sampled}{version}"]
    if call.step is not None and (call.step.parent or call.step.auxiliary):
        parts.append(matched(call.step))
    return "; ".join([*parts, f"{call.mark}: {call.why}"])


def _texts(model: str) -> tuple[Callable[[int], str], list[str]]:
    """(what a token looks like, a sentence when its text is not to be had)."""
    try:
        tokenizer: Any = models.load_tokenizer(model)
    except ModelError as error:
        return lambda id: f"#{id}", [f"Tokens are shown by their ids: {error}"]

    def text(id: int) -> str:
        found = tokenizer.decode([id], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        known = found and "\ufffd" not in found  # else no text, or a part of a character
        return printable(found).replace("\n", "\\n").replace("\t", "\\t").replace(" ", "␣") if known else f"#{id}"

    return text, []


def layout(tokens: list[Token], text: Callable[[int], str], width: int) -> Iterator[Text]:
    """Lines of one mark each: the position of the first token, the mark, the tokens; under sampled ones, logprobs."""
    line: list[Token] = []
    cells: list[tuple[str, str, int]] = []  # token, logprob, columns
    for token in tokens:
        under = "" if token.logprob is None else f"{token.logprob:.2f}"
        above = text(token.id)
        cell = (above, under, max(cell_len(above), len(under)))
        follows = line and (token.mark, token.position) == (line[-1].mark, line[-1].position + 1)
        if line and not (follows and 10 + sum(size + 1 for _, _, size in [*cells, cell]) <= width):
            yield from _line(line[0], cells)
            line, cells = [], []
        line.append(token)
        cells.append(cell)
    if line:
        yield from _line(line[0], cells)


def _line(first: Token, cells: list[tuple[str, str, int]]) -> Iterator[Text]:
    mark, style = MARKS[first.mark]
    above = " ".join(text + " " * (size - cell_len(text)) for text, _, size in cells)
    yield Text(f"{first.position:>6} {mark} {above}".rstrip(), style)
    if first.logprob is not None:
        yield Text(f"{'':9}{' '.join(under.ljust(size) for _, under, size in cells)}".rstrip(), style)
