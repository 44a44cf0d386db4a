"""Messages <-> tokens: rendering a conversation, continuing it behind sampled tokens, reading a sampled turn back.

Owns: `Renderer`, `Stream`: everything about chat text that needs token ids: special tokens, splicing, stop strings.
Does not know: engines, HTTP; how a template writes (template) and how calls are spelled (syntaxes).
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from minirllm.errors import ContextOverflow, RequestError
from minirllm.syntaxes import SYNTAXES
from minirllm.syntaxes.calls import Tools
from minirllm.syntaxes.reader import THINK_CLOSE, THINK_OPEN, TurnReader
from minirllm.template import ChatTemplate
from minirllm.types import Delta, Message, StopCheck

_THINK_HEADER = re.compile(rf"{THINK_OPEN}\s*(?:{THINK_CLOSE})?$")
_INCOMPLETE = "\ufffd"  # how `decode` shows the first bytes of a character whose rest has not come yet


class Renderer:
    """What a session needs to speak messages to a model that speaks tokens.

    `history`: "keep" leaves past assistant turns as they were sampled; "rerender" lets the template rewrite them, and
    `extend` succeeds only where it did not. `eos_ids`: the end-of-sequence ids of the model's generation config.
    `template` overrides the tokenizer's; `today` is the date given to templates that write one.

    Raises ModelError when there is no usable chat template.
    """

    eos_ids: frozenset[int]  # the given ones, the tokenizer's, and the template's ends of an assistant turn
    hidden_ids: frozenset[int]  # special tokens that are no part of an answer's text

    def __init__(
        self,
        tokenizer: Any,
        history: str = "keep",
        eos_ids: Sequence[int] = (),
        *,
        template: str | None = None,
        today: datetime.date | None = None,
    ):
        self.tokenizer = tokenizer
        self.history = history
        self.template = ChatTemplate(tokenizer, template, today)
        ids = {token.content: id for id, token in tokenizer.added_tokens_decoder.items()}
        self._added = frozenset(ids[text] for text in self.template.added)
        self._turn_ends = frozenset(ids[text] for text in self.template.turn_ends)
        own = tokenizer.eos_token_id
        self.eos_ids = frozenset({*eos_ids, *self._turn_ends, *([] if own is None else [own])})
        syntax = SYNTAXES[self.template.syntax]
        markers = " ".join((THINK_OPEN, THINK_CLOSE, *syntax.opens, syntax.close or "", *syntax.inner))
        hidden = frozenset(ids[text] for text in self.template.special if text not in markers)
        self.hidden_ids = hidden | self.eos_ids
        self.limit: int | None = None  # tokens that the model reads, where it is known
        self._longest = max(map(len, tokenizer.get_vocab()))  # characters, in the spelling of the vocabulary
        self._encode_cached = lru_cache(maxsize=64)(self._encode_marked)  # first turns come again with every call

    # ---- messages -> tokens ----

    def prompt(self, messages: Sequence[Message], tools: Tools = ()) -> list[int]:
        """The conversation and the beginning of the next assistant turn, as the model is to read them.

        Special-token text inside messages and tools is encoded as ordinary text, so that content cannot forge a turn.
        Raises RequestError when the template refuses the conversation.
        """
        mark = self.template.mark(messages, tools)
        return self._encode_marked(self.template.render(messages, tools, mark=mark), mark)

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
        before = _pieces(self.template.render(masked[: len(so_far) - 1], tools, mark=mark), words[:-1])
        after = _pieces(self.template.render(masked, tools, mark=mark), words)
        if not before or not after or list(map(_without_header, before)) != list(map(_without_header, after[:-1])):
            return None
        head = list(self._encode_cached(_without_header(before[0]), mark))
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

    def stream(self, tools: Tools = (), stops: Sequence[str] = (), *, raw: bool = False) -> Stream:
        """Reads a turn token by token. Without `tools`, calls are ordinary text; with `raw`, reasoning is too."""
        return Stream(self, self._reader(tools, stops, raw))

    def parse(self, ids: Sequence[int], tools: Tools = (), stops: Sequence[str] = (), *, raw: bool = False) -> Message:
        """A sampled turn as a message, decoded and read at one go; never raises. The same that `stream` comes to."""
        reader = self._reader(tools, stops, raw)
        reader.feed(self.decode([id for id in ids if id not in self.hidden_ids]))
        reader.finish()
        return reader.message()

    def _reader(self, tools: Tools, stops: Sequence[str], raw: bool) -> TurnReader:
        syntax = SYNTAXES[self.template.syntax] if tools and not raw else None
        return TurnReader(syntax, tools, stops, thinking=None if raw else self.template.thinking)

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
        text = self._new_text()
        if not text or text.endswith(_INCOMPLETE):
            return Delta(0)
        self._context, self._waiting = self._waiting, []
        self._context_length = len(self._renderer.decode(self._context))
        return self._reader.feed(text)

    def finish(self) -> Delta:
        """What the end of the turn adds: everything held back."""
        rest = self._new_text() if self._waiting else ""
        self._waiting = []
        first, last = self._reader.feed(rest), self._reader.finish()
        return Delta(0, first.text + last.text, first.reasoning + last.reasoning, first.calls + last.calls)

    @property
    def stopped(self) -> str:
        """The stop string that ended the turn; "" for none."""
        return self._reader.stopped

    def message(self) -> Message:
        """The whole turn, after `finish`."""
        return self._reader.message()

    def _new_text(self) -> str:
        return self._renderer.decode(self._context + self._waiting)[self._context_length :]


def _pieces(text: str, words: Sequence[str]) -> list[str]:
    """The text between the words; empty when a word is missing, doubled or out of order."""
    pieces = []
    for word in words:
        if text.count(word) != 1:
            return []
        piece, _, text = text.partition(word)
        pieces.append(piece)
    return [*pieces, text]


def _without_header(piece: str) -> str:
    """Without the white space and reasoning tags that templates write, or leave out, at the beginning of a turn.

    Which of them depends on what follows; the sampled turn has its own.
    """
    return _THINK_HEADER.sub("", piece.rstrip()).rstrip()
