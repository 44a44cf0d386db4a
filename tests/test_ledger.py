"""tools/ledger.py and the step's line: every token of a run, where it comes from and what became of it."""

import io
import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from rich.console import Console

from minirllm import batch
from minirllm.algorithms import create
from minirllm.cli import cli
from minirllm.config import Config
from minirllm.errors import UserError
from minirllm.log import RunLog, explain
from minirllm.store import EpisodeStore
from minirllm.tools import ledger
from minirllm.tools.runs import Run
from minirllm.tools.show import Wanted
from minirllm.tree import TokenTree
from minirllm.types import Completion, Episode, Message, Step, TerminationReason, Trajectory

CONFIG = Config(model="tiny", group_size=2, norm_std=False)
END = 258  # <|im_end|>


def ids(text: str) -> list[int]:
    return list(text.encode())


def talk(index: int, reward: float | None, *, second: str = "no", task: str = "t") -> Episode:
    """Two turns, of which the second continues the first; a side call that nobody claims; one that was cut off."""
    tree = TokenTree()

    def call(name: str, prompt: list[int], answer: list[int], after: int | None = None, reason: str = "stop") -> int:
        logprobs = [-0.25 * (n + 1) for n in range(len(answer))]
        return tree.add(prompt, Completion(answer, logprobs, reason, -1 if reason == "abort" else 3), name, after)  # type: ignore[arg-type]

    first = call("c1", ids("Hi\n"), [*ids("yo"), END])
    prompt = [*ids("Hi\nyo"), END, *ids("a b")]
    last = call("c2", prompt, ids(second), after=first)
    call("c3", ids("Hm"), ids("x"))
    call("c2", prompt, ids(second[:1]), first, "abort")
    steps = [
        Step("c1", node=first, prompt_length=3, response_length=3, response=Message("assistant", "yo")),
        Step("c2", node=last, parent="c1", prompt_length=9, response_length=len(second)),
    ]
    return Episode(
        f"{task}:{index}", task_id=task, rollout_idx=index, reward=reward, tree=tree,
        termination_reason=TerminationReason.ENV_DONE, trajectories=[Trajectory(steps=steps)],
    )  # fmt: skip


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    folder = Path("runs") / "r"
    with RunLog(folder, CONFIG, console=Console(file=io.StringIO())) as log:
        log.manifest()
        log.step({"step": 1})
    store = EpisodeStore(folder / "episodes")
    for episode in (talk(0, 1.0), talk(1, 0.0, second="yes"), talk(0, 1.0, task="easy"), talk(1, 1.0, task="easy")):
        store.append(1, episode)
    store.append(2, talk(0, None))
    return folder


def printed(folder: Path, width: int | None = None, **options: object) -> str:
    console = Console(file=io.StringIO(), highlight=False, width=width, force_terminal=width is not None)
    ledger.show(folder, Wanted(**options), console)  # type: ignore[arg-type]
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_a_conversation_token_by_token(run: Path) -> None:
    assert printed(run, episode="t:0").splitlines() == [
        "Tokens of step 1: 4 episodes",
        ledger.LEGEND,
        "",
        "episode: task t, rollout 0, reward 1, env_done, 2 calls",
        "call 1 (c1): read 3 tokens, 3 of them new, sampled 3 with weights 3; "
        "trained: reward 1, advantage +0.5, 0.0909 of the loss per token",
        r"     0 . H i \n",
        "     3 + y     o     <|im_end|>",
        "         -0.25 -0.50 -0.75",
        "call 2 (c2): read 9 tokens, 3 of them new, sampled 2 with weights 3; continues call c1; "
        "trained: reward 1, advantage +0.5, 0.0909 of the loss per token",
        "     6 . a ␣ b",
        "     9 + n     o",
        "         -0.25 -0.50",
        "call 3 (c3): read 2 tokens, 1 of them new, sampled 1 with weights 3; "
        "discarded: no trajectory of the episode claims the call",
        "     1 . m",
        "     2 - x",
        "         -0.25",
        "call 4 (c2): read 9 tokens, 0 of them new, sampled 1; "
        "discarded: it was cut off: its client left, the session ended or the engine failed",
        "     9 - n",
        "         -0.25",
    ]


def test_why_a_whole_episode_was_not_learned_from(run: Path) -> None:
    assert "discarded: the rewards of its group give no advantage" in printed(run, episode="easy:1")
    text = printed(run)  # the last finished step, its best and its worst
    headings = [line.partition(",")[0] for line in text.splitlines() if "rollout" in line]
    assert headings == ["best: task t", "worst: task t"]
    unfinished = printed(run, step=2)
    assert "discarded: the episode has no reward" in unfinished
    assert "The step is not finished" in unfinished
    assert "The step is not finished" not in text


@pytest.mark.parametrize(("lag", "advantages"), [(0, [1, 0, 0]), (1, [1, 1, 0])])
def test_a_baseline_is_that_of_the_steps_which_were_done_as_a_step_was_sampled(tmp_path, lag, advantages) -> None:
    for step in (1, 2, 3):
        EpisodeStore(tmp_path / "episodes").append(step, talk(0, 1.0))
    config = Config(algorithm="reinforce", group_size=1, baseline="task", lag=lag)
    (tmp_path / "manifest.json").write_text(json.dumps({"config": config.to_dict()}))
    found = [ledger.batch_of(Run(tmp_path), step).members["t:0", "c1"].advantages["c1"] for step in (1, 2, 3)]
    assert found == advantages


