"""Real agent programs in tests: installed if they are not, and run against an engine that says what it is told to."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest

from minirllm import harness
from minirllm.config import Config
from minirllm.engines.scripted import ScriptedEngine
from minirllm.errors import UserError
from minirllm.harness import Harness, Turn
from minirllm.policy import Policy
from minirllm.tools import harness as tools
from minirllm.tools import install
from minirllm.tools.harness import written
from minirllm.types import Episode, Task

AWAY = re.compile(  # no registry, as pip and npm tell it, rather than no such package; or this machine lacks a program
    r"^\S+ needs |from versions: none|No matching distribution|ENOTFOUND|EAI_AGAIN|ECONNREFUSED|ECONNRESET|ETIMEDOUT|"
    r"network|timed out|[Cc]onnection",
)


def installed(name: str) -> Harness:
    """The harness, installed now if it was not."""
    one = harness.find(name)
    try:
        install.ensure(one, print)
    except UserError as error:
        if not AWAY.search(str(error)):
            raise
        pytest.skip(f"{name} IS NOT TESTED, as it cannot be installed here: {error}")
    return one


class Saying(ScriptedEngine):
    """Says `turns`, one after another, the last one for ever; set before it is built."""

    turns: tuple[Turn, ...] = ()

    def __init__(self, policy: Policy, config: Config):
        said = iter(map(written, self.turns))
        last = written(self.turns[-1])
        super().__init__(policy, config, lambda prompt: next(said, last))


def run(one: Harness, turns: Sequence[Turn], instruction: str = "Do it.", *, full: bool = False, **options) -> Episode:
    """One episode of the real program, whose model says `turns`."""
    Saying.turns = tuple(turns)
    settings = {"max_context": 32_768, "max_tokens": 1024, "max_calls": 20, "episode_timeout": 120.0, **options}
    config = Config(model="tiny", engine=f"{__name__}:Saying", retries=0, determinism="off", **settings)
    return tools.episode(config, harness.flow(one, full), Task(f"test-{one.name}", instruction))
