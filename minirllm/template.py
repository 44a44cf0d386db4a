"""One chat template, as text: what it can do is found by rendering probes once, never by a model's name.

Owns: `ChatTemplate`: messages in the form this template takes (tools, system role, tool role, alternating roles), the
text it writes, the syntax in which it writes tool calls, where its assistant turns end. Does not know: token ids.
"""

from __future__ import annotations

import datetime
import hashlib
import itertools
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import jinja2

from minirllm.errors import ModelError, RequestError
from minirllm.syntaxes import SYNTAXES
from minirllm.syntaxes.calls import Tools, ToolSyntax, parsed_arguments, same_call
from minirllm.syntaxes.reader import THINK_OPEN, TurnReader
from minirllm.types import Message, ToolCall

# What a template, which is code from elsewhere, can raise on a conversation that it does not like.
_REFUSALS = (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)
_DATE_CALL = re.compile(r"""strftime_now\((?:\s*(["'])(.*?)\1\s*|[^()]*)\)""")

_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "probe_tool",
        "description": "Shows how this template writes calls.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}
_CALL = ToolCall("call_0", "probe_tool", '{"city": "New \\"Y\\"", "days": 2}')
_USER, _SYSTEM, _ANSWER = Message("user", "PROBEU"), Message("system", "PROBES"), Message("assistant", "PROBEA")
_CALLING = Message("assistant", tool_calls=(_CALL,))
_RESULT = Message("tool", "PROBER", tool_call_id="call_0", name="probe_tool")


