"""Messages <-> tokens: rendering a conversation, continuing it behind sampled tokens, reading a sampled turn back.

Owns: `Renderer`, `Stream`: everything about chat text that needs token ids: special tokens, splicing, stop strings.
Does not know: engines, HTTP; how a template writes (template) and how calls are spelled (syntaxes).
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from minirllm.errors import ContextOverflow, RequestError
from minirllm.syntaxes.calls import Tools, same_call
from minirllm.syntaxes.reader import THINK_CLOSE, THINK_OPEN, TurnReader
from minirllm.template import CALL, TOOL, ChatTemplate, without_header
from minirllm.types import Delta, Message, StopCheck

_INCOMPLETE = "\ufffd"  # how `decode` shows the first bytes of a character whose rest has not come yet


class Renderer:
    """What a session needs to speak messages to a model that speaks tokens.

    `history`: "keep" leaves past assistant turns as they were sampled; "rerender" lets the template rewrite them, and
    `extend` succeeds only where it did not. `eos_ids`: the end-of-sequence ids of the model's generation config.
    `template` overrides the tokenizer's; `today` is the date given to templates that write one; `tool_syntax` is a name
    of `SYNTAXES`, ``module:attr``, or auto for what the template turns out to write.

    Raises ModelError when there is no usable chat template, ConfigError when there is no such syntax.
    """

    eos_ids: frozenset[int]  # the given ones, the tokenizer's, and the template's ends of an assistant turn
    hidden_ids: frozenset[int]  # special tokens that are no part of an answer's text
    notes: tuple[str, ...]  # what is done in the template's place, and `problem`, one sentence each
    problem: str  # why calls cannot be read back; "" when they can

    def __init__(
        self,
        tokenizer: Any,
        history: str = "keep",
        eos_ids: Sequence[int] = (),
        *,
        template: str | None = None,
        today: datetime.date | None = None,
        tool_syntax: str = "auto",
    ):
        self.tokenizer = tokenizer
        self.history = history
        self.template = ChatTemplate(tokenizer, template, today, tool_syntax)
        ids = {token.content: id for id, token in tokenizer.added_tokens_decoder.items()}
        self._added = frozenset(ids[text] for text in self.template.added)
        self._turn_ends = frozenset(ids[text] for text in self.template.turn_ends)
        own = tokenizer.eos_token_id
        self.eos_ids = frozenset({*eos_ids, *self._turn_ends, *([] if own is None else [own])})
        markers = self.template.special & {THINK_OPEN, THINK_CLOSE, *self.template.tool_syntax.markers}
        self.markers = {ids[text]: text for text in markers}  # what only a token of its own can say
        self.hidden_ids = frozenset(ids[text] for text in self.template.special - markers) | self.eos_ids
        self.limit: int | None = None  # tokens that the model reads, where it is known
        self._longest = max(map(len, tokenizer.get_vocab()))  # characters, in the spelling of the vocabulary
        problem = (
            f"Tool calls cannot be read back: {self.template.example[:80]!r} is no call in {self.template.syntax} "
        )
        self.problem = "" if self._reads_back() else problem + "once it is tokens: say in tool_syntax how it is read."
        self.notes = (*self.template.notes, *filter(None, [self.problem]))
        self._encode_cached = lru_cache(maxsize=64)(self._encode_marked)  # first turns come again with every call

    # ---- messages -> tokens ----

    def prompt(self, messages: Sequence[Message], tools: Tools = ()) -> list[int]:
        """The conversation and the beginning of the next assistant turn, as the model is to read them.

        Special-token text inside messages and tools is encoded as ordinary text, so that content cannot forge a turn.
        Raises RequestError when the template refuses the conversation.
        """
        mark = self.template.mark(messages, tools)
        return self._encode_marked(self.template.render(messages, tools, mark=mark), mark)

    def turn(self, messages: Sequence[Message], tools: Tools = ()) -> list[int]:
        """The last message, an assistant turn, as the model is to sample it behind the prompt of those before it.

        Ends with the token that ends a turn. Raises RequestError when the template writes the turn otherwise than the
        prompt begins it.
        """
        mark = self.template.mark(messages, tools)
        begin = self.template.render(messages[:-1], tools, mark=mark)
        whole = self.template.render(messages, tools, mark=mark, generation=False)
        if not whole.startswith(begin):
            raise RequestError("The chat template writes this assistant turn otherwise than it begins one.", "messages")
        ids = self._encode_marked(whole[len(begin) :], mark)
        ends = [place for place, id in enumerate(ids, 1) if id in self.eos_ids]
        return ids[: ends[-1]] if ends else [*ids, min(self.eos_ids)]

    def extend(
        self,
        ids_so_far: Sequence[int],
        messages_so_far: Sequence[Message],
        new_messages: Sequence[Message],
        tools: Tools = (),
    ) -> list[int] | None:
        """`ids_so_far`, the end of the turn, `new_messages`, the beginning of the next turn; None: cannot be proved.

        `messages_so_far` are the very messages that `ids_so_far` were made from, the last one being the assistant turn
        whose sampled ids end `ids_so_far`. The result always starts with `ids_so_far`.
        """
        ids = list(ids_so_far)
        if not ids or not new_messages or not messages_so_far or messages_so_far[-1].role != "assistant":
            return None
        try:
            suffix = self._suffix(ids, messages_so_far, new_messages, tools) if self.history == "keep" else None
            if suffix is not None:
                return ids + suffix
            whole = self.prompt([*messages_so_far, *new_messages], tools)
        except RequestError:
            return None
        return whole if len(whole) > len(ids) and whole[: len(ids)] == ids else None

    def _suffix(
        self, ids: list[int], so_far: Sequence[Message], new: Sequence[Message], tools: Tools
    ) -> list[int] | None:
        """The tokens to put behind `ids`.

        The conversation is rendered with and without the last turn and what follows it, every assistant turn being a
        unique word. Cut at these words, both must give the same pieces: then the new messages changed nothing in front
        of the last turn, and what the template writes behind the last word belongs behind the sampled tokens.
        """
        messages = [*so_far, *new]
        mark = self.template.mark(messages, tools)
        masked, words = self.template.masked(messages, len(so_far), tools)
        shorter = masked[: len(so_far) - 1]
        before = _pieces(self.template.render(shorter, tools, mark=mark, numbered=True), words[:-1])
        after = _pieces(self.template.render(masked, tools, mark=mark, numbered=True), words)
        if not before or not after or list(map(without_header, before)) != list(map(without_header, after[:-1])):
            return None
        head = list(self._encode_cached(without_header(before[0]), mark))
        while head and head[-1] not in self._added:  # what follows the last special token may merge with the turn
            head.pop()
        tail = self._encode_marked(after[-1].lstrip(), mark)
        if not head or ids[: len(head)] != head or not tail or tail[0] not in self._added:
            return None
        ended = ids[-1] == tail[0] or (ids[-1] in self.eos_ids and tail[0] in self._turn_ends)
        return tail[1:] if ended else tail

    def encode(self, text: str, *, add_bos: bool = False) -> list[int]:
        """The ids of `text`, special tokens included; with `add_bos` it begins as the tokenizer's documents do.

        Raises ContextOverflow for a text that no `limit` tokens can hold, however long: encoding it would take seconds.
        """
        if self.limit is not None and len(text) > self.limit * self._longest:
            raise ContextOverflow(self.limit, len(text) // self._longest)
        try:
            text.encode()
        except UnicodeEncodeError:  # half a surrogate pair: JSON can carry one, UTF-8 cannot
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        return list(self.tokenizer.encode(text, add_special_tokens=add_bos, verbose=False))  # no word on length

    def _encode_marked(self, text: str, mark: str) -> list[int]:
        """The ids of a rendering, cut at the marks: no special token spans one, and they leave no trace."""
        return [id for piece in (text.split(mark) if mark else [text]) for id in self.encode(piece)]

    # ---- tokens -> messages ----

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`, special tokens included."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def token_text(self, id: int) -> str:
        """The text of one token; U+FFFD for bytes that are not a whole character."""
        return self.decode([id])

    def stream(
        self, tools: Tools = (), stops: Sequence[str] = (), *, raw: bool = False, prompt_ids: Sequence[int] = ()
    ) -> Stream:
        """Reads a turn token by token. Without `tools`, calls are ordinary text; with `raw`, reasoning is too.

        `prompt_ids`: the turn begins behind them (some templates open the reasoning in some turns only).
        """
        return Stream(self, self._reader(tools, stops, raw, prompt_ids))

    def parse(
        self,
        ids: Sequence[int],
        tools: Tools = (),
        stops: Sequence[str] = (),
        *,
        raw: bool = False,
        prompt_ids: Sequence[int] = (),
    ) -> Message:
        """A sampled turn as a message, decoded and read at one go; never raises. The same that `stream` comes to."""
        reader = self._reader(tools, stops, raw, prompt_ids)
        ids = [id for id in ids if id not in self.hidden_ids]
        text, done, begin = self.decode(ids), 0, 0
        for place, marker in ((place, self.markers[id]) for place, id in enumerate(ids) if id in self.markers):
            at = text.find(marker, done + len(self.decode(ids[begin:place])))
            begin = place + 1
            if at >= 0:
                reader.feed(text[done:at])
                reader.feed(marker, token=True)
                done = at + len(marker)
        reader.feed(text[done:])
        reader.finish()
        return reader.message()

    def _reader(self, tools: Tools, stops: Sequence[str], raw: bool, prompt_ids: Sequence[int]) -> TurnReader:
        syntax = self.template.tool_syntax if tools and not raw else None
        thinking = self.template.thinking
        if prompt_ids:
            thinking = self.decode(prompt_ids[-len(THINK_OPEN) - 8 :]).rstrip().endswith(THINK_OPEN)
        return TurnReader(syntax, tools, stops, None if raw else thinking, frozenset(self.markers.values()))

    def _reads_back(self) -> bool:
        """Whether a call, as it is written for this model, is read from its tokens."""
        stream = Stream(self, TurnReader(self.template.tool_syntax, [TOOL], tokens=frozenset(self.markers.values())))
        for id in self.encode(self.template.example):
            stream.push(id)
        stream.finish()
        calls = stream.message().tool_calls
        return len(calls) == 1 and same_call(calls[0], CALL)

    def stop_check(self, stops: Sequence[str]) -> StopCheck | None:
        """Whether the newest token completed a stop string; to be asked after every token. None without stop strings.

        Reads only as many tokens from the end as the longest stop string can span.
        """
        stops = tuple(stop for stop in stops if stop)
        if not stops:
            return None
        reach = max(len(stop.encode("utf-8", "replace")) for stop in stops) + 4  # a token of text has a byte or more

        def check(ids: Sequence[int]) -> bool:
            tail: list[int] = []
            for id in reversed(ids):
                if id not in self.hidden_ids:
                    tail.append(id)
                if len(tail) == reach:
                    break
            text = self.decode(tail[::-1])
            return any(stop in text for stop in stops)

        return check


class Stream:
    """One sampled turn, token by token: the deltas concatenate to `message()`, for any tokens. Never raises."""

    def __init__(self, renderer: Renderer, reader: TurnReader):
        self._renderer = renderer
        self._reader = reader
        self._context: list[int] = []  # the tokens decoded last: some decoders treat the first token differently
        self._context_length = 0  # characters in their text
        self._waiting: list[int] = []  # end inside a character

    def push(self, id: int) -> Delta:
        """What this token adds (often nothing: half a character, or text that may become a call)."""
        if id in self._renderer.hidden_ids:
            return Delta(0)
        self._waiting.append(id)
        text, marker = self._new_text(), self._renderer.markers.get(id, "")
        if not text or (text.endswith(_INCOMPLETE) and not marker):
            return Delta(0)
        self._context, self._waiting = self._waiting, []
        self._context_length = len(self._renderer.decode(self._context))
        if not marker or marker not in text:
            return self._reader.feed(text)
        before, _, after = text.rpartition(marker)  # white space, or half a character that stays half
        return _sum(self._reader.feed(before), self._reader.feed(marker, token=True), self._reader.feed(after))

    def finish(self) -> Delta:
        """What the end of the turn adds: everything held back."""
        rest = self._new_text() if self._waiting else ""
        self._waiting = []
        return _sum(self._reader.feed(rest), self._reader.finish())

    @property
    def stopped(self) -> str:
        """The stop string that ended the turn; "" for none."""
        return self._reader.stopped

    def message(self) -> Message:
        """The whole turn, after `finish`."""
        return self._reader.message()

    def _new_text(self) -> str:
        return self._renderer.decode(self._context + self._waiting)[self._context_length :]


def _sum(*deltas: Delta) -> Delta:
    """What they add together."""
    calls = tuple(piece for delta in deltas for piece in delta.calls)
    return Delta(0, "".join(d.text for d in deltas), "".join(d.reasoning for d in deltas), calls)


def _pieces(text: str, words: Sequence[str]) -> list[str]:
    """The text between the words; empty when a word is missing, doubled or out of order."""
    pieces = []
    for word in words:
        if text.count(word) != 1:
            return []
        piece, _, text = text.partition(word)
        pieces.append(piece)
    return [*pieces, text]
