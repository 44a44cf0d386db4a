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
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import jinja2

from minirllm.config import find
from minirllm.errors import ConfigError, ModelError, RequestError
from minirllm.syntaxes import SYNTAXES
from minirllm.syntaxes.calls import Tools, ToolSyntax, parsed_arguments, same_call
from minirllm.syntaxes.prompt import instructions, results_as_users, spelled
from minirllm.syntaxes.reader import THINK_CLOSE, THINK_OPEN, TurnReader
from minirllm.tree import agreement
from minirllm.types import Message, ToolCall

# What a template, which is code from elsewhere, can raise on a conversation that it does not like.
_REFUSALS = (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)
_THINK_HEADER = re.compile(rf"{THINK_OPEN}\s*(?:{THINK_CLOSE})?$")
_DATE_CALL = re.compile(r"""strftime_now\((?:\s*(["'])(.*?)\1\s*|[^()]*)\)""")

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "probe_tool",
        "description": "Shows how this model calls a function.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}
CALL = ToolCall("call_0", "probe_tool", '{"city": "New \\"Y\\"", "days": 2}')
_PLAIN = (replace(CALL, arguments='{"city": "Rome"}'), replace(CALL, arguments='{"days": 2}'))  # nothing to quote
_USER, _SYSTEM, _ANSWER = Message("user", "PROBEU"), Message("system", "PROBES"), Message("assistant", "PROBEA")
_RESULT = Message("tool", "PROBER", tool_call_id="call_0", name="probe_tool")


