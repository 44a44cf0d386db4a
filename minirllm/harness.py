"""Agent programs as they come (Claude Code, mini-swe-agent, a shell script), each described in one file, run as agents.

Owns: what a harness file says, how one is found, how a program is run for an episode: what it is given, a minimal
environment, its end with all that it started. Does not know: how programs are installed (tools/install.py), the
programs themselves, where they work (sandboxes/), sessions, tokens.

A harness file is ``harnesses/<name>.py`` (or anything named as ``module:attr``, a path, or an entry point of the group
``minirllm.harnesses``) with ``HARNESS = Harness(...)``. A file may also define ``configured(text) -> Harness``, for
``--harness NAME:text``. The fields of `Harness` say what it must bring; `launch` writes nothing and starts nothing.

Exit code, the tails of what was printed and the text files of the work folder are in ``episode.artifacts``. A program
runs with the rights of this user, unless it is put into a sandbox: there it sees itself and its interpreter, read-only,
and reaches the session's endpoint and nothing else.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from minirllm.config import Config, nearest, refuse
from minirllm.errors import ConfigError, UserError
from minirllm.files import cache_root
from minirllm.flow import AgentFlow, TaskModule, find_name, import_name, import_path, names
from minirllm.sandboxes import BASH, WORK, Result, Sandbox, Spec, kind, pool, program
from minirllm.sandboxes.kept import Recipe
from minirllm.sandboxes.place import Place, read_files
from minirllm.sandboxes.pool import Pool
from minirllm.types import AgentConfig, Episode, ModelRequest, Task, TerminationReason, Trajectory
from minirllm.watchdog import Deadline

SHELL = "echo made > made.txt"  # what the script of a harness has its program do, see `Harness.script`
PROOF = ("made.txt", "made\n")  # the file that is then there
TAIL = 16_384  # bytes kept of each output
EARLY = 1.0  # seconds before the episode's deadline at which its program is ended, so that what it left is kept
MARKER = "installed.json"


@dataclass(frozen=True)
class Call:
    """A tool call in a script."""

    name: str
    arguments: dict[str, Any]


Turn = str | Call | tuple[Call, ...]  # plain text, a tool call, or several at once


@dataclass(frozen=True)
class Context:
    """What a program is launched with. `work` is its working folder, `home` its own, empty HOME."""

    instruction: str
    work: Path
    home: Path
    url: str  # without /v1: http://127.0.0.1:PORT/sessions/ID
    key: str = field(repr=False)  # the session's, the only secret a program ever has
    model: str = "tiny"
    window: int = 2048  # tokens of prompt and answer
    max_tokens: int = 4096  # of one answer
    seconds: float = 600.0  # until the deadline
    full: bool = False  # as its users run it, rather than in the leanest useful form
    date: str = ""  # the run's, YYYY-MM-DD: programs that tell the model the date should tell it this one
    folder: Path = Path()  # where it is installed
    tmp: Path = Path("/tmp")  # for temporary files
    python: str = sys.executable  # for scripts of the harness's own; it has the standard library
    files: tuple[str, ...] = ()  # those of the task, by then in `work`
    servers: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # of MCP, as in an `mcpServers` of JSON
    skills: bool = False  # there are some in `Harness.skills`

    @property
    def url_v1(self) -> str:
        """The base URL of clients in the OpenAI manner."""
        return f"{self.url}/v1"

    @property
    def variables(self) -> dict[str, str]:
        """The endpoint and the task, in the names that client libraries read."""
        return {
            "OPENAI_BASE_URL": self.url_v1,
            "OPENAI_API_KEY": self.key,
            "ANTHROPIC_BASE_URL": self.url,
            "ANTHROPIC_API_KEY": self.key,
            "MINIRLLM_MODEL": self.model,
            "MINIRLLM_INSTRUCTION": self.instruction,
        }

    def program(self, name: str) -> str:
        """The path of an installed program."""
        return str(next((path for place in bins(self.folder) if (path := place / name).exists()), Path(name)))


@dataclass(frozen=True)
class Launch:
    """How a program is started: `argv` without a shell, in `Context.work`, with `env` above the minimal environment."""

    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)  # path below HOME -> text, written before the start


@dataclass(frozen=True)
class Harness:
    """One agent program."""

    name: str
    version: str
    about: str  # one line
    dialect: str  # chat, responses, messages, gemini, or none of one's own
    launch: Callable[[Context], Launch]
    script: tuple[Turn, ...]  # replies by which `harness check` has it run SHELL in its work folder, and finish
    asides: tuple[tuple[str, str], ...] = ()  # (piece of a prompt, reply) for side calls such as titles, in any order
    pip: tuple[str, ...] = ()  # pinned requirements, installed into an environment of its own
    npm: tuple[str, ...] = ()  # pinned npm packages
    requires: tuple[str, ...] = ()  # programs on PATH ("tmux"), "python>=3.12", "node>=22"
    prompt: str = ""  # how long its prompts are
    auxiliary: Callable[[ModelRequest], str | None] | None = None  # the kind of a call that is the program's own
    servers: tuple[str, ...] = ()  # the kinds of MCP servers that it can be given: stdio, http, sse
    skills: str = ""  # the folder below HOME in which it looks for skills, if it can be given some
    answer: Callable[[Result], str] | None = None  # what is read as the answer, if not the model's last words

    @property
    def folder(self) -> Path:
        """Where it is, or would be, installed."""
        return cache_root() / "harnesses" / f"{self.name}-{self.version}"

    def receipt(self) -> str:
        """What an installation leaves behind when it is whole, and of what."""
        return json.dumps({"pip": self.pip, "npm": self.npm}) + "\n"

    @property
    def installed(self) -> bool:
        """Whether it can be launched as far as packages go."""
        if not (self.pip or self.npm):
            return True
        try:
            return (self.folder / MARKER).read_text() == self.receipt()
        except OSError:
            return False


def bins(folder: Path) -> list[Path]:
    """Where installed programs lie."""
    return [folder / "bin", folder / "node_modules" / ".bin"]


def find(text: str) -> Harness:
    """The harness that `text` names: a name, ``NAME:text`` where its file takes one, a path, or ``module:attr``.

    Raises UserError saying what there is.
    """
    head, colon, rest = text.partition(":")
    if text.endswith(".py"):
        found: Any = import_path(Path(text), "Harness")
    elif (found := find_name("harnesses", head.replace("-", "_"))) is None:
        known = [name.replace("_", "-") for name in names("harnesses")]
        if not colon and "." not in head:
            others = f"give one of {', '.join(known)}, a path ending in .py, or module:attr"
            raise ConfigError(f"There is no harness {head!r}{nearest(head, known)}: {others}.")
        found, colon = import_name(text, "Harness"), ""
    if colon and not hasattr(found, "configured"):
        raise ConfigError(f"Harness {head} takes nothing behind its name, got {rest!r}.")
    harness = found.configured(rest) if colon else getattr(found, "HARNESS", found)
    if not isinstance(harness, Harness):
        raise ConfigError(f"Harness {text} must define HARNESS = Harness(...), got {type(harness).__name__}.")
    return harness


def agent(task: TaskModule, config: Config) -> AgentFlow:
    """Who acts in a run: the task's own agent, or ``config.harness``. Raises UserError when there is none to be had."""
    if task.host is not None:
        return task.host(config)
    if not config.sandbox:
        refuse("no sandbox", config, "setup", "snapshots", "warm")
    if config.harness:
        return flow(find(config.harness), config.harness_full, pool.of(config))
    if config.sandbox:
        raise ConfigError(
            "A sandbox is for an agent program: choose one, as in --harness bash, or leave --sandbox out."
        )
    refuse("the task's own agent", config, "harness_full")
    return task.agent()


