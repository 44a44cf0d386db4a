"""The vocabulary: plain data that every module may import. Names follow rLLM.

Owns: Task, Message, SamplingParams, Completion, ModelRequest, Step, Trajectory, Episode, EvalOutput, Signal,
AgentConfig, TerminationReason. Does not know: torch, HTTP, files.

Containment: Episode > Trajectory > Step. One Step is one model call of the agent; its token ids are exactly those the
model read and sampled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, Literal

MOST = 1e30  # of any number that is learned from or with: torch counts in 32 bits, and 1e38 is the end of these


@dataclass
class Task:
    """One problem. `id` is unique within its dataset; `metadata` holds what the evaluator needs (the answer, say)."""

    id: str
    instruction: str | list[dict[str, Any]] = ""
    metadata: dict[str, Any] = field(default_factory=dict)
    dataset_dir: Path | None = None
    sub_dir: Path | None = None

    @property
    def task_dir(self) -> Path | None:
        """``dataset_dir / sub_dir``, for tasks that are folders."""
        if self.dataset_dir is None:
            return None
        return self.dataset_dir / self.sub_dir if self.sub_dir else self.dataset_dir


@dataclass(frozen=True, slots=True)
class ToolCall:
    """`arguments` is JSON text exactly as the model wrote it."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Message:
    """One chat message in the one internal form all wire dialects map to."""

    role: str  # system | user | assistant | tool
    content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None
    reasoning: str = ""
    malformed: bool = False  # parsing found a broken tool call; it is kept as text in `content`


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to sample. None for `max_tokens` means the server's default cap. `top_k` 0 is off."""

    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    top_logprobs: int = 0
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True)
class SampledToken:
    """One sampled token as the engine reports it.

    `logprob` is of the distribution sampled from: natural logarithm, after temperature.
    """

    id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # the most likely (id, logprob), best first, when asked for


@dataclass(slots=True)
class Completion:
    """What the engine sampled. `token_ids` includes the stop token when one ended it (it is trained on)."""

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: Literal["stop", "length", "abort"]
    weight_version: int
    temperature: float = 1.0
    top_logprobs: list[tuple[tuple[int, float], ...]] = field(default_factory=list)
    cached_tokens: int = 0  # how many prompt tokens came from a cached prefix


StopCheck = Callable[[Sequence[int]], bool]  # (sampled ids so far) -> is this the end? keeps text out of the engine


@dataclass(slots=True)
class ModelRequest:
    """One call, whatever dialect it came in: exactly one of `messages` (chat) and `prompt` (raw completion) is set.

    The dialect has checked the ranges: `messages` is not empty, `n` and ``params.max_tokens`` are at least 1.
    """

    messages: list[Message] | None = None
    prompt: str | list[int] | None = None
    tools: list[dict[str, Any]] = field(default_factory=list)  # OpenAI function-tool form
    tool_choice: str | dict[str, Any] = "auto"
    params: SamplingParams = field(default_factory=SamplingParams)
    asked: frozenset[str] = frozenset()  # names of the `params` fields that the caller really sent
    n: int = 1
    stream: bool = False
    include_usage: bool = False
    logprobs: bool = False
    return_token_ids: bool = False
    response_format: dict[str, Any] | None = None
    notes: dict[str, Any] = field(default_factory=dict, compare=False)  # what the dialect needs for the answer


@dataclass(slots=True)
class Choice:
    """One sampled answer to a ModelRequest."""

    index: int
    call_id: str
    message: Message  # for raw completions only `content` is used
    completion: Completion
    finish_reason: str  # stop | length | tool_calls
    stop: str = ""  # the stop string that ended it, if one did


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of a whole answer. The prompt counts once, however many choices there are."""

    prompt: int = 0
    sampled: int = 0
    cached: int = 0  # of the prompt's


@dataclass(slots=True)
class ModelReply:
    """The whole answer; dialects turn it into their JSON. `overridden`: what of the request was replaced."""

    id: str
    model: str
    created: int  # unix seconds
    prompt_ids: list[int]
    choices: list[Choice]
    overridden: dict[str, Any] = field(default_factory=dict)
    counted: Usage | None = None  # by a provider, which says no ids

    @property
    def usage(self) -> Usage:
        """What the answer took."""
        completions = [choice.completion for choice in self.choices]
        sampled = sum(len(completion.token_ids) for completion in completions)
        cached = max((completion.cached_tokens for completion in completions), default=0)
        return self.counted or Usage(len(self.prompt_ids), sampled, cached)


@dataclass(frozen=True, slots=True)
class CallDelta:
    """A piece of a tool call. A call's first piece has its id and name; `arguments` concatenate to the call's.

    A call that breaks off has no more pieces, and no place in the message: its text is in the content.
    """

    index: int  # which of the calls that were begun
    id: str = ""
    name: str = ""
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of a streamed answer. Text pieces concatenate to `Choice.message.content`, calls to its `tool_calls`.

    The session sends a first, empty one as soon as the prompt is accepted (it fits the context, quotas allow it): an
    endpoint may then commit to a streamed answer, and its first event carries the right id and prompt tokens.
    """

    index: int
    text: str = ""
    reasoning: str = ""
    calls: tuple[CallDelta, ...] = ()
    tokens: tuple[SampledToken, ...] = ()
    reply_id: str = ""  # on the first delta: `ModelReply.id`
    prompt_ids: tuple[int, ...] = ()  # on the first delta: `ModelReply.prompt_ids`


