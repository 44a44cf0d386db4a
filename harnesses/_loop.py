"""The program of the harnesses `bash` and `react`: ask the model, run what it wants run, tell it what came out.

``python _loop.py bash | react``, with the variables that harnesses/command.py lists, and MINIRLLM_TURNS and
MINIRLLM_SECONDS (of one command). Needs nothing but the standard library.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from typing import Any

MOST = 4000  # characters of a command's output that the model is shown
BLOCK = re.compile(r"```(?:bash|sh)\n(.*?)```", re.DOTALL)
BASH = "To run a command, answer with one ```bash block. Without one, your answer is the last."
TOOL = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Run a command in the working folder.",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    },
}


def ask(messages: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    """The model's next message; ends the program when the endpoint will hear no more."""
    body = {"model": os.environ["MINIRLLM_MODEL"], "messages": messages, **fields}
    request = urllib.request.Request(
        f"{os.environ['OPENAI_BASE_URL']}/chat/completions",
        json.dumps(body).encode(),
        {"authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "content-type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request) as reply:
            return dict(json.load(reply)["choices"][0]["message"])
    except urllib.error.HTTPError as error:
        sys.exit(f"HTTP {error.code}: {error.read().decode(errors='replace')}")


def shell(command: str, seconds: float) -> str:
    """What a command printed, and how it ended when it did not end well."""
    with subprocess.Popen(
        ["bash", "-c", command], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, errors="replace", start_new_session=True,
    ) as process:  # fmt: skip
        try:
            out, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired as error:  # what left the group may hold the output: no more is read
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            out = (error.output or b"").decode(errors="replace")
            return f"{out[:MOST]}\n(ended after {seconds:g} s)"
    cut = out if len(out) <= MOST else f"{out[: MOST // 2]}\n...\n{out[-MOST // 2 :]}"
    return cut if process.returncode == 0 else f"{cut}\n(exit code {process.returncode})"


def arguments(call: dict[str, Any]) -> str | None:
    """The command of a tool call; None when it has none."""
    try:
        value = json.loads(call["function"]["arguments"])["command"]
    except (ValueError, KeyError, TypeError):
        return None
    return value if call["function"]["name"] == "bash" and isinstance(value, str) else None


def turn(mode: str, messages: list[dict[str, Any]], seconds: float) -> bool:
    """One question and what follows from the answer; False when that was the last."""
    if mode == "react":
        answer = ask(messages, tools=[TOOL])
        messages.append(answer)
        for call in answer.get("tool_calls") or []:
            command = arguments(call)
            out = "The tool is bash, its argument is command." if command is None else shell(command, seconds)
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": out})
        return bool(answer.get("tool_calls"))
    answer = ask(messages)
    messages.append(answer)
    blocks = BLOCK.findall(answer.get("content") or "")
    if blocks:
        out = "\n".join(shell(block, seconds) for block in blocks)
        messages.append({"role": "user", "content": out or "(nothing)"})
    return bool(blocks)


def main(mode: str) -> None:
    instruction = os.environ["MINIRLLM_INSTRUCTION"]
    messages = [{"role": "user", "content": instruction if mode == "react" else f"{instruction}\n\n{BASH}"}]
    for _ in range(int(os.environ["MINIRLLM_TURNS"])):
        if not turn(mode, messages, float(os.environ["MINIRLLM_SECONDS"])):
            break


if __name__ == "__main__":
    main(sys.argv[1])
