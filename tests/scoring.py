"""Small real servers that score given tokens with a tiny model, in the two ways there are, or otherwise."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import torch

from minirllm.models import tiny

Answer = Callable[[str, Any], tuple[int, Any]]  # (path, body) -> (status, JSON)
MODELS = {"data": [{"id": "scorer"}]}


def refused(status: int, kind: str, param: str, message: str) -> tuple[int, Any]:
    """In vLLM's words and form (0.32)."""
    return status, {"error": {"message": message, "type": kind, "param": param, "code": status}}


@asynccontextmanager
async def answering(answer: Answer) -> AsyncIterator[tuple[str, list[Any]]]:
    """The base URL of a server, and the bodies that it was sent."""
    asked: list[Any] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            lengths = [line.split(":")[1] for line in head if line.lower().startswith("content-length")]
            body = json.loads(await reader.readexactly(int(lengths[0]))) if lengths and int(lengths[0]) else None
            asked.append(body)
            status, told = answer(head[0].split()[1], body)
            text = json.dumps(told)
            top = f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\ncontent-length: {len(text)}\r\n"
            writer.write(f"{top}connection: close\r\n\r\n{text}".encode())
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1", asked
    finally:
        server.close()


class Scorer:
    """The answers of a server with a tiny model of `seed`. `how`: vllm, echo, or strict (echo, and it refuses fields
    that it does not know). As vLLM it has vLLM's limits: `longest` tokens of a call, the `most` likely tokens."""

    longest, most = 4096, 20
    logits = False  # what ``--logprobs-mode raw_logits`` has it say

    def __init__(self, seed: int, how: str = "vllm"):
        self.model, self.tokenizer = tiny.build(seed=seed)
        self.model.set_attn_implementation("eager")
        self.how, self.text = how, lambda id: self.tokenizer.decode([id])

    def logprobs(self, ids: list[int]) -> torch.Tensor:
        with torch.no_grad():
            logits = self.model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
            return logits if self.logits else torch.log_softmax(logits, -1)

    def refusal(self, body: Any) -> tuple[int, Any] | None:
        """What vLLM says to a body that it does not take."""
        count, length = body.get("prompt_logprobs", 0), len(body["prompt"])
        if body["model"] != "scorer":
            message = f"The model `{body['model']}` does not exist. Valid aliases: scorer."
            return refused(404, "NotFoundError", "model", message)
        if length > self.longest:
            message = f"This model's maximum context length is {self.longest} tokens. However, your prompt contains"
            message += f" {length} input tokens (parameter=input_tokens, value={length})"
            return refused(400, "BadRequestError", "input_tokens", message)
        if length == self.longest:
            message = "max_tokens must be at least 1, got 0. (parameter=max_tokens, value=0)"
            return refused(400, "BadRequestError", "max_tokens", message)
        if count > self.most:
            message = f"Requested prompt logprobs of {count}, which is greater than max allowed: {self.most}"
            return refused(400, "BadRequestError", "prompt_logprobs", message)
        return None

    def __call__(self, path: str, body: Any) -> tuple[int, Any]:
        if path.endswith("/models"):
            limit = {"max_model_len": self.longest} if self.how == "vllm" else {}
            return 200, {"data": [{"id": "scorer", **limit}]}
        if self.how == "vllm" and (refusal := self.refusal(body)):
            return refusal
        if self.how == "strict" and "prompt_logprobs" in body:
            return 422, {"error": {"message": "extra fields not permitted: prompt_logprobs"}}
        ids, choice = body["prompt"], {"text": "x", "index": 0, "finish_reason": "length"}
        rows = self.logprobs(ids)
        told: list[Any] = [None]
        for place, id in enumerate(ids[1:]):
            top = rows[place].topk(body.get("prompt_logprobs") or body["logprobs"])
            told.append({i: rows[place, i].item() for i in dict.fromkeys([id, *top.indices.tolist()])})
        if self.how == "vllm" and "prompt_logprobs" in body:
            choice["prompt_logprobs"] = [
                entry and {str(i): {"logprob": v, "decoded_token": self.text(i)} for i, v in entry.items()}
                for entry in told
            ]
        elif body.get("echo"):
            values = [None, *[rows[place, id].item() for place, id in enumerate(ids[1:])]]
            tops = [entry and {self.text(i): v for i, v in entry.items()} for entry in told]
            texts = [*map(self.text, ids), "x"]
            choice["logprobs"] = {
                "tokens": texts,
                "token_logprobs": [*values, -1.0],
                "top_logprobs": [*tops, {"x": -1}],
            }
        return 200, {"choices": [choice]}
