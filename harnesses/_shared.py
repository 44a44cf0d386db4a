"""What agent programs share: a short prompt, guarded instructions, a choice of dialects, side calls told, one loop."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from minirllm.config import nearest
from minirllm.errors import ConfigError
from minirllm.harness import Context, Launch
from minirllm.types import ModelRequest

#: What a program is told in its lean form, where it lets its own prompt be replaced.
PROMPT = "You are a coding agent. Work on the task with the tools until it is done, then say so in a sentence."

#: Loaded by Node before a program: its clock then shows the run's day, and the time that it is.
CLOCK = """\
const shift = Date.parse(process.env.MINIRLLM_DATE) - Math.floor(Date.now() / 86400000) * 86400000
if (shift) {
  const now = Date.now
  globalThis.Date = new Proxy(Date, {
    construct: (real, given, made) => Reflect.construct(real, given.length ? given : [now() + shift], made),
    apply: (real) => new real(now() + shift).toString(),
    get: (real, name) => (name === 'now' ? () => now() + shift : Reflect.get(real, name)),
  })
}
"""


def clock(context: Context) -> tuple[dict[str, str], dict[str, str]]:
    """(environment, files) by which a program that runs on Node tells the model the run's date, not today's."""
    if not context.date:
        return {}, {}
    return {"MINIRLLM_DATE": context.date, "NODE_OPTIONS": f"--require {context.home}/clock.cjs"}, {"clock.cjs": CLOCK}


def guarded(instruction: str) -> str:
    """The instruction, in a line of its own where the program would read it as an option, a file, or a command."""
    return f"\n{instruction}" if instruction.lstrip().startswith(("-", "@", "/", "!")) else instruction


def loop(mode: str) -> Callable[[Context], Launch]:
    """How _loop.py is launched: at most 30 turns, and 60 seconds for a command."""
    program = Path(__file__).with_name("_loop.py")

    def launch(context: Context) -> Launch:
        env = {**context.variables, "MINIRLLM_TURNS": "30", "MINIRLLM_SECONDS": "60"}
        argv = (context.python, "-I", str(context.home / ".loop.py"), mode)
        return Launch(argv, env, {".loop.py": program.read_text(encoding="utf-8")})

    return launch


def known(program: str, dialect: str, dialects: Iterable[str]) -> str:
    """`dialect`, if it is one of these. Raises ConfigError naming them."""
    there = list(dialects)
    if dialect not in there:
        near = nearest(dialect, there)
        raise ConfigError(f"{program} has no dialect {dialect!r}{near}: give {', '.join(there[:-1])} or {there[-1]}.")
    return dialect


def side_calls(beginnings: Mapping[str, str]) -> Callable[[ModelRequest], str | None]:
    """Tells a program's own calls by how their first message (the system's) or their last begins: kind -> words."""

    def auxiliary(request: ModelRequest) -> str | None:
        messages = request.messages or []
        ends = [message.content.lstrip() for message in (*messages[:1], *messages[-1:])]
        return next((kind for kind, words in beginnings.items() if any(end.startswith(words) for end in ends)), None)

    return auxiliary