class ChatTemplate:
    """Renders conversations with a tokenizer's chat template, standing in for what the template cannot do.

    Raises ModelError when the tokenizer has no template or the template cannot write a plain conversation.
    """

    sha256: str  # of the template's text
    date: str  # the ISO date that the template writes, constant for this object's life; "" when it writes none
    lists_tools: bool  # the template itself tells the model of its tools; else `syntaxes.prompt` does
    writes_calls: bool  # the template itself writes calls, so that they read back; else they are content
    tool_role: bool  # the template itself writes results; else they are user messages
    syntax: str  # the name of `tool_syntax`
    tool_syntax: ToolSyntax
    example: str  # the turn of `CALL`
    turn_ends: tuple[str, ...]  # special tokens that the template writes behind an assistant turn
    thinking: bool  # the beginning of a turn already opens the reasoning
    notes: tuple[str, ...]  # what is done in the template's place, one sentence each

    def __init__(
        self,
        tokenizer: Any,
        override: str | None = None,
        today: datetime.date | None = None,
        tool_syntax: str = "auto",
    ):
        """Raises ConfigError for a `tool_syntax` that there is not."""
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
        self._merges = self._one_call = self._text_arguments = self._null_content = False
        self._system = self._late_system = True
        self._use("hermes" if tool_syntax == "auto" else tool_syntax)
        self._probe_turns()
        self._probe_tools(SYNTAXES if tool_syntax == "auto" else [tool_syntax])
        self.special = frozenset({token.content for token in added if token.special} | set(self.turn_ends))
        any_special = "|".join(re.escape(text) for text in sorted(self.special)) or "(?!)"
        self._special_pattern = re.compile(f"(?={any_special}).", re.DOTALL)
        self.notes = self._explain()

    def render(
        self,
        messages: Sequence[Message],
        tools: Tools = (),
        *,
        mark: str = "",
        numbered: bool = False,
        generation: bool = True,
    ) -> str:
        """The template's text, ending in the beginning of the next assistant turn, unless `generation` is off.

        With a `mark`, every special token's text inside messages and tools is broken by it behind the first character.
        `numbered`: the messages are from `masked`. Raises RequestError when the template refuses the conversation.
        """
        with _refusals():
            form = messages if numbered else self._numbered(messages)
            if mark:
                form, tools = [self._unforged(one, mark) for one in form], self._broken(list(tools), mark)
            form = self._adapt(form, tools)
        return self._write(form, tools if self.lists_tools else (), generation, mark)

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
        masked, words = self._numbered(messages), []
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

    def _use(self, name: str) -> None:
        syntax = find("tool syntax", name, SYNTAXES)
        if not isinstance(syntax, ToolSyntax):
            raise ConfigError(f"The tool syntax {name!r} is no minirllm.syntaxes.calls.ToolSyntax.")
        self.syntax, self.tool_syntax = name, syntax

    def _probe_tools(self, names: Iterable[str]) -> None:
        """Take the first syntax that reads back what the template writes for a call, and see what else it does."""
        chosen, known = self.syntax, True
        self.writes_calls = self._reads_back([CALL], names)
        if not self.writes_calls and not self._reads_back(_PLAIN, names):  # else it is known, but not always readable
            self._use(chosen)
            self._text_arguments = self._null_content = known = False
        if not self.writes_calls:
            self.example = self.tool_syntax.write([CALL])
        asked = [[_USER], *([[_SYSTEM, _USER]] if self._system else [])]
        self.lists_tools = known and all("probe_tool" in self._attempt(messages, [TOOL]) for messages in asked)
        shown = [TOOL] if self.lists_tools else []
        calling = [_USER, _calling(CALL) if self.writes_calls else _ANSWER]
        result, other = (self._attempt([*calling, replace(_RESULT, role=role)], shown) for role in ("tool", "PROBEX"))
        self.tool_role = "PROBER" in result and (known or result != other.replace("PROBEX", "tool"))  # no mere name
        twice = _calling(CALL, replace(CALL, id="call_1", name="second_tool"))
        self._one_call = "second_tool" not in self._attempt([_USER, twice, _RESULT, _RESULT], shown)

    def _reads_back(self, calls: Sequence[ToolCall], names: Iterable[str]) -> bool:
        """Whether one of these syntaxes reads one of these calls as the template writes it, in one of the ways to say
        it to a template: arguments as an object or as text, content empty or none. Leaves syntax and way as found."""
        begin = without_header(self._attempt([_USER], [TOOL]))
        for call, self._text_arguments, self._null_content in itertools.product(calls, (False, True), (False, True)):
            for name in names:
                self._use(name)
                turn = self._attempt([_USER, _calling(call)], [TOOL], generation=False)
                if self._reads(turn[agreement(begin, turn) :], call):
                    return True
        return False

    def _reads(self, turn: str, call: ToolCall) -> bool:
        """Whether this is the turn of a call, and nothing else."""
        for end in self.turn_ends:
            turn, _, rest = turn.partition(end)
            if rest.strip():
                return False
        self.example = turn
        reader = TurnReader(self.tool_syntax, [TOOL])
        reader.feed(turn)
        reader.finish()
        read = reader.message()
        return len(read.tool_calls) == 1 and same_call(read.tool_calls[0], call) and not read.content.strip()

    def _attempt(self, messages: Sequence[Message], tools: Tools = (), generation: bool = True) -> str:
        try:
            return self._write(self._numbered(messages), tools, generation)
        except RequestError:
            return ""

    def _explain(self) -> tuple[str, ...]:
        syntax, listed, written = self.syntax, not self.lists_tools, not self.writes_calls
        facts = {
            f"No usable list of tools in the template: the system prompt has one, and calls in {syntax}.": listed,
            f"No usable way to write calls in the template: they are content, in {syntax}.": written,
            "No tool role in the template: results are user messages.": not self.tool_role,
            "No system role in the template: the system prompt begins the first user message.": not self._system,
            "The template wants alternating roles: neighbours of one role are joined.": self._merges,
            "The template takes one call per turn: several are written as text.": self.writes_calls and self._one_call,
            "The template begins turns inside the reasoning.": self.thinking,
            f"The template writes a date: {self.date} for as long as this runs.": bool(self.date),
        }
        return tuple(sentence for sentence, holds in facts.items() if holds)

    # ---- messages in the form this template takes ----

    def _adapt(self, messages: Sequence[Message], tools: Tools) -> list[Message]:
        by_template = (1 if self._one_call else sys.maxsize) if self.writes_calls else 0
        messages = [spelled(one, self.tool_syntax) if len(one.tool_calls) > by_template else one for one in messages]
        if not self.tool_role:
            messages = results_as_users(messages)
        lead = next((index for index, one in enumerate(messages) if one.role != "system"), len(messages))
        system = [one.content for one in messages[:lead]]
        if tools and not self.lists_tools:
            system.append(instructions(tools, self.tool_syntax, tagged=not self.tool_role))
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
            form = [self._as_dict(message, mark) for message in messages]
            shown = list(tools) or None
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

    def _unforged(self, message: Message, mark: str) -> Message:
        calls = [
            ToolCall(*(self._broken(text, mark) for text in (call.id, call.name, call.arguments)))
            for call in message.tool_calls
        ]
        keys = ("content", "reasoning", "name", "tool_call_id")
        texts = {key: self._broken(getattr(message, key) or "", mark) for key in keys}
        return replace(message, tool_calls=tuple(calls), **texts)

    def _as_dict(self, message: Message, mark: str) -> dict[str, Any]:
        form: dict[str, Any] = {"role": message.role, "content": message.content}
        if message.reasoning:
            form["reasoning_content"] = message.reasoning
        if message.tool_calls:
            form["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in message.tool_calls
            ]
            for call in form["tool_calls"] if not self._text_arguments else []:
                parsed = parsed_arguments(call["function"]["arguments"])  # text that is no object stays text
                if parsed is not None:
                    call["function"]["arguments"] = self._broken(parsed, mark) if mark else parsed
            form["content"] = message.content or (None if self._null_content else "")
        if message.role == "tool":
            named = (("tool_call_id", message.tool_call_id), ("name", message.name))
            form |= {key: value for key, value in named if value}
        return form

    def _numbered(self, messages: Sequence[Message]) -> list[Message]:
        """Call ids replaced by their position: a client's random ids never reach the model. Results get a name."""
        known: dict[str | None, tuple[str, str]] = {}
        numbered: list[Message] = []
        count = itertools.count()
        for message in messages:
            if message.tool_calls:
                calls = []
                for call in message.tool_calls:
                    id = self.tool_syntax.call_id.format(index=next(count), name=call.name)
                    known[call.id] = (id, call.name)
                    calls.append(replace(call, id=id))
                message = replace(message, tool_calls=tuple(calls))
            elif message.role == "tool" and message.tool_call_id in known:
                id, name = known[message.tool_call_id]
                message = replace(message, tool_call_id=id, name=message.name or name)
            numbered.append(message)
        return numbered


@contextmanager
def _refusals() -> Iterator[None]:
    """Whatever a template, or a shape it was not made for, raises is the request's fault: HTTP 400."""
    try:
        yield
    except _REFUSALS as error:
        reason = str(error).strip() or type(error).__name__
        raise RequestError(f"The model's chat template refuses this conversation: {reason}", "messages") from error


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


def _calling(*calls: ToolCall) -> Message:
    return Message("assistant", tool_calls=calls)


def without_header(piece: str) -> str:
    """Without the white space and reasoning tags that templates write, or leave out, at the beginning of a turn.

    Which of them depends on what follows; the sampled turn has its own.
    """
    return _THINK_HEADER.sub("", piece.rstrip()).rstrip()


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
        yield message.tool_call_id or ""
    yield json.dumps(list(tools), ensure_ascii=False)