class ChatTemplate:
    """Renders conversations with a tokenizer's chat template, standing in for what the template cannot do.

    Raises ModelError when the tokenizer has no template or the template cannot write a plain conversation.
    """

    sha256: str  # of the template's text
    date: str  # the ISO date that the template writes, constant for this object's life; "" when it writes none
    native_tools: bool  # the template itself writes tools, calls and results, in a syntax that reads back
    syntax: str  # key of `SYNTAXES`
    turn_ends: tuple[str, ...]  # special tokens that the template writes behind an assistant turn
    thinking: bool  # the beginning of a turn already opens the reasoning
    notes: tuple[str, ...]  # what is done in the template's place, one sentence each

    def __init__(self, tokenizer: Any, override: str | None = None, today: datetime.date | None = None):
        self._tokenizer = tokenizer
        texts = _texts(tokenizer, override)
        today = today or datetime.date.today()
        self.sha256 = hashlib.sha256(texts[0].encode()).hexdigest()
        self.date = today.isoformat() if any("strftime_now" in text for text in texts) else ""
        self._plain, self._with_tools = (
            _DATE_CALL.sub(lambda call: repr(today.strftime(call[2] or "%d %b %Y")), text) for text in texts
        )
        added = [token for token in tokenizer.added_tokens_decoder.values() if token.content.strip()]
        self.added = frozenset(token.content for token in added)
        self.native_tools = self._merges = self._one_call = False
        self._system = self._late_system = True
        self.syntax = "hermes"
        self._probe_turns()
        self._probe_tools()
        self.special = frozenset({token.content for token in added if token.special} | set(self.turn_ends))
        any_special = "|".join(re.escape(text) for text in sorted(self.special)) or "(?!)"
        self._special_pattern = re.compile(f"(?={any_special}).", re.DOTALL)
        self.notes = self._explain()

    def render(self, messages: Sequence[Message], tools: Tools = (), *, mark: str = "") -> str:
        """The template's text, ending in the beginning of the next assistant turn.

        With a `mark`, every special token's text inside messages and tools is broken by it behind the first character.
        Raises RequestError when the template refuses the conversation.
        """
        with _refusals():
            form = self._adapt(messages, tools)
        return self._write(form, tools if self.native_tools else (), mark=mark)

    def mark(self, messages: Sequence[Message], tools: Tools = ()) -> str:
        """A character that occurs nowhere, if the text of a special token does occur in messages or tools; else ""."""
        with _refusals():
            texts = list(_all_texts(messages, tools))
        if not any(map(self._special_pattern.search, texts)):
            return ""
        used = set().union(*texts)
        for mark in map(chr, itertools.chain(range(0xE000, 0xF900), range(0xF0000, 0x10FFFE))):  # private use
            if mark not in used:
                return mark
        raise RequestError("The messages use up every private-use character of Unicode.", "messages")

    def masked(self, messages: Sequence[Message], count: int, tools: Tools = ()) -> tuple[list[Message], list[str]]:
        """The messages, assistant turns among the first `count` replaced by words that occur nowhere; those words."""
        texts = list(_all_texts(messages, tools))
        taken = {salt for text in texts for salt in re.findall(r"TURN(\d+)X", text)}  # one pass: there may be many
        stem = next(f"TURN{salt}X" for salt in itertools.count() if str(salt) not in taken)
        masked, words = list(_numbered(messages)), []
        for index, message in enumerate(masked[:count]):
            if message.role == "assistant":
                words.append(f"{stem}{index}E")
                masked[index] = Message("assistant", words[-1])
        return masked, words

    # ---- what the template can do ----

    def _probe_turns(self) -> None:
        try:
            turn = self._write([_USER, _ANSWER, _USER])
            begin = self._write([_USER])
            closed = self._write([_USER, _ANSWER], generation=False)
        except RequestError as error:
            raise ModelError(f"{error.message} Give a template that can write a plain conversation.") from None
        if turn.count("PROBEA") != 1 or turn.count("PROBEU") != 2 or closed.count("PROBEA") != 1:
            raise ModelError("The chat template leaves out messages: give a template that writes them all.")
        self.thinking = begin.rstrip().endswith(THINK_OPEN)
        last, inner = self._first_added(closed), self._first_added(turn)
        self.turn_ends = tuple(dict.fromkeys(filter(None, (last, inner)))) if last else ()
        self._system = "PROBES" in self._attempt([_SYSTEM, _USER])
        self._late_system = "PROBES" in self._attempt([_USER, _ANSWER, _SYSTEM, _USER])
        self._merges = not self._attempt([_USER, _USER])

    def _first_added(self, text: str) -> str:
        """The added token that follows the probe's answer, or ""."""
        rest = text.partition("PROBEA")[2].lstrip()
        return max((token for token in self.added if rest.startswith(token)), key=len, default="")

    def _probe_tools(self) -> None:
        """Take the first syntax that reads back what the template writes for a call; results must appear too."""
        begin = self._attempt([_USER], [_TOOL])
        turn = self._attempt([_USER, _CALLING], [_TOOL], generation=False)
        if "probe_tool" not in begin or "PROBER" not in self._attempt([_USER, _CALLING, _RESULT], [_TOOL]):
            return
        turn = turn[_common(begin, turn) :]
        for end in self.turn_ends:
            turn = turn.partition(end)[0]
        for name, syntax in SYNTAXES.items():
            reader = TurnReader(syntax, [_TOOL], thinking=self.thinking)
            reader.feed(turn)
            reader.finish()
            read = reader.message()
            if len(read.tool_calls) == 1 and same_call(read.tool_calls[0], _CALL) and not read.content.strip():
                self.native_tools, self.syntax = True, name
                twice = replace(_CALLING, tool_calls=(_CALL, replace(_CALL, id="call_1", name="second_tool")))
                self._one_call = "second_tool" not in self._attempt([_USER, twice, _RESULT, _RESULT], [_TOOL])
                return

    def _attempt(self, messages: Sequence[Message], tools: Tools = (), generation: bool = True) -> str:
        try:
            return self._write(_numbered(messages), tools, generation)
        except RequestError:
            return ""

    def _explain(self) -> tuple[str, ...]:
        facts = {
            "No usable place for tools in the template: a Hermes-style system prompt says it.": not self.native_tools,
            "No system role in the template: the system prompt begins the first user message.": not self._system,
            "The template wants alternating roles: neighbours of one role are joined.": self._merges,
            "The template takes one call per turn: several are written as text.": self._one_call,
            "The template begins turns inside the reasoning.": self.thinking,
            f"The template writes a date: {self.date} for as long as this runs.": bool(self.date),
        }
        return tuple(sentence for sentence, holds in facts.items() if holds)

    # ---- messages in the form this template takes ----

    def _adapt(self, messages: Sequence[Message], tools: Tools) -> list[Message]:
        messages = _numbered(messages)
        if not self.native_tools:
            messages = _without_tool_role(messages)
        elif self._one_call:
            several = SYNTAXES[self.syntax]
            messages = [_spelled(one, several) if len(one.tool_calls) > 1 else one for one in messages]
        lead = next((index for index, one in enumerate(messages) if one.role != "system"), len(messages))
        system = [one.content for one in messages[:lead]]
        if tools and not self.native_tools:
            system.append(hermes_instructions(tools))
        rest = messages[lead:]
        if not self._late_system:
            rest = [replace(one, role="user") if one.role == "system" else one for one in rest]
        if system:
            head = Message("system" if self._system else "user", "\n\n".join(system))
            joins = head.role == "user" and rest[:1] and rest[0].role == "user"
            rest = [_joined(head, rest[0]), *rest[1:]] if joins else [head, *rest]
        if self._merges:
            alternating: list[Message] = []
            for one in rest:
                if alternating and one.role == alternating[-1].role and one.role in ("user", "assistant"):
                    alternating[-1] = _joined(alternating[-1], one)
                else:
                    alternating.append(one)
            rest = alternating
        return rest

    def _write(self, messages: Sequence[Message], tools: Tools = (), generation: bool = True, mark: str = "") -> str:
        with _refusals():
            form: Any = [_as_dict(message) for message in messages]
            shown: Any = list(tools) or None
            if mark:
                form, shown = self._broken(form, mark), self._broken(shown, mark)
            text = self._tokenizer.apply_chat_template(
                form,
                tools=shown,
                chat_template=self._with_tools if shown else self._plain,
                add_generation_prompt=generation,
                tokenize=False,
            )
        return str(text)

    def _broken(self, value: Any, mark: str) -> Any:
        if isinstance(value, str):
            return self._special_pattern.sub(lambda first: first[0] + mark, value)
        if isinstance(value, dict):
            return {self._broken(key, mark): self._broken(item, mark) for key, item in value.items()}
        return [self._broken(item, mark) for item in value] if isinstance(value, list) else value


