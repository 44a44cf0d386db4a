"""What every session has, whoever answers in it: quotas, counters, and the record of its calls.

Owns: `AnySession`, which is what endpoint and rollouts need of a session, and of what kind `session.Session` and
`providers.session.ProviderSession` are. Does not know: who answers, tokens, HTTP, wire formats.
"""

from __future__ import annotations

import asyncio
import re
import time
from abc import ABC, abstractmethod
from bisect import insort
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from minirllm.conversation import Answer, Conversations, Match, Matcher, normalized
from minirllm.errors import EngineError, QuotaExceeded, SessionClosed, UserError
from minirllm.inflight import Accepted, OnDelta, shown_tools
from minirllm.tree import TokenTree
from minirllm.types import ModelReply, ModelRequest, SamplingParams, Step

#: What a session counts, all from zero.
COUNTERS = (
    "calls",  # samples started: n per request
    "conversations",  # requests that continue no call
    "extended",  # requests whose prompt begins with the very tokens of the call they continue
    "branches",  # requests that continue a call in another way, for one of the next three reasons
    "rerendered",  # the template rewrote the history, as history = "rerender" allows
    "unprovable",  # the renderer could not prove an extension
    "edited",  # an assistant turn is not the one that was sampled
    "reasked",  # prompts sent again after they were answered: new samples
    "replayed",  # requests that got an answer already sampled, or being sampled
    "aborted",  # samples cut off: the client left, the session was closed, the engine failed
    "truncated",  # samples that hit their token limit
    "malformed_tool_calls",
    "auxiliary",  # samples of a harness's side calls, by `AnySession.auxiliary`: never trained
    "drift",  # samples whose text, as sent, is not what their tokens say: must be 0
)

Classifier = Callable[[ModelRequest], str | None]  # the kind of a side call (a title, a summary), or None

_RESPONSE_ID = re.compile(r"(?:[a-z]+[-_])?([0-9a-f]{16})(?:-(\d+))?")  # chatcmpl-<call id>[-<choice index>]


