"""An answer of the Responses API as it grows: its items, and the events that tell of them.

Owns: `Stream`, the order of events, the response object. The whole answer of a request without `stream` is the object
that the last event would hold. Does not know: how a request is read, HTTP, sessions.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from minirllm.dialects import openai
from minirllm.dialects import responses_items as items
from minirllm.dialects.openai import TokenText
from minirllm.dialects.responses_items import Tool
from minirllm.errors import RequestError
from minirllm.types import Choice, Delta, ModelReply, ModelRequest, SampledToken, ToolCall


@dataclass
class _Open:
    """The item that is being said: reasoning or a message. `said` is its text so far."""

    kind: str  # reasoning or text
    id: str
    index: int  # of the output
    said: str = ""
    logprobs: list[dict[str, Any]] = field(default_factory=list)


class Stream(openai.AnswerStream):
    """One streamed answer. Of `request.notes` it takes `echo` (fields sent back), `tools` and `kept` (None: do not).

    A tool call is told when the answer is complete: only then is it sure to be a call, and an item that was begun
    cannot be taken back, since clients run it, or give up the whole answer.
    """

    def __init__(self, request: ModelRequest, token_text: TokenText, model: str):
        super().__init__(request, token_text, model)
        self.tools: items.Tools = request.notes["tools"]
        self.body: dict[str, Any] = {
            "id": f"resp_{uuid.uuid4().hex}",  # until the reply's own is known, which is before anything is sent
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress",
            "model": model,
            "error": None,
            "incomplete_details": None,
            **request.notes["echo"],
            "output": [],
            "usage": None,
        }
        self._begun = False
        self._number = 0  # of the next event
        self._open: _Open | None = None
        self._tokens: list[SampledToken] = []  # sampled since the last text was sent

    def accepted(self, reply_id: str, prompt_ids: Sequence[int]) -> None:
        if not self._begun:  # else the client knows it by another id, and it stays known by that
            self.body["id"] = f"resp_{reply_id.rpartition('-')[2]}"
        if self.request.return_token_ids:
            self.body["prompt_token_ids"] = list(prompt_ids)

    def start(self) -> list[str]:
        self._begun = True
        return [self._event(f"response.{what}", response=self.body) for what in ("created", "in_progress")]

    def keep_alive(self) -> list[str]:
        """An event that says nothing new: clients' idle timers count events, not comments. It holds what its type must
        have, and nothing of the request, which may be large."""
        told = {key: self.body[key] for key in ("id", "object", "created_at", "status", "model")}
        empty = {"output": [], "tools": [], "tool_choice": "auto", "parallel_tool_calls": True}
        return [self._event("response.in_progress", response=told | empty)]

    def events(self, delta: Delta) -> list[str]:
        self._tokens += delta.tokens
        frames = []
        if delta.reasoning:
            frames += self._thought(delta.reasoning)
        if delta.text:
            frames += self._text(delta.text)
        return frames

    def finish(self, reply: ModelReply) -> list[str]:
        choice = reply.choices[0]
        cut = choice.finish_reason == "length"
        self.accepted(reply.id, reply.prompt_ids)
        frames = self.delta(self.sent[0].rest(choice))
        nothing = not (self.body["output"] or choice.message.tool_calls or (cut and self._open))
        if nothing or (self._open is not None and self._open.kind == "text"):
            frames += self._text("")  # clients look for a message; the last tokens' logprobs
        for call in choice.message.tool_calls:
            frames += self._called(call)
        frames += self._close("incomplete" if cut else "completed")
        self._complete(reply, choice, cut)
        if self.request.notes["kept"] is not None:
            self.request.notes["kept"].keep(self.body["id"], choice.call_id, self.body)
        return [*frames, self._event(f"response.{self.body['status']}", response=self.body)]

    def _complete(self, reply: ModelReply, choice: Choice, cut: bool) -> None:
        self.body["status"] = "incomplete" if cut else "completed"
        self.body["incomplete_details"] = {"reason": "max_output_tokens"} if cut else None
        self.body["usage"] = self._usage(reply, choice)
        self.body |= openai.extras(reply, self.request)
        if choice.message.malformed:
            self.body["malformed_tool_call"] = True
        if self.request.return_token_ids:
            logprobs = [openai.finite(logprob) for logprob in choice.completion.logprobs]
            self.body |= {"token_ids": choice.completion.token_ids, "token_logprobs": logprobs}

    def fail(self, problem: RequestError) -> list[str]:
        """The events for an error after the answer has begun: some clients look for the one, some for the other."""
        told = {"code": problem.code, "message": problem.message, "param": problem.param}
        code = problem.code or ("server_error" if problem.status >= 500 else "invalid_prompt")
        self.body |= {"status": "failed", "error": {"code": code, "message": problem.message}}
        first = self._event("error", **told, **openai.error(problem))
        return [first, self._event("response.failed", response=self.body)]

    # ---- pieces ----

    def _thought(self, text: str) -> list[str]:
        frames = []
        if self._open is None or self._open.kind != "reasoning":
            frames = self._begin("reasoning", "rs")
            frames.append(
                self._part("response.reasoning_summary_part.added", part={"type": "summary_text", "text": ""})
            )
        self._now.said += text
        return [*frames, self._part("response.reasoning_summary_text.delta", delta=text)]

    def _text(self, text: str) -> list[str]:
        frames = []
        if self._open is None or self._open.kind != "text":
            frames = self._begin("text", "msg")
            frames.append(self._part("response.content_part.added", part=items.text_part("")))
        new = openai.token_logprobs(self._tokens, self.token_text) if self.request.logprobs else []
        self._tokens = []
        self._now.said += text
        self._now.logprobs += new
        if text or new:
            frames.append(self._part("response.output_text.delta", delta=text, logprobs=new))
        return frames

    def _begin(self, kind: str, prefix: str) -> list[str]:
        """End what was said before, and open the next item."""
        frames = self._close()
        self._open = _Open(kind, self._name(prefix), len(self.body["output"]))
        item = self._item("in_progress")
        if kind == "text":
            item["content"] = []  # its part is told next
        return [*frames, self._event("response.output_item.added", output_index=self._open.index, item=item)]

    def _close(self, status: str = "completed") -> list[str]:
        """The ends of the open item, which enters the output."""
        if self._open is None:
            return []
        opened, item = self._open, self._item(status)
        if opened.kind == "text":
            frames = [
                self._part("response.output_text.done", text=opened.said, logprobs=opened.logprobs),
                self._part("response.content_part.done", part=item["content"][0]),
            ]
        else:
            frames = [
                self._part("response.reasoning_summary_text.done", text=opened.said),
                self._part("response.reasoning_summary_part.done", part=item["summary"][0]),
            ]
        self.body["output"].append(item)
        self._open = None
        return [*frames, self._event("response.output_item.done", output_index=opened.index, item=item)]

    def _item(self, status: str) -> dict[str, Any]:
        """The open item as it is."""
        now = self._now
        if now.kind == "reasoning":
            return items.reasoning_item(now.id, now.said or None)
        return items.message_item(now.id, "assistant", now.said, status, now.logprobs)

    def _called(self, call: ToolCall) -> list[str]:
        frames = self._close()
        tool = self.tools.known.get(call.name, Tool(call.name))
        item = items.call_item(self._name("fc"), call, tool, "completed")
        told, event = ("input", "custom_tool_call_input") if tool.custom else ("arguments", "function_call_arguments")
        index = len(self.body["output"])
        place = {"item_id": item["id"], "output_index": index}
        done = {"name": tool.name, told: item[told]} if told == "arguments" else {told: item[told]}
        begun = {**item, "status": "in_progress", told: ""}
        self.body["output"].append(item)
        return [
            *frames,
            self._event("response.output_item.added", output_index=index, item=begun),
            self._event(f"response.{event}.delta", **place, delta=item[told]),
            self._event(f"response.{event}.done", **place, **done),
            self._event("response.output_item.done", output_index=index, item=item),
        ]

    @property
    def _now(self) -> _Open:
        assert self._open is not None
        return self._open

    def _name(self, prefix: str) -> str:
        """The id of the next item: it holds the answer's, and is the same in every run."""
        return f"{prefix}_{self.body['id'].removeprefix('resp_')}_{len(self.body['output'])}"

    # ---- events ----

    def _part(self, kind: str, **fields: Any) -> str:
        """An event about the one part of the open item."""
        place = "summary_index" if self._now.kind == "reasoning" else "content_index"
        return self._event(kind, item_id=self._now.id, output_index=self._now.index, **{place: 0}, **fields)

    def _event(self, kind: str, **fields: Any) -> str:
        """One server-sent event. ASCII only, so that no client splits it at a Unicode line separator."""
        event = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return f"event: {kind}\ndata: {json.dumps(event, allow_nan=False)}\n\n"

    def _usage(self, reply: ModelReply, choice: Choice) -> dict[str, Any]:
        told = openai.usage(reply)
        cached = told["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": told["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
            "output_tokens": told["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": self._thinking(choice)},
            "total_tokens": told["total_tokens"],
        }

    def _thinking(self, choice: Choice) -> int:
        """How many tokens spell the reasoning (the marks around it may count for it, or not)."""
        left, count = len(choice.message.reasoning), 0
        for token in choice.completion.token_ids if left else ():
            if left <= 0:
                break
            left, count = left - len(self.token_text(token)), count + 1
        return count
