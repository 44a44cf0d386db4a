"""Check every harness with its real program; what came out is written as JSON, and a failure is the exit code.

    python benchmarks/harnesses.py --out benchmarks/baselines/harnesses.json [NAME ...]

Installs what is not installed. Results of names that are not checked now are kept.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path

from minirllm import harness
from minirllm.errors import UserError
from minirllm.flow import names
from minirllm.machine import machine
from minirllm.tools import harness as tools
from minirllm.tools import install

VARIANTS = tuple(
    f"{name}:{dialect}" for name in ("opencode", "pi", "qwen-code") for dialect in ("messages", "responses")
)  # what a harness can also be asked for


def result(name: str) -> dict[str, object]:
    """Of one check, without the program's last words, which may name this machine's paths, times and sessions."""
    try:
        install.ensure(harness.find(name), print)
        report = dataclasses.asdict(tools.check(name))
    except UserError as error:
        return {"passed": False, "problem": str(error)}
    report["counters"] = {key: count for key, count in report["counters"].items() if count}
    return {key: value for key, value in report.items() if key not in ("name", "ended") and value != ""}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="which; all of them by default")
    parser.add_argument("--out", type=Path, help="JSON file")
    options = parser.parse_args()
    known = [name.replace("_", "-") for name in names("harnesses")]
    known += [name for name in VARIANTS if name.partition(":")[0] in known]
    before = json.loads(options.out.read_text())["harnesses"] if options.out and options.out.exists() else {}
    found = {}
    for name in options.names or known:
        found[name] = result(name)
        print(name, json.dumps(found[name]), flush=True)
    if options.out:
        told = {"machine": machine(), "harnesses": dict(sorted({**before, **found}.items()))}
        options.out.write_text(json.dumps(told, indent=1) + "\n")
    sys.exit(not all(one["passed"] for one in found.values()))


if __name__ == "__main__":
    main()