def test_each_step_is_shown_under_its_own_options(run: Path) -> None:
    for index, reward in enumerate((0.5, 0.0)):
        EpisodeStore(run / "episodes").append(3, talk(index, reward))
    manifest = json.loads((run / "manifest.json").read_text())
    manifest["resumed"] = [{"after": 2, "changed": {"config.norm_std": [False, True]}}]
    (run / "manifest.json").write_text(json.dumps(manifest))
    assert "reward 1, advantage +0.5," in printed(run, step=1, episode="t:0")
    assert "reward 0.5, advantage +1," in printed(run, step=3, episode="t:0")


def test_the_trace_has_the_very_tokens_of_the_forest(run: Path) -> None:
    episodes = list(EpisodeStore(run / "episodes").finished(1).values())
    learned = batch.build(episodes, CONFIG, create("grpo"), 3)
    traced = [(e, call, token) for e in episodes for call in ledger.trace(e, learned) for token in call.tokens]
    trained = [(t.position, t.id, t.logprob, 0.5 - e.rollout_idx) for e, _, t in traced if t.mark == "trained"]
    columns = ("position_T", "token_T", "logprob_T", "advantage_T")
    arrays = [np.stack([getattr(f, name) for name in columns])[:, f.trained_T] for f in learned.forests]
    forest = [row for array in arrays for row in array.T.tolist()]
    assert sorted(trained) == sorted(map(tuple, forest))
    assert len(traced) == sum(e.tree.num_tokens for e in episodes)
    assert sum(t.mark == "discarded" for _, _, t in traced) == learned.metrics["discarded_tokens"]
    assert all(e.tree.ids(call.step.node)[t.position] == t.id for e, call, t in traced if call.step)


def test_long_lines_wrap_at_the_width_and_colours_are_for_terminals(run: Path) -> None:
    text = Console(width=40)
    tokens = [ledger.Token(n, ord("a") + n, "trained", -n / 3) for n in range(12)]
    lines = list(ledger.layout(tokens, chr, 40))
    assert [line.plain for line in lines[:4]] == [
        "     0 + a    b     c     d     e",
        "         0.00 -0.33 -0.67 -1.00 -1.33",
        "     5 + f     g     h     i     j",
        "         -1.67 -2.00 -2.33 -2.67 -3.00",
    ]
    assert max(line.cell_len for line in lines) <= text.width
    wide = list(ledger.layout([ledger.Token(0, 0, "context"), ledger.Token(1, 0, "context")], lambda id: "漢", 13))
    assert [line.plain for line in wide] == ["     0 . 漢", "     1 . 漢"]
    assert "\x1b[" in printed(run, 80, episode="t:0")
    assert "\x1b" not in printed(run, episode="t:0")


def test_without_its_tokenizer_ids_are_shown(run: Path) -> None:
    manifest = run / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"tiny"', '"no/such-model"'))
    text = printed(run, episode="t:0")
    assert "Tokens are shown by their ids: " in text
    assert "     3 + #121  #111  #258\n" in text


def test_the_command(run: Path) -> None:
    result = CliRunner().invoke(cli, ["show", "r", "--episode", "t:1", "--tokens", "--step", "1"])
    assert result.exit_code == 0, result.output
    assert "    10 + e" not in result.output
    assert "     9 + y     e     s\n" in result.output
    result = CliRunner().invoke(cli, ["show", "r", "--episode", "t:0"])  # of the last finished step that has it
    assert "Conversations of step 1: 4 episodes\n\nepisode: task t, rollout 0, reward 1" in result.output
    assert "assistant: yo" in result.output
    result = CliRunner().invoke(cli, ["show", "r", "--episode", "t:7", "--step", "1"])
    assert (result.exit_code, result.stderr) == (
        2, "error: runs/r has no episode 't:7' of step 1 (did you mean t:1?): it has t:0, t:1, easy:0, easy:1.\n",
    )  # fmt: skip
    result = CliRunner().invoke(cli, ["show", "r", "--episode", "t:7", "--step", "9", "--tokens"])
    assert "of step 9: there are none." in result.stderr


def test_a_run_without_episodes_says_so(tmp_path: Path) -> None:
    with RunLog(tmp_path / "r", CONFIG, console=Console(file=io.StringIO())):
        assert printed(tmp_path / "r") == f"{tmp_path / 'r'}: no episode has finished yet\n"
        with pytest.raises(UserError, match="has no episode 'x:0': there are none"):
            printed(tmp_path / "r", episode="x:0")


def test_the_steps_line_accounts_for_what_is_not_zero() -> None:
    row = {
        "step": 1, "sampled_tokens": 900.0, "discarded_tokens": 400.0, "discarded/no_signal": 300.0,
        "discarded/aborted": 60.0, "discarded/retried": 40.0, "branches": 3.0, "edited": 2.0, "unprovable": 1.0,
        "reread_tokens": 17.0, "mismatch_max": 3e-5,
    }  # fmt: skip
    line = "step 1/1 | discarded 400 of 900 tokens (300 without signal, 60 cut off, 40 of attempts that were run again)"
    line += " | 3 branches (2 edited, 1 not provable, 17 tokens read otherwise) | mismatch 3e-05"
    assert explain(row, 1, "fixed") == f"{line} | determinism fixed"
    assert explain(row, 1, "exact") == f"{line} where exact promises 0 | determinism exact"
    quiet = {"step": 1, "sampled_tokens": 900.0, "discarded_tokens": 0.0, "branches": 0.0, "mismatch_max": 0.0}
    assert explain(quiet, 1, "exact") == "step 1/1 | mismatch 0 | determinism exact"
