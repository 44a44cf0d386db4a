"""One class per boundary that can break. `UserError` is shown as one sentence, without a traceback.

Owns: the exception types, and how what a user's code raises becomes one. Does not know: how they are shown or mapped to
HTTP.
"""

from __future__ import annotations

import contextlib
import traceback
from pathlib import Path
from typing import Any


class UserError(ValueError):
    """The user asked for something that cannot be: the message names the thing and says what to do."""


class ConfigError(UserError):
    """A configuration key or value is wrong."""


class ModelError(UserError):
    """A model cannot be found, fetched or used."""


class TaskError(UserError):
    """A task file or dataset is not what it needs to be."""


class SandboxError(UserError):
    """A sandbox cannot be had, or failed itself; never what a program in it did."""


class DataError(UserError):
    """A row of a dataset is not what it needs to be; the message names its line."""


class CheckpointError(UserError):
    """A checkpoint is missing, torn or does not belong to this run."""


class TeacherError(UserError):
    """A teacher cannot score what the student said."""

    def __init__(self, why: str):
        super().__init__(f"The teacher cannot score: {why}.")
        self.why = why


class LedgerError(UserError):
    """A token to be trained on cannot be traced to the call, the weights and the logprob that it was sampled with.

    `position` counts from the first token of the call's prompt.
    """

    def __init__(self, episode: str, call: str, position: int, why: str):
        super().__init__(f"Episode {episode}, call {call}, token at position {position}: {why}.")
        self.episode, self.call, self.position = episode, call, position


class RequestError(Exception):
    """A model call was malformed: HTTP 400, or `status`, with `message`; `param` names the field."""

    status = 400
    code: str | None = None

    def __init__(self, message: str, param: str | None = None, status: int | None = None):
        super().__init__(message)
        self.message, self.param, self.status = message, param, status or self.status


class ContextOverflow(RequestError):
    """The prompt does not fit the context. Raised before any work. `limit` and `got` are token counts."""

    code = "context_length_exceeded"

    def __init__(self, limit: int, got: int):
        super().__init__(
            f"This model's maximum context length is {limit} tokens. However, your messages resulted in {got} tokens. "
            "Please reduce the length of the messages.",
            "messages",
        )
        self.limit, self.got = limit, got


class Unauthorized(RequestError):
    """No or a wrong bearer key."""

    status = 401
    code = "invalid_api_key"


class TooLarge(RequestError):
    """The body exceeds the size limit."""

    status = 413


class Stalled(RequestError):
    """The body did not arrive in time."""

    status = 408


class QuotaExceeded(RequestError):
    """The session has used up its calls or tokens. Not retryable, so not 429."""

    status = 403
    code = "insufficient_quota"


class SessionClosed(RequestError):
    """The session has ended or was retried under another attempt; late calls are refused."""

    status = 410
    code = "session_closed"


class UnknownSession(RequestError):
    """No session has this id."""

    status = 404
    code = "session_not_found"


class ProviderError(RequestError):
    """An outside provider refuses every call until something there is mended: the key, the credit, the model's name."""

    def __init__(self, message: str, status: int):
        super().__init__(message, None, status)


class EngineError(Exception):
    """The engine cannot serve: it was closed or its device failed."""


class GradingError(Exception):
    """An evaluator raised, died or returned something that is no verdict. The message says which."""


class GradingTimeout(GradingError):
    """An evaluator was stopped at its deadline."""


def message_of(error: BaseException) -> str:
    """Its text; an error of the user's own class may have none that can be had."""
    with contextlib.suppress(Exception):
        return str(error)
    return "its message cannot be had"


def one_line(error: BaseException, path: Path | str | None = None) -> str:
    """``Type: message (file line n)``; the line is the innermost one in `path` when the error passed through it."""
    if isinstance(error, SyntaxError):
        return f"{type(error).__name__}: {error.msg} ({Path(error.filename or '?').name} line {error.lineno})"
    text = " ".join(f"{type(error).__name__}: {message_of(error)}".split())
    frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    frames = [frame for frame in frames if path and frame[0] == str(path)] or frames
    return f"{text[:500]} ({Path(frames[-1][0]).name} line {frames[-1][1]})" if frames else text[:500]


class Users:
    """Whatever the user's code raises inside the block becomes `kind`: `prefix`, then what and where in `path`."""

    def __init__(self, prefix: str, path: Path | None = None, kind: type[UserError] = TaskError):
        self.prefix, self.path, self.kind = prefix, path, kind

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, Exception | SystemExit) and not isinstance(error, UserError):
            raise self.kind(f"{self.prefix}{one_line(error, self.path)}.") from error
