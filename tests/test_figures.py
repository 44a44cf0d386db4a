"""The figures that README and the pages show are those of ``benchmarks/baselines``, rounded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
README = "README.md"


def measured(name: str) -> Any:
    return json.loads((ROOT / "benchmarks" / "baselines" / f"{name}.json").read_text())


def held_out(name: str, step: str) -> list[list[float]]:
    """Of each seed: the mean of a learning curve at a step, and its interval."""
    return [run["held_out"][step] for run in measured(f"learning_{name}")["runs"]]


def means(values: list[list[float]]) -> str:
    return ", ".join(f"{value[0]:.2f}" for value in values)


def interval(value: list[float]) -> str:
    return f"{value[0]:.2f} [{value[1]:.2f}, {value[2]:.2f}]"


def span(values: list[float], digits: int = 2, between: str = "-") -> str:
    return f"{min(values):.{digits}f}{between}{max(values):.{digits}f}"


def firsts(name: str, step: str) -> str:
    return span([value[0] for value in held_out(name, step)])


def legal(step: str) -> list[float]:
    return [run["signals"][step]["eval_signal/legal"] for run in measured("learning_self_play")["runs"]]


def figures() -> list[tuple[str, str]]:
    """(page, what it must say)."""
    first = measured("learning_first_letter")["runs"]
    (guess_a,), (guess_b,) = held_out("guess_number", "0"), held_out("guess_number", "6")
    (upper_a,), (upper_b,) = held_out("uppercase", "0"), held_out("uppercase", "30")
    peers, levels = measured("side_by_side")["cases"], measured("levels")["cases"]["a"]
    trained, loop, soak, streams = (measured(name) for name in ("training", "loop", "soak", "streams"))
    code, engine, vllm = measured("sandboxes")["code_rewards"], measured("engine"), measured("vllm_rate")
    kills, boxes = measured("reproducibility")["kills"], measured("sandboxes")["milliseconds"]
    programs = [name for name in measured("harnesses")["harnesses"] if name not in ("bash", "react", "command")]
    rates = [engine["rates"][n] / (sum(rate) / len(rate)) for n, rate in vllm["tokens_per_second"].items()]
    shares = {
        case: {name: f"{share:.0%}"[:-1] for name, share in peers[case]["share_of_floor"].items()} for case in "ab"
    }
    seconds, gap = levels["median_seconds"], f"{trained['gradient_relative_difference']:.2g}".replace("e-0", "e-")
    return [
        (README, f"{means(held_out('first_letter', '0'))} to {means(held_out('first_letter', '30'))} in "
                 f"{span([run['seconds'] / 60 for run in first], 0, ' to ')} minutes"),
        (README, f"{interval(guess_a)} to {interval(guess_b)}"),
        (README, f"{interval(upper_a)} to {interval(upper_b)}"),
        (README, f"{span([run['peak_rss_gib'] for run in first], 1, ' to ')} GiB"),
        (README, f"{trained['speedup']:.1f} times faster, gradients equal to {gap}"),
        (README, f"{peers['a']['times_faster']:.1f} times faster; {shares['a']['ours']} %"),
        (README, f"(TRL: {shares['a']['trl']} %)"),
        (README, f"{peers['b']['times_faster']:.1f} times faster; {shares['b']['ours']} %"),
        (README, f"(TRL: {shares['b']['trl']} %)"),
        (README, f"{loop['decoding_32_rows']['p99_ms']:.0f} ms, {loop['training']['p99_ms']:.0f} ms"),
        (README, f"{soak['server']['calls']:,} calls"),
        (README, f"late by {soak['loop_delay_ms']['p99']} ms (p99)"),
        (README, f"{len(programs)} of {len(programs)} configurations"),
        (README, f"{streams['queued']['first_byte_p99_ms']:.0f} ms; nothing lost"),
        (README, f"{code['calls']['per_second']:.0f} a second (calls), {code['tests']['per_second']:.0f} (tests)"),
        (README, f"{engine['mixed']['ratio']:.1f} times the tokens a second"),
        (README, f"{engine['shared']['ratio']:.1f} times"),
        (README, f"{rates[0]:.2f} and {rates[1]:.1f} times"),
        ("docs/reproducibility.md", f"{kills['survived']} / {kills['kills']}"),
        ("docs/reproducibility.md", f"{kills['episodes_kept']:,} of {kills['episodes_finished_before']:,}"),
        ("docs/reproducibility.md", f"median {kills['seconds_to_resume']['median']:.0f} s, at most "
                                    f"{kills['seconds_to_resume']['max']:.0f} s; a fresh start took "
                                    f"{kills['seconds_to_start']:.0f} s"),
        ("docs/reproducibility.md", f"`/health` within {soak['health_ms']['p99']:.0f} ms"),
        ("docs/reproducibility.md", f"exact {seconds['ours']:.1f} s"),
        ("docs/reproducibility.md", f"fixed {seconds['fixed']:.1f} s"),
        ("docs/reproducibility.md", f"off {seconds['off']:.1f} s"),
        ("docs/reproducibility.md", f"fixed {seconds['fixed'] / seconds['off'] - 1:.0%}".replace("%", " %")),
        ("docs/sandboxes.md", f"`docker` takes {boxes['docker']['cold'] / 1000:.2f} s, a warm one "
                              f"{boxes['docker']['take_warm'] / 1000:.2f} s; in `local` "
                              f"{boxes['local']['cold'] / 1000:.2f} and {boxes['local']['take_warm'] / 1000:.2f} s"),
        ("docs/harbor.md", f"{len(measured('harbor_peer')['cases'])} task directories"),
        ("docs/multi_agent.md", f"from {span(legal('0'))} to {legal('12')[0]:.2f}"),
        ("docs/multi_agent.md", f"games won from {firsts('self_play', '0')} to {firsts('self_play', '12')}"),
        ("docs/multi_agent.md", f"{firsts('self_verification', '0')} to {firsts('self_verification', '12')}"),
    ]  # fmt: skip


@pytest.mark.parametrize(("page", "figure"), figures())
def test_a_page_shows_what_was_measured(page: str, figure: str) -> None:
    assert figure in " ".join((ROOT / page).read_text().split())