def check_installed(harness: Harness, sandbox: str = "") -> None:
    """Raises UserError when the program is not installed, or cannot run in this sandbox."""
    if not harness.installed:
        raise UserError(f"Harness {harness.name} is not installed: run `minirllm harness install {harness.name}`.")
    if sandbox and not kind(sandbox).doors:
        raise UserError(
            f"An agent needs files and a port of this machine, which {sandbox} does not see: take docker or local."
        )


def flow(harness: Harness, full: bool = False, boxes: Pool | None = None) -> AgentFlow:
    """An agent that runs the program. Raises UserError when it is not installed."""
    check_installed(harness, boxes.kind if boxes is not None else "")

    async def run(task: Task, config: AgentConfig) -> Episode:
        return await episode(harness, task, config, full=full, boxes=boxes)

    made = AgentFlow(run, harness.name, harness.auxiliary)
    made.facts = {"harness": f"{harness.name} {harness.version}"}
    if boxes is not None:
        made.facts |= {"sandbox": boxes.kind}
        made.recipes = lambda tasks, url: [recipe(harness, boxes, needs(harness, url, full))] * len(tasks)
        made.ahead = lambda tasks, url: boxes.ahead(lambda: made.recipes(tasks, url))
    return made


def needs(harness: Harness, url: str, full: bool) -> Spec:
    """A sandbox in which the program sees itself and this endpoint. Reads files."""
    return inside(harness, context_of(harness, "", AgentConfig(url, ""), full)).spec