@dataclass(eq=False)
class AnySession(ABC):
    """Everything that one rollout (or one served client) says to a model. All methods run on the event loop."""

    id: str
    key: str = field(repr=False)  # the bearer key its clients must show
    _: KW_ONLY
    seed_parts: tuple[Any, ...] = ()  # all that seeds depend on besides the prompts: ints and strings
    enforced: SamplingParams | None = None  # training: replaces what the agent asks, see session.ENFORCED
    default_temperature: float = 1.0  # when a request has none and nothing is enforced
    max_calls: int = 200
    max_tokens_total: int | None = None  # prompt and sampled tokens of all calls together
    max_streams: int = 16  # samples asked for at once; more wait here, in the order in which they came
    matcher: Matcher = normalized  # which messages are earlier ones, sent back
    # the version of the weights that answer a call which continues so many others; None: the policy's own
    weights: Callable[[int], Awaitable[int]] | None = None
    auxiliary: Classifier | None = None  # which requests are a harness's side calls
    clock: Callable[[], float] = time.time

    def __post_init__(self) -> None:
        self.model: str  # the name that replies carry
        self.closed = False
        self.failure: EngineError | None = None  # of whoever answers, in a call of this session
        self.tree = TokenTree()
        self.steps: list[Step] = []  # in the order in which their requests arrived
        self.counters: dict[str, int] = dict.fromkeys(COUNTERS, 0)
        self.tokens_used = 0
        self.refused = 0  # calls that were: too many end the session's patience, see server
        self.refusal = ""  # why the last of them was
        self._conversations = Conversations(self.matcher)
        self._arrival: dict[str, tuple[int, int]] = {}  # call id -> (number of its request, choice index)
        self._requests = 0
        self._streams = asyncio.Semaphore(self.max_streams)
        self._idle_since = time.monotonic()

    @property
    @abstractmethod
    def default_max_tokens(self) -> int | None:
        """How many tokens are sampled when a request does not say; None: as many as fit."""

    @property
    @abstractmethod
    def max_context(self) -> int:
        """How many tokens a prompt and its answer may have together."""

    @abstractmethod
    async def call(self, request: ModelRequest, on_delta: OnDelta | None = None) -> ModelReply:
        """Answer one request. `on_delta` gets an empty delta once it is accepted, then the pieces as they come.

        Cancelling the caller cancels the work. Raises RequestError of any kind, EngineError if the engine fails.
        """

    @abstractmethod
    def count(self, request: ModelRequest) -> int:
        """How many tokens its prompt has; nothing is recorded. Raises RequestError where nobody can say."""

    @abstractmethod
    def waiting(self) -> str:
        """What its client waits for, and since when."""

    @abstractmethod
    def close(self) -> None:
        """End the session. Calls in flight are cancelled; later ones are refused."""

    @abstractmethod
    def delivered(self, reply_id: str) -> None:
        """The answer with this `ModelReply.id` reached its client: an equal request is a new sample from now on."""

    @abstractmethod
    def lost(self, reply_id: str) -> None:
        """The answer with this `ModelReply.id` did not reach its client: an equal request gets it, if it is kept."""

    def token_text(self, id: int) -> str:
        """The text of one token id; the id itself where no tokenizer is known."""
        return str(id)

    def claim(self, ids: Iterable[str]) -> list[Step]:
        """The steps with these ids, in that order: call ids, response ids, or those with ``-<choice index>`` behind.

        Raises UserError naming the first id that is none of this session's.
        """
        by_arrival = {self._arrival[step.id]: step for step in self.steps}
        found = []
        for name in ids:
            match = _RESPONSE_ID.fullmatch(name)
            number, index = self._arrival.get(match[1], (-1, 0)) if match else (-1, 0)
            step = by_arrival.get((number, int(match[2]) if match and match[2] else index))
            if step is None:
                raise UserError(f"No call of session {self.id!r} has the id {name!r}: give the id of a response.")
            found.append(step)
        return found

    # ---- for those who answer ----

    def _admit(self, request: ModelRequest) -> None:
        """Raises SessionClosed or QuotaExceeded for a request that may not be made."""
        if self.closed:
            raise SessionClosed(f"Session {self.id!r} has ended: late calls are refused.")
        made = self.counters["calls"]
        if made + request.n > self.max_calls:
            raise QuotaExceeded(f"Session {self.id!r} may make {self.max_calls} model calls and has made {made}.")

    def _side_call(self, request: ModelRequest) -> dict[str, Any]:
        """What its steps say of a request that is a harness's side call."""
        kind = self.auxiliary(request) if self.auxiliary is not None else None
        return {"auxiliary": kind} if kind else {}

    def _accept(self, request: ModelRequest, match: Match, kind: str, nth: int, said: dict[str, Any]) -> Accepted:
        """Count a request that is not refused any more. `kind` is its counter, `nth`: how many equal ones came before;
        its steps say `said`, and how it was matched."""
        self._requests += 1
        self.counters["calls"] += request.n
        self.counters[kind] += 1
        self.counters["edited"] += match.edited
        self.counters["branches"] += match.edited or kind in ("rerendered", "unprovable")
        self.counters["reasked"] += nth > 0
        self.counters["auxiliary"] += request.n * ("auxiliary" in said)
        metadata = {"match": "edited" if match.edited else kind.removesuffix("s"), **said}
        return Accepted(request, match, self._requests, metadata)

    def _keep(self, call: Accepted, index: int, answer: Answer, said: dict[str, Any], **told: Any) -> None:
        """A finished choice becomes a step, and an answer that requests can continue. `said` is added to the metadata
        of the step, `told` are its fields that only who answered knows."""
        if call.request.messages is not None:
            self._conversations.record(call.match, answer)
        self._arrival[answer.call_id] = (call.arrival, index)
        parent = call.match.parent
        step = Step(
            id=answer.call_id,
            messages=call.match.added,
            parent=parent.call_id if parent else None,
            tools=[] if parent else shown_tools(call.request),
            response=answer.message,
            metadata={**call.metadata, **said},
            **told,
        )
        insort(self.steps, step, key=lambda step: self._arrival[step.id])
        self.tokens_used += step.prompt_length + step.response_length
        self.counters["truncated"] += step.finish_reason == "length"
        self.counters["malformed_tool_calls"] += answer.message.malformed
