"""The real programs: `minirllm serve` before a provider, `model setup` at a terminal; who sees the key there."""

from __future__ import annotations

import asyncio
import os
import pty
import select
import signal
import subprocess
import sys
from pathlib import Path

import openai
import pytest

from minirllm import cli
from tests.upstream import HELLO, SECRET, USER, says, scripted, status

COMMAND = [sys.executable, "-m", "minirllm.cli"]


def environment(home: Path, **variables: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(Path(cli.__file__).parents[1]), "HOME": str(home), **variables}


@pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="needs /proc")
async def test_serve_before_a_provider(tmp_path: Path) -> None:
    async with scripted(status(503), says(*HELLO)) as upper:
        options = ["serve", "--base-url", upper.url, "--model", "m", "--key-env", "K", "--port", "0"]
        server = await asyncio.create_subprocess_exec(
            *COMMAND, *options, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment(tmp_path, K=SECRET)
        )
        assert server.stdout is not None
        lines = [(await server.stdout.readline()).decode().strip() for _ in range(8)]
        try:
            exports = dict(
                word.split("=", 1) for line in lines if line.startswith("export ") for word in line.split()[1:]
            )
            assert lines[2] == "model: m"
            async with openai.AsyncOpenAI(
                base_url=exports["OPENAI_BASE_URL"], api_key=exports["OPENAI_API_KEY"], max_retries=0
            ) as client:
                reply = await client.chat.completions.create(model="m", messages=[USER])
            assert reply.choices[0].message.content == "Hello"
            assert exports["ANTHROPIC_BASE_URL"] == exports["OPENAI_BASE_URL"].removesuffix("/v1")
            for file in ("cmdline", "comm", "status"):
                assert SECRET not in await asyncio.to_thread(Path(f"/proc/{server.pid}/{file}").read_text)
        finally:
            server.send_signal(signal.SIGINT)
            out, err = await server.communicate()
    assert SECRET not in "".join(lines) + out.decode() + err.decode()
    assert "answered HTTP 503" in err.decode()
    assert "Traceback" not in err.decode()
    assert upper.headers[0]["authorization"] == f"Bearer {SECRET}"


def test_setup_at_a_terminal_does_not_echo_the_key(tmp_path: Path) -> None:
    main, side = pty.openpty()
    program = subprocess.Popen(
        [*COMMAND, "model", "setup"], stdin=side, stdout=side, stderr=side, env=environment(tmp_path), close_fds=True,
        start_new_session=True,
    )  # fmt: skip
    os.close(side)
    said = ""

    def until(words: str) -> None:
        nonlocal said
        while words not in said:
            assert select.select([main], [], [], 60)[0], said
            said += os.read(main, 1000).decode()

    for question, answer in (("Provider", "groq"), ("Model", "llama"), ("Key", SECRET)):
        until(f"{question}")
        until(": ")
        os.write(main, f"{answer}\n".encode())
        said = said if question == "Key" else ""
    until("Use it: --provider active, or groq.")
    assert program.wait(60) == 0
    os.close(main)
    assert SECRET not in said
    assert f"key ...{SECRET[-4:]}" in said
    assert SECRET in (tmp_path / ".minirllm" / "config.toml").read_text()
