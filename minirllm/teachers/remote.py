"""A teacher at a URL: an OpenAI-compatible server that says how likely given tokens are.

Owns: the two ways in which servers say it, requests and their retries. Does not know: how scores are used.

vLLM answers a completion of token ids with ``prompt_logprobs``: for each token of the prompt a map of ids. Others have
``echo`` with ``logprobs`` of the old completions, which names tokens by their text. Which of them a server has is found
out at the start; one that has neither cannot teach. A network's answers are not repeatable bit for bit.
"""

from __future__ import annotations

import asyncio
import datetime
import math
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any

import httpx
import numpy as np

from minirllm import models, providers
from minirllm.config import Config
from minirllm.errors import ConfigError, TeacherError
from minirllm.providers import wire
from minirllm.renderer import Renderer
from minirllm.teachers import Reading, Scores
from minirllm.types import MOST, Message

ATTEMPTS = 4
ROUNDING = 1e-3  # what a log-probability may be above 0
FIRST_WAIT = 0.5  # seconds, doubled from one attempt to the next
AGAIN = (408, 425, 429, 500, 502, 503, 504, 529)  # statuses of a server that is busy or failing
TIMEOUT = 300.0  # seconds for one answer
WITHOUT_KEY = (401, 403)
HINTS = {
    **dict.fromkeys(WITHOUT_KEY, "; name the variable that holds its key by --set key_env=NAME"),
    404: "; give its whole URL, such as http://host:8000/v1",
}
# what reading something else than expected raises
MALFORMED = (AttributeError, LookupError, OverflowError, TypeError, ValueError)


class Refused(TeacherError):
    """The server understood, and will not."""

    def __init__(self, why: str, status: int):
        super().__init__(why + HINTS.get(status, ""))
        self.status = status


@asynccontextmanager
async def opened(config: Config, renderer: Renderer) -> AsyncIterator[Remote]:
    """The teacher at ``config.teacher``, asked once whether it can score. Raises ConfigError or TeacherError."""
    asked = replace(config, provider="", base_url=config.teacher, model=config.teacher_model or "?")
    place = await asyncio.to_thread(providers.find, asked)
    other = None
    if config.teacher_tokenizer:
        tokenizer = await asyncio.to_thread(models.load_tokenizer, config.teacher_tokenizer)
        if tokenizer.get_vocab() != renderer.tokenizer.get_vocab():
            today = datetime.date.fromisoformat(config.date) if config.date else None
            other = await asyncio.to_thread(Renderer, tokenizer, today=today)
    headers = {"Authorization": f"Bearer {place.key}"} if place.key else {}
    tls = await asyncio.to_thread(httpx.create_ssl_context)
    async with httpx.AsyncClient(base_url=place.base_url, headers=headers, timeout=TIMEOUT, verify=tls) as client:
        teacher = Remote(client, config, other)
        await teacher.begin(other or renderer)
        yield teacher


