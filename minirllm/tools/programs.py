"""``minirllm harness list | show``: what harnesses there are, and how each is run.

Owns: the table, the rehearsal of a launch. Does not know: installation (install.py), whether a program works
(harness.py), torch.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path

from minirllm import harness
from minirllm.flow import names
from minirllm.harness import Context, Harness

#: Agent programs that people ask for and that no package registry carries whole.
ELSEWHERE = {
    "crush": "its npm package downloads the program from a code host when it is installed",
    "goose": "the package index has its provider bindings only, not the agent",
    "swe-agent": "the package on the index is a stub; mini-swe-agent, by the same authors, replaces it",
}


def table() -> Iterator[tuple[str, str, str, str, str]]:
    """(name, version, dialect, state, about) of every harness, and of those that cannot be had, with the reason."""
    for name in names("harnesses"):
        one = harness.find(name)
        state = "built in" if not (one.pip or one.npm) else "installed" if one.installed else "not installed"
        yield one.name, one.version, one.dialect, state, one.about
    for name, reason in ELSEWHERE.items():
        yield name, "-", "-", "not available", reason


def show(one: Harness, full: bool) -> str:
    """The exact command, environment and files of an episode; what differs in each is in capitals."""
    context = Context(
        instruction="INSTRUCTION", full=full,
        work=Path("/EPISODE/work"), home=Path("/EPISODE/home"), tmp=Path("/EPISODE/tmp"),
        url="http://127.0.0.1:PORT/sessions/SESSION", key="SESSION-KEY", model="MODEL", folder=one.folder,
    )  # fmt: skip
    launch = one.launch(context)
    install = [f"pip install {shlex.join(one.pip)}"] if one.pip else []
    install += [f"npm install {shlex.join(one.npm)}"] if one.npm else []
    lines = [
        f"{one.name} {one.version}: {one.about}",
        f"dialect: {one.dialect}    prompt: {one.prompt or 'its own'}    needs: {', '.join(one.requires) or 'nothing'}",
        f"installed by: {'; '.join(install) or 'nothing to install'}, in {one.folder}",
        f"working folder: {context.work}, with the files of task.metadata['files']; standard input: /dev/null",
        "environment:",
        *(f"  {name}={shlex.quote(value)}" for name, value in harness.environment(context, launch).items()),
    ]
    lines.append(f"command: {shlex.join(launch.argv)}")
    for name, text in launch.files.items():
        lines += [f"file {context.home / name}:", *(f"  {line}" for line in text.splitlines())]
    return "\n".join(lines)