class TerminationReason(str, Enum):
    """Why an episode ended."""

    ENV_DONE = "env_done"
    MAX_PROMPT_LENGTH_EXCEEDED = "max_prompt_length_exceeded"
    MAX_RESPONSE_LENGTH_EXCEEDED = "max_response_length_exceeded"
    MAX_TURNS_EXCEEDED = "max_turns_exceeded"
    TIMEOUT = "timeout"
    ERROR = "error"
    NO_CALLS = "no_calls"
    GRADING_ERROR = "grading_error"
    GRADING_TIMEOUT = "grading_timeout"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Signal:
    """A named number beside the reward, averaged in the metrics."""

    name: str
    value: float
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class EvalOutput:
    """A verdict. `reward` None means *could not be graded*: counted, shown, never trained on, never averaged as 0."""

    reward: float | None
    is_correct: bool = False
    signals: list[Signal] = field(default_factory=list)
    metadata: dict[str, Any] = field(default_factory=dict)
    reason: str = ""  # why there is no reward


DEPTH = "depth"  # in a step's metadata, of training with a lag: how many calls it continues


@dataclass
class Step:
    """One model call. Its tokens are in the episode's tree: ``tree.prompt_ids(node)``, ``tree.response(node)``."""

    id: str = ""  # the call id: the `id` of the response the agent got
    input: Any = None
    output: Any = None
    action: Any = None
    reward: float = 0.0
    advantage: float | Sequence[float] | None = None  # in place of its group's: of the call, or of each sampled token
    targets: Any = None  # a teacher's most likely tokens in the place of each: (ids, log-probabilities), arrays [., K]
    done: bool = False
    metadata: dict[str, Any] = field(default_factory=dict)  # of the session: "match", how its request was recognised
    messages: list[Message] = field(default_factory=list)  # only those that this call added to `parent`
    parent: str | None = None  # the call id this conversation continued
    tools: list[dict[str, Any]] = field(default_factory=list)  # where one begins: what the model was told of
    response: Message | None = None
    node: int | None = None  # index in the episode's tree of the node whose end is this call's last token
    prompt_length: int = 0
    response_length: int = 0
    finish_reason: str = ""
    weight_version: int = 0
    params: SamplingParams | None = None  # what the engine was told, so that the call can be replayed

    @property
    def auxiliary(self) -> str:
        """The kind of side call that a harness made here (a title, say), which is never trained; of its own, empty."""
        return str(self.metadata.get("auxiliary") or "")


@dataclass
class Trajectory:
    """The calls of one role. Those of one task with one name form the group that advantages are computed over."""

    name: str = "default"
    steps: list[Step] = field(default_factory=list)
    reward: float | None = None
    task: Any = None
    input: Any = None
    output: Any = None
    signals: dict[str, float] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass
class Episode:
    """One rollout of one task, graded. `task_id` and `rollout_idx` say which; `id` joins them with a colon to read."""

    id: str = ""
    task: Any = None
    trajectories: list[Trajectory] = field(default_factory=list)
    termination_reason: TerminationReason = TerminationReason.UNKNOWN
    is_correct: bool = False
    artifacts: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)
    task_id: str = ""
    rollout_idx: int = 0
    attempt: int = 0
    retried: bool = False  # this attempt failed in the agent, and another followed
    session_id: str = ""
    reward: float | None = None
    reason: str = ""  # why there is no reward, or what went wrong
    signals: dict[str, float] = field(default_factory=dict)
    tree: Any = None  # tree.TokenTree: every token of every call of this episode

    @property
    def steps(self) -> list[Step]:
        """Those of all trajectories, in order."""
        return [step for trajectory in self.trajectories for step in trajectory.steps]

    @property
    def sampled(self) -> list[Any]:
        """The nodes of its tree that hold what was sampled."""
        return [node for node in self.tree.nodes if node.sampled] if self.tree else []

    @property
    def answer(self) -> str:
        """The text an evaluator grades: artifacts["answer"], else the last output, else the last answer with text."""
        if "answer" in self.artifacts:
            return str(self.artifacts["answer"])
        for trajectory in reversed(self.trajectories):
            if isinstance(trajectory.output, str):
                return trajectory.output
            for step in reversed(trajectory.steps):
                if step.response is not None and step.response.content and not step.auxiliary:
                    return step.response.content
        return ""


@dataclass(frozen=True)
class AgentConfig:
    """What an agent is given: where the model is and the key to it. Works with any OpenAI client."""

    base_url: str  # ends in /v1
    model: str
    api_key: str = field(default="", repr=False)
    session_uid: str = ""
    metadata: dict[str, Any] = field(default_factory=dict)
    is_validation: bool = False
    sampling_params: dict[str, Any] = field(default_factory=dict)