class Remote:
    """Asks for one answer at a time, `concurrency` of them at once."""

    def __init__(self, client: httpx.AsyncClient, options: Config, renderer: Renderer | None):
        self.client, self.options, self.renderer = client, options, renderer
        self.slots = asyncio.Semaphore(options.concurrency)
        self.model, self.echo = options.teacher_model, False
        self.limit: int | None = None  # tokens of a call, where the server says it
        self.facts: dict[str, Any] = {}

    async def begin(self, renderer: Renderer) -> None:
        """Find out the model's name, and how this server scores. Raises ConfigError or TeacherError."""
        listed = await self._models()
        if not self.model and len(listed) == 1:
            (self.model,) = listed
        if not self.model:
            raise self._which(listed)
        self.limit = listed.get(self.model)
        self.facts = {"teacher_model": self.model}
        told = [Message("user", "Hi"), Message("assistant", "Hi")]
        probe = Reading("a first call", renderer.prompt(told[:1]), renderer.turn(told))
        try:
            found = await self._ask("POST", "completions", self._body(probe, 1))
            self.echo = _first(found).get("prompt_logprobs") is None
        except Refused as error:  # such as by servers that know their own fields only
            if listed and self.model not in listed:
                raise self._which(listed) from None
            if error.status in WITHOUT_KEY:
                raise
            self.echo = True
        if self.echo and self.options.teacher_top_k:
            raise TeacherError(f"{self._place} says no prompt_logprobs, from which teacher_top_k learns: leave it at 0")
        if self.echo:
            found = await self._echoed(probe)
        self._checked_text(found, probe, renderer)
        self._read(found, probe, 1)
        if (k := self.options.teacher_top_k) > 1:
            await self._checked_count(probe, k)

    def _checked_text(self, found: Any, probe: Reading, renderer: Renderer) -> None:
        """Raises ConfigError when the server reads other text in the tokens of the probe."""
        said, wanted = _texts(found, probe), [renderer.token_text(id) for id in probe.answer]
        if any(a is not None and a != b for a, b in zip(said, wanted, strict=True)):
            raise ConfigError(
                f"{self._place} reads {wanted} as {said}: it has another tokenizer than "
                f"{self.options.teacher_tokenizer or 'the student'}; name its model by --set teacher_tokenizer=MODEL."
            )

    async def _checked_count(self, probe: Reading, k: int) -> None:
        """Raises ConfigError when the server does not say the `k` most likely tokens."""
        try:
            await self._ask("POST", "completions", self._body(probe, k))
        except Refused as error:
            how = f"lower teacher_top_k, or start the server with more (vLLM: --max-logprobs {k})"
            raise ConfigError(f"{self._place} does not say {k} likely tokens, {how}: {error.why}.") from None

    async def _echoed(self, probe: Reading) -> Any:
        neither = f"{self._place} has neither prompt_logprobs nor echo with logprobs, serve the model with vLLM"
        try:
            found = await self._ask("POST", "completions", self._body(probe, 1))
        except Refused as error:
            raise TeacherError(f"{neither} ({error.why})") from None
        try:
            _by_text(found, probe)
        except MALFORMED:
            raise TeacherError(neither) from None
        return found

    async def score(self, tasks: Sequence[Sequence[Sequence[Reading]]], k: int) -> dict[str, Scores]:
        """As `Scorer` says."""
        readings = [reading for rollouts in tasks for rollout in rollouts for reading in rollout]
        sizes = ((len(one.prompt) + len(one.answer), one.id) for one in readings if one.answer)
        longest, name = max(sizes, default=(0, ""))
        if self.limit is not None and longest >= self.limit:  # it samples one token behind what it scores
            how = f"start it with more (vLLM: --max-model-len {longest + 1}), or lower max_context"
            raise TeacherError(f"{self._place} reads {self.limit - 1} tokens, and {name} has {longest}: {how}")
        jobs = [asyncio.ensure_future(self._score(reading, k)) for reading in readings]
        try:
            return dict(zip((reading.id for reading in readings), await asyncio.gather(*jobs), strict=True))
        finally:
            for job in jobs:
                job.cancel()
            await asyncio.gather(*jobs, return_exceptions=True)

    @property
    def _place(self) -> str:
        return str(self.client.base_url).rstrip("/")

    async def _score(self, reading: Reading, k: int) -> Scores:
        if not reading.answer:
            return Scores.none(k)
        async with self.slots:
            answer = await self._ask("POST", "completions", self._body(reading, k))
        return self._read(answer, reading, k)

    def _read(self, answer: Any, reading: Reading, k: int) -> Scores:
        """The scores in an answer. Raises TeacherError when it has none, or what is said are no log-probabilities."""
        try:
            scores = _by_text(answer, reading) if self.echo else _by_id(answer, reading, k)
        except MALFORMED as error:
            raise TeacherError(f"{self._place} did not score every token of {reading.id} ({error!r:.200})") from None
        if not (np.abs(scores.logprob_A) < MOST).all():  # a smaller one would be infinite in 32 bits
            raise TeacherError(f"{self._place} gave {reading.id} a log-probability that is not finite")
        if max(scores.logprob_A.max(initial=0.0), scores.top_logprob_AK.max(initial=0.0)) > ROUNDING:
            how = "it must not say logits (vLLM: leave out --logprobs-mode)"
            raise TeacherError(f"{self._place} gave {reading.id} a log-probability above 0, {how}")
        return scores

    def _body(self, reading: Reading, k: int) -> dict[str, Any]:
        how = {"echo": True, "logprobs": 1} if self.echo else {"prompt_logprobs": k}
        ids = [*reading.prompt, *reading.answer]
        return {"model": self.model, "prompt": ids, "max_tokens": 1, "temperature": 0.0, **how}

    async def _models(self) -> dict[str, int | None]:
        """The models that the server says it has, and how many tokens each of them reads, where it says that (vLLM)."""
        try:
            told = await self._ask("GET", "models")
        except Refused as error:
            if not self.model or error.status in WITHOUT_KEY:
                raise
            return {}
        try:
            limits = {str(model["id"]): model.get("max_model_len") for model in told["data"]}
        except MALFORMED:
            return {}
        return {name: limit if isinstance(limit, int) else None for name, limit in limits.items()}

    def _which(self, listed: Iterable[str]) -> ConfigError:
        names = list(listed)
        has = f"it has {', '.join(names[:20])}" if names else "it does not say which it has"
        none = f"{self._place} has no model {self.model}. " if self.model else ""
        return ConfigError(f"{none}Which model of {self._place}? Name it by --set teacher_model=NAME: {has}.")

    async def _ask(self, method: str, route: str, body: Any = None) -> Any:
        """The JSON of an answer. Raises TeacherError when the server does not answer, or refuses."""
        wait, problem = FIRST_WAIT, ""
        for _ in range(ATTEMPTS):
            try:
                answer = await self.client.request(method, route, json=body)
            except httpx.HTTPError as error:
                problem = f"{self._place} does not answer ({type(error).__name__}: {error})"
            else:
                if answer.status_code == 200:
                    try:
                        return answer.json()
                    except ValueError:
                        raise TeacherError(f"{self._place} answered {answer.text[:100]!r}, which is no JSON") from None
                said = wire.said(answer.text)[0].replace(self._key, "...")
                problem = f"{self._place}/{route} answered HTTP {answer.status_code}: {said or 'nothing'}"
                if answer.status_code not in AGAIN:
                    raise Refused(problem, answer.status_code)
            await asyncio.sleep(wait)
            wait *= 2
        raise TeacherError(problem)

    @property
    def _key(self) -> str:
        return self.client.headers.get("authorization", "").removeprefix("Bearer ") or "\0"