@contextmanager
def _refusals() -> Iterator[None]:
    """Whatever a template, or a shape it was not made for, raises is the request's fault: HTTP 400."""
    try:
        yield
    except _REFUSALS as error:
        reason = str(error).strip() or type(error).__name__
        raise RequestError(f"The model's chat template refuses this conversation: {reason}", "messages") from error


def hermes_instructions(tools: Tools) -> str:
    """The system-prompt block for a template that has no place for tools. Results come back as <tool_response>."""
    lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    return (
        "You can call functions to help with the request. Their signatures are between <tools> and </tools>, "
        f"one JSON object per line:\n<tools>\n{lines}\n</tools>\n"
        "To call a function, write its name and its arguments as one JSON object between <tool_call> and </tool_call>, "
        "one block per call:\n<tool_call>\n"
        '{"name": "the function\'s name", "arguments": {"an argument": "its value"}}\n</tool_call>\n'
        "What a function returns is given to you between <tool_response> and </tool_response>."
    )


def _texts(tokenizer: Any, override: str | None) -> tuple[str, str]:
    """The template without and with tools; they are one text for most models."""
    found = override or getattr(tokenizer, "chat_template", None)
    if isinstance(found, dict):
        found = (found.get("default"), found.get("tool_use", found.get("default")))
    plain, with_tools = found if isinstance(found, tuple) else (found, found)
    if not plain:
        raise ModelError(
            "This model's tokenizer has no chat template, so messages cannot be given to it: "
            "use an instruction-tuned model, or put a chat_template.jinja into its folder."
        )
    return plain, with_tools


def _numbered(messages: Sequence[Message]) -> list[Message]:
    """Call ids replaced by their position, so that a client's random ids never reach the model; results get a name.

    Nine digits, because some templates insist on nine characters.
    """
    known: dict[str | None, tuple[str, str]] = {}
    numbered, count = [], 0
    for message in messages:
        if message.tool_calls:
            calls = []
            for call in message.tool_calls:
                known[call.id] = (f"{count:09d}", call.name)
                calls.append(replace(call, id=f"{count:09d}"))
                count += 1
            message = replace(message, tool_calls=tuple(calls))
        elif message.role == "tool" and message.tool_call_id in known:
            id, name = known[message.tool_call_id]
            message = replace(message, tool_call_id=id, name=message.name or name)
        numbered.append(message)
    return numbered


def _spelled(message: Message, syntax: ToolSyntax) -> Message:
    """The calls of a message as text behind its content."""
    text = "\n".join(part for part in (message.content, syntax.write(message.tool_calls)) if part)
    return replace(message, content=text, tool_calls=())


def _without_tool_role(messages: Sequence[Message]) -> list[Message]:
    """Calls as Hermes text; the results that follow each other as one user message."""
    plain: list[Message] = []
    in_results = False
    for message in messages:
        if message.role == "tool":
            text = f"<tool_response>\n{message.content}\n</tool_response>"
            if in_results:
                plain[-1] = replace(plain[-1], content=f"{plain[-1].content}\n{text}")
            else:
                plain.append(Message("user", text))
        else:
            plain.append(_spelled(message, SYNTAXES["hermes"]) if message.tool_calls else message)
        in_results = message.role == "tool"
    return plain


def _common(a: str, b: str) -> int:
    """The length of the common beginning."""
    return next((index for index, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _joined(a: Message, b: Message) -> Message:
    text = "\n\n".join(part for part in (a.content, b.content) if part)
    return replace(a, content=text, tool_calls=a.tool_calls + b.tool_calls)


def _all_texts(messages: Sequence[Message], tools: Tools) -> Iterator[str]:
    for message in messages:
        yield message.content
        yield message.reasoning
        for call in message.tool_calls:
            yield call.name
            yield call.arguments
            yield json.dumps(parsed_arguments(call.arguments), ensure_ascii=False)  # its escapes resolved
        yield message.name or ""
    yield json.dumps(list(tools), ensure_ascii=False)


def _as_dict(message: Message) -> dict[str, Any]:
    form: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.reasoning:
        form["reasoning_content"] = message.reasoning
    if message.tool_calls:
        form["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": _arguments(call)}}
            for call in message.tool_calls
        ]
    if message.role == "tool":
        form |= {key: value for key, value in (("tool_call_id", message.tool_call_id), ("name", message.name)) if value}
    return form


def _arguments(call: ToolCall) -> Any:
    """Templates take arguments as an object; text that is none stays text."""
    parsed = parsed_arguments(call.arguments)
    return call.arguments if parsed is None else parsed