def recipe(harness: Harness, boxes: Pool, spec: Spec) -> Recipe:
    """Of the sandboxes in which it works."""
    return boxes.recipe(spec, made_of=installed(harness), about=f"harness {harness.name}")


def installed(harness: Harness) -> tuple[str, ...]:
    """What a snapshot made for it depends on: its version and what is installed, if anything is."""
    return (harness.version, harness.receipt()) if harness.pip or harness.npm else ()


async def episode(
    harness: Harness, task: Task, config: AgentConfig, *, full: bool = False, boxes: Pool | None = None
) -> Episode:
    """One run of the program, which ended or had to be ended (TIMEOUT). Raises UserError when it could not be a run."""
    deadline = Deadline(max(EARLY, config.metadata.get("timeout", 600.0) - EARLY))
    context = replace(
        context_of(harness, text_of(task), config, full),
        seconds=deadline.remaining(),
        files=tuple(task.metadata.get("files", {})),
    )
    if boxes is not None:
        return await _inside(harness, task, context, boxes, deadline)
    split = "eval" if config.is_validation else f"train{config.metadata.get('ahead') or ''}"
    place = await asyncio.to_thread(Place, split, task.id, config.metadata.get("rollout_idx", 0))
    try:
        context = replace(
            context, work=place.work, home=place.home, tmp=place.home.with_name("tmp"), python=sys.executable
        )
        launch = await asyncio.to_thread(harness.launch, context)
        await asyncio.to_thread(place.fill, task.metadata.get("files", {}), launch.files)
        done = await place.run(launch.argv, environment(context, launch), deadline, TAIL)
        files, left_out = await asyncio.to_thread(read_files, place.work)
    finally:
        await asyncio.to_thread(place.close)
    return _told(harness, done, {"files": files, "files_left_out": left_out}, deadline)


def context_of(harness: Harness, instruction: str, config: AgentConfig, full: bool) -> Context:
    """What the program is launched with in a sandbox."""
    return Context(
        instruction=instruction,
        work=Path(WORK),
        home=Path(program.HOME),
        url=config.base_url.removesuffix("/v1"),
        key=config.api_key,
        model=config.model,
        window=config.metadata.get("max_context", Context.window),
        max_tokens=config.metadata.get("max_tokens") or Context.max_tokens,
        full=full,
        date=config.metadata.get("date", ""),
        folder=harness.folder,
        python=program.PYTHON,
    )


