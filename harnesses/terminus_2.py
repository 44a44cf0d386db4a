"""Terminus-2, the agent of Terminal-Bench's authors (package harbor): keystrokes into a tmux terminal, JSON in text.

0.8k tokens of prompt. It has no tools and no system prompt; a task is complete once the model has said so twice. Lean,
it ends when the window is full; in full, it hands over to itself by a summary and questions on it, all side calls.
What a screen shows depends on how quick a command was, so runs may differ from each other. At most 50 turns.
"""

from __future__ import annotations

import json
from pathlib import Path

from minirllm.flow import import_path
from minirllm.harness import SHELL, Context, Harness, Launch

shared = import_path(Path(__file__).with_name("_shared.py"))

PROGRAM = '''\
import asyncio, json, os, shutil
from pathlib import Path
from types import SimpleNamespace

from harbor.agents.terminus_2 import Terminus2
from harbor.environments.base import ExecResult
from harbor.models.agent.context import AgentContext

PIPES = {"stdin": asyncio.subprocess.DEVNULL, "stdout": asyncio.subprocess.PIPE, "stderr": asyncio.subprocess.PIPE}


class Here:
    """What the agent takes for a container: the machine it runs on."""

    session_id, default_user = "minirllm", None

    def __init__(self, logs):
        self.trial_paths = SimpleNamespace(agent_dir=logs)

    async def exec(self, command, cwd=None, env=None, timeout_sec=None, user=None):
        process = await asyncio.create_subprocess_exec("bash", "-c", command, **PIPES)
        out, err = await asyncio.wait_for(process.communicate(), timeout_sec)
        texts = {"stdout": out.decode(errors="replace"), "stderr": err.decode(errors="replace")}
        return ExecResult(return_code=process.returncode, **texts)

    async def is_dir(self, path, user=None):
        return Path(path).is_dir()

    async def upload_file(self, source_path, target_path):
        shutil.copy(source_path, target_path)

    download_file = upload_file


async def main():
    logs = Path.home() / "logs"
    logs.mkdir()
    agent, here = Terminus2(logs, **json.loads(os.environ["MINIRLLM_OPTIONS"])), Here(logs)
    await agent.setup(here)
    await agent.run(os.environ["MINIRLLM_INSTRUCTION"], here, AgentContext())


asyncio.run(main())
'''
TURNS = 50
SUMMARIES = {
    "summary": "You are about to hand off your work to another AI agent",
    "questions": "You are picking up work from a previous AI agent",
    "answers": "The next agent has a few questions for you",
}


def launch(context: Context) -> Launch:
    tokens = {"max_input_tokens": context.window, "max_output_tokens": context.max_tokens}
    options = {
        "model_name": f"openai/{context.model}",
        "api_base": context.url_v1,
        "max_turns": TURNS,
        "suppress_max_turns_warning": True,
        "record_terminal_session": False,
        "enable_summarize": context.full,
        "proactive_summarization_threshold": min(8000, context.window // 4) if context.full else 0,
        "llm_call_kwargs": {"max_tokens": context.max_tokens},
        "model_info": {**tokens, "input_cost_per_token": 0, "output_cost_per_token": 0},
    }
    env = {
        **context.variables,
        "MINIRLLM_OPTIONS": json.dumps(options),
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # else it waits for a list of prices
        "TMUX_TMPDIR": str(context.tmp),
        "SHELL": "/bin/bash",
    }
    shell = "PS1='$ '\n"  # no host, user or folder on the screen
    files = {"terminus.py": PROGRAM, ".bashrc": shell, ".bash_profile": shell}
    return Launch((context.program("python"), str(context.home / "terminus.py")), env, files)


def said(keys: str, complete: bool) -> str:
    commands = [{"keystrokes": keys, "duration": 0.5}] if keys else []
    return json.dumps({"analysis": "", "plan": "", "commands": commands, "task_complete": complete})


HARNESS = Harness(
    name="terminus-2",
    version="0.26.0",
    about="Terminal-Bench's agent: keystrokes into a terminal, JSON in text",
    dialect="chat",
    pip=("harbor==0.26.0",),
    requires=("tmux", "bash", "python>=3.12"),
    prompt="0.8k tokens",
    launch=launch,
    auxiliary=shared.side_calls(SUMMARIES),
    script=(said(f"{SHELL}\n", complete=False), said("", complete=True), said("", complete=True)),
)