def _first(answer: Any) -> Mapping[str, Any]:
    """The first choice of an answer; nothing of one that has none."""
    try:
        return dict(answer["choices"][0])
    except MALFORMED:
        return {}


def _texts(answer: Any, reading: Reading) -> list[str | None]:
    """What the server reads in the tokens of the answer, where it says so."""
    begin, end = len(reading.prompt), len(reading.prompt) + len(reading.answer)
    choice, texts = _first(answer), list[str | None]()
    with suppress(*MALFORMED):  # which is told when its scores are read
        if choice.get("prompt_logprobs") is not None:
            pairs = zip(choice["prompt_logprobs"][begin:end], reading.answer, strict=False)
            texts = [(told or {}).get(str(id), {}).get("decoded_token") for told, id in pairs]
        else:
            texts = list(((choice.get("logprobs") or {}).get("tokens") or [])[begin:end])
    return [*texts, *[None] * len(reading.answer)][: len(reading.answer)]


def _by_id(answer: Any, reading: Reading, k: int) -> Scores:
    """Of vLLM's ``prompt_logprobs``. Raises one of MALFORMED for anything else."""
    told = answer["choices"][0]["prompt_logprobs"]
    if len(told) != len(reading.prompt) + len(reading.answer):
        raise ValueError(f"{len(told)} entries")
    chosen, ids, tops, best = [], [], [], []
    for entry, id in zip(told[len(reading.prompt) :], reading.answer, strict=True):
        known = {int(name): float(value["logprob"]) for name, value in entry.items()}
        if any(map(math.isnan, known.values())):
            raise ValueError("one is not a number")
        order = sorted(known, key=lambda one: (-known[one], one))
        chosen.append(known[id])
        best.append(order[0] == id)
        ids.append(order[:k])
        tops.append([known[one] for one in order[:k]])
    top_logprob_AK = np.array(tops).clip(-MOST).astype(np.float32)
    return Scores(np.array(chosen), np.array(ids, np.int64), top_logprob_AK, np.array(best))


def _by_text(answer: Any, reading: Reading) -> Scores:
    """Of ``echo``: what is most likely is known by its text only. Raises one of MALFORMED for anything else."""
    told, at = answer["choices"][0]["logprobs"], slice(len(reading.prompt), len(reading.prompt) + len(reading.answer))
    chosen = np.array(told["token_logprobs"][at], np.float64)
    if len(chosen) != len(reading.answer):
        raise ValueError(f"{len(chosen)} of {len(reading.answer)}")
    tops = [max(top.values()) for top in told["top_logprobs"][at]]
    nothing = np.empty((len(chosen), 0))
    return Scores(chosen, nothing.astype(np.int64), nothing.astype(np.float32), chosen >= np.array(tops))
