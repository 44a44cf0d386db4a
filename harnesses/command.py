"""Any executable, in any language: ``--harness 'command:./agent.sh {instruction}'``.

The words behind the colon are split as a shell splits them, and run without one; ``{instruction}`` stands for the
task's text, whole, within its word. The program finds the endpoint in its environment: OPENAI_BASE_URL, OPENAI_API_KEY,
ANTHROPIC_BASE_URL, ANTHROPIC_API_KEY, MINIRLLM_MODEL, MINIRLLM_INSTRUCTION. A relative path of a file that is there is
taken from where minirllm was started; anything else is looked for on PATH. In a sandbox it sees its own file, and of
what lies beside it nothing. What it prints is its answer.
"""

from __future__ import annotations

import shlex
from pathlib import Path

from minirllm.errors import ConfigError
from minirllm.harness import SHELL, Context, Harness, Launch
from minirllm.sandboxes import Result

DEMO = f"""\
import json, os, subprocess, urllib.request
messages = [{{"role": "user", "content": os.environ["MINIRLLM_INSTRUCTION"]}}]
body = {{"model": os.environ["MINIRLLM_MODEL"], "messages": messages}}
request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions", json.dumps(body).encode(),
    {{"authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "content-type": "application/json"}})
with urllib.request.urlopen(request) as reply:
    command = json.load(reply)["choices"][0]["message"]["content"]
assert command == {SHELL!r}, command
subprocess.run(command, shell=True, check=True)
print("done")
"""


def configured(text: str) -> Harness:
    """The harness of a command line."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"command:{text} is no command line: {error}.") from None
    if not words:
        raise ConfigError("command: needs a program behind the colon, as in 'command:./agent.sh {instruction}'.")
    if Path(words[0]).is_file():
        words[0] = str(Path(words[0]).resolve())

    def launch(context: Context) -> Launch:
        argv = tuple(word.replace("{instruction}", context.instruction) for word in words)
        return Launch(argv, env=context.variables)

    return Harness(
        name="command", version="0", about="any executable: command:./agent.sh {instruction}", dialect="any",
        launch=launch, script=(SHELL,), answer=printed,
    )  # fmt: skip


def printed(done: Result) -> str:
    return done.stdout.strip()


HARNESS = configured(shlex.join(["python3", "-c", DEMO]))
