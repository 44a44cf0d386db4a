"""What a student said, in a teacher's tokens: where the two cut the same bytes at the same places.

Owns: the bytes of a token, the spans between common boundaries. Does not know: scores, prompts, models.

A span is a run of the student's tokens and a run of the teacher's that are the same bytes, as short as can be. The end
of the turn is one of its own: each tokenizer has its token for it. What the student sampled may be no text (the bytes
of half a character): from there on it has nothing that the teacher could read, and no span.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from minirllm.errors import TeacherError
from minirllm.models.tiny import byte_letters
from minirllm.renderer import Renderer
from minirllm.tree import agreement
from minirllm.types import Message

SPACE = "\u2581"  # how SentencePiece spells a space


class Span(NamedTuple):
    """The same bytes: tokens of the student, tokens of the teacher."""

    student: slice
    teacher: slice


class Aligner:
    """Between two tokenizers. Raises TeacherError when one of them does not say what its tokens' bytes are."""

    def __init__(self, student: Renderer, teacher: Renderer):
        self.student, self.teacher = student, teacher
        self.student_bytes, self.teacher_bytes = token_bytes(student.tokenizer), token_bytes(teacher.tokenizer)
        self.end = teacher.turn([Message("user", "x"), Message("assistant", "x")])[-1]

    def __call__(self, ids: Sequence[int]) -> tuple[list[int], list[Span]]:
        """The same answer in the teacher's tokens, and the spans, in order."""
        ended = bool(ids) and ids[-1] in self.student.eos_ids
        spoken = ids[: len(ids) - ended]
        pieces = [self.student_bytes(id) for id in spoken]
        said = b"".join(pieces)
        text = said[: _valid(said)].decode()
        answer = self.teacher.encode(text)
        found = spans(pieces, _given_back([self.teacher_bytes(id) for id in answer], text.encode()))
        if ended and len(text.encode()) == len(said):
            found.append(Span(slice(len(spoken), len(ids)), slice(len(answer), len(answer) + 1)))
            answer = [*answer, self.end]
        return answer, found


def spans(student: Sequence[bytes], teacher: Sequence[bytes]) -> list[Span]:
    """The runs between boundaries that both have, as far as both say the same."""
    ends = [list(accumulate(map(len, pieces))) for pieces in (student, teacher)]
    same = agreement(b"".join(student), b"".join(teacher))
    found, begin = [], [0, 0]
    for boundary in sorted({end for end in ends[0] if 0 < end <= same} & set(ends[1])):
        # a token without bytes belongs to those before it
        until = [max(place for place, end in enumerate(some, 1) if end == boundary) for some in ends]
        found.append(Span(slice(begin[0], until[0]), slice(begin[1], until[1])))
        begin = until
    return found


def _valid(said: bytes) -> int:
    """How many bytes are text, up to the first that are none."""
    try:
        said.decode()
    except UnicodeDecodeError as error:
        return error.start
    return len(said)


def _given_back(pieces: list[bytes], said: bytes) -> list[bytes]:
    """The teacher's pieces without the space that some tokenizers put before a text."""
    if pieces and pieces[0][:1] == b" " and said[:1] != b" ":
        return [pieces[0][1:], *pieces[1:]]
    return pieces


def token_bytes(tokenizer: Any) -> Callable[[int], bytes]:
    """The bytes of a token id; none of an id that stands for nothing. Raises TeacherError for a tokenizer that does not
    spell bytes or SentencePiece."""
    added = {id: token.content.encode() for id, token in tokenizer.added_tokens_decoder.items()}
    backend = getattr(tokenizer, "backend_tokenizer", None)
    kinds = _kinds(json.loads(backend.to_str()).get("decoder") if backend is not None else None)
    if "ByteLevel" in kinds:
        byte_of = {letter: byte for byte, letter in enumerate(byte_letters())}

        def spelled(piece: str) -> bytes:
            return bytes(byte_of[letter] for letter in piece)
    elif "ByteFallback" in kinds or "Metaspace" in kinds:

        def spelled(piece: str) -> bytes:
            if len(piece) == 6 and piece.startswith("<0x"):
                return bytes([int(piece[3:5], 16)])
            return piece.replace(SPACE, " ").encode()
    else:
        what = f"{type(tokenizer).__name__} does not say what the bytes of its tokens are"
        raise TeacherError(f"{what}, so its tokens cannot be aligned with another tokenizer's")
    known = {id: spelled(piece) for piece, id in tokenizer.get_vocab().items() if id not in added} | added
    return lambda id: known.get(id, b"")


def _kinds(decoder: Any) -> set[str]:
    """The types of a decoder's parts."""
    if not isinstance(decoder, dict):
        return set()
    return {decoder.get("type", ""), *(kind for part in decoder.get("decoders", []) for kind in _kinds(part))}
