"""The proofs behind docs/reproducibility.md: each a subcommand, all figures in one file.

Owns: the command line, and the JSON file, in which every proof has its own entry. Does not know: what a proof does.
``python benchmarks/reproducibility.py kills [--kills 20] [--out FILE]``

A proof is a module of `proofs` with ``arguments(parser)`` for its options and ``measure(options)``, which returns plain
values. Its docstring's first line is its help.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from proofs import kills

from minirllm.machine import machine

PROOFS = {"kills": kills}


def main() -> None:
    parser = argparse.ArgumentParser(description="Prove repeatability, and write the figures down.")
    commands = parser.add_subparsers(dest="proof", required=True)
    for name, proof in PROOFS.items():
        command = commands.add_parser(name, help=str(proof.__doc__).partition("\n")[0])
        command.add_argument("--out", type=Path, default=Path("benchmarks/baselines/reproducibility.json"))
        proof.arguments(command)
    options = parser.parse_args()
    began = time.perf_counter()
    figures = PROOFS[options.proof].measure(options)
    figures |= {"seconds": time.perf_counter() - began, "machine": machine()}
    everything = json.loads(options.out.read_text()) if options.out.exists() else {}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(dict(sorted({**everything, options.proof: figures}.items())), indent=1) + "\n")


if __name__ == "__main__":
    main()