async def _inside(harness: Harness, task: Task, context: Context, boxes: Pool, deadline: Deadline) -> Episode:
    """The same in a sandbox, from which the session's endpoint can be reached, and nothing else."""
    start = await asyncio.to_thread(inside, harness, context)
    async with boxes.take(recipe(harness, boxes, start.spec)) as box:
        await program.lay(box, task.metadata.get("files", {}), {})
        done = await start.run(box, deadline.remaining())
        files, left_out = await program.gather(box)
    return _told(harness, done, {"files": files, "files_left_out": left_out}, deadline)


@dataclass(frozen=True)
class Inside:
    """The start of a program in a sandbox: `spec` is one in which it sees itself and its endpoint."""

    launch: Launch
    spec: Spec
    env: Mapping[str, str]
    cwd: str

    async def run(self, box: Sandbox, seconds: float, user: str | None = None) -> Result:
        """Run it, for `seconds` at most; of what it prints the tails are kept."""
        await program.lay(box, {}, self.launch.files)
        if user is not None and box.superuser is not None:
            await box.execute((BASH, "-c", program.GIVE, "_", user), timeout=seconds, cwd="/", user=box.superuser)
        return await box.execute(
            self.launch.argv, timeout=seconds, env=self.env, cwd=self.cwd, output=TAIL, tail=True, user=user
        )


def inside(harness: Harness, context: Context) -> Inside:
    """How the program is started in a sandbox, in ``context.work``. Reads files."""
    launch, places = harness.launch(context), bins(context.folder)
    spec, path = program.spec([launch.argv[0], *harness.requires], context.folder, places, context.url)
    env = {**environment(context, launch), "PATH": path, **launch.env}
    return Inside(launch, spec, env, str(context.work))


def _told(harness: Harness, done: Result, artifacts: dict[str, Any], deadline: Deadline) -> Episode:
    """The episode that a program which ended so, or had to be ended, makes."""
    how = ending(done, deadline.seconds + EARLY)
    artifacts |= kept(done) | {"ended": f"{harness.name} {how}"}
    result = Episode(trajectories=[Trajectory()], artifacts=artifacts)
    if done.timed_out:
        result.termination_reason, result.reason = TerminationReason.TIMEOUT, f"agent {how}"
    elif harness.answer is not None:
        artifacts["answer"] = harness.answer(done)
    return result


def kept(done: Result) -> dict[str, Any]:
    """What of a program's end is kept with the episode."""
    return {"exit_code": done.exit_code, "stdout": done.stdout, "stderr": done.stderr}


def ending(done: Result, seconds: float) -> str:
    """How a program ended that had so many seconds, in words."""
    if done.timed_out:
        return f"did not end within {seconds:.3g} s"
    last = (done.stderr.strip() or done.stdout.strip()).rpartition("\n")[2][:300]
    return f"ended with exit code {done.exit_code}" + (f", saying {last!r}" if last else "")


def text_of(task: Task) -> str:
    """The instruction; of one in parts, those that are text."""
    if isinstance(task.instruction, str):
        return task.instruction
    return "\n".join(part["text"] for part in task.instruction if isinstance(part.get("text"), str))


def environment(context: Context, launch: Launch) -> dict[str, str]:
    """All that the program sees. Nothing of this process's own environment but PATH: no keys, no proxies."""
    path = os.pathsep.join([*map(str, bins(context.folder)), os.environ.get("PATH", os.defpath)])
    return {
        "PATH": path,
        "HOME": str(context.home),
        "TMPDIR": str(context.tmp),
        "LANG": "C.UTF-8",
        "TZ": "UTC",
        "NO_PROXY": "*",
        "no_proxy": "*",
        "PYTHONHASHSEED": "0",  # the order of sets must not differ between runs
        **launch.env,
    }
