"""An engine that says what it is told to, scored by the real model: real token ids and logprobs with known content.

Owns: the choice of the next reply, and its log-probabilities by teacher forcing. For tests and for checking a harness
before a model can drive it. Does not know: sampling, caches, sessions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import torch

from minirllm import attention, head
from minirllm.config import Config
from minirllm.engines.sampling import Ending, effective_temperature, most_likely
from minirllm.errors import ConfigError, ContextOverflow, EngineError
from minirllm.policy import Policy
from minirllm.types import Completion, SampledToken, SamplingParams, StopCheck

Reply = str | Sequence[int]  # text is followed by the end token; ids are taken as they are
Script = Sequence[Reply] | Mapping[str, Sequence[Reply]] | Callable[[str], Reply]


class ScriptedEngine:
    """See `engines.Engine`.

    `script` is a list of replies in call order; or, for agents that run concurrently, a mapping from a piece of the
    prompt's text to its own list of replies (the first key that the prompt contains counts); or a function of the
    prompt's text. To name one on the command line, subclass with a class attribute `script`.
    """

    script: Script = ()

    def __init__(self, policy: Policy, config: Config, script: Script | None = None):
        """Raises ConfigError without a script."""
        if script is not None:
            self.script = script
        if not callable(self.script) and not self.script:
            raise ConfigError(
                "The scripted engine has no script: give it one in Python, ScriptedEngine(policy, config, script)."
            )
        self.policy = policy
        self.max_context = min(config.max_context, policy.max_positions)
        self.vocab_size = policy.vocab_size
        self.prompts: list[list[int]] = []  # of every call, in order
        self._ended: str | None = "the engine was not started"
        self._lists: dict[str, Iterator[Reply]] = {}

    async def start(self) -> None:
        """Begin at the first reply."""
        self._ended = None
        if isinstance(self.script, Mapping):
            self._lists = {piece: iter(replies) for piece, replies in self.script.items()}
        elif not callable(self.script):
            self._lists = {"": iter(self.script)}

    async def close(self) -> None:
        """Later calls raise EngineError."""
        self._ended = "the engine was closed"

    async def generate(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        seed: int,
        *,
        stop: StopCheck | None = None,
        on_token: Callable[[SampledToken], None] | None = None,
        weights: int | None = None,
    ) -> Completion:
        """The next reply, cut where sampling it would have ended. `seed` changes nothing."""
        room = self.max_context - len(prompt_ids)
        if room < 1:
            raise ContextOverflow(self.max_context, len(prompt_ids))
        if self._ended is not None:
            raise EngineError(self._ended)
        self.prompts.append(list(prompt_ids))
        ending = Ending(params, self.policy.eos_ids, room, stop)
        ids: list[int] = []
        reason = None
        for token in self._reply(prompt_ids):
            ids.append(token)
            reason = ending.reason(ids)
            if reason is not None:
                break
        temperature, version = effective_temperature(params.temperature), self.policy.version
        tokens = await self.policy.run(self._score, [*prompt_ids], ids, temperature, params.top_logprobs, weights)
        for sampled in tokens:
            if on_token is not None:
                on_token(sampled)
        top = [token.top for token in tokens] if params.top_logprobs else []
        logprobs = [token.logprob for token in tokens]
        return Completion(ids, logprobs, reason or "stop", version if weights is None else weights, temperature, top)

    def weights_changed(self) -> None:
        """Nothing is cached."""

    def _reply(self, prompt_ids: Sequence[int]) -> list[int]:
        """Token ids of the next reply. Raises EngineError when the script has none."""
        tokenizer = self.policy.tokenizer
        text = tokenizer.decode(prompt_ids)
        if callable(self.script):
            reply = self.script(text)
        else:
            replies = next((replies for piece, replies in self._lists.items() if piece in text), iter(()))
            found = next(replies, None)
            if found is None:
                raise EngineError(
                    f"the script has no reply left for call {len(self.prompts)}, whose prompt ends in {text[-80:]!r}"
                )
            reply = found
        if not isinstance(reply, str):
            return list(reply)
        return [*tokenizer.encode(reply, add_special_tokens=False), int(tokenizer.eos_token_id)]

    @torch.no_grad()
    def _score(
        self, prompt: list[int], reply: list[int], temperature: float, top: int, weights: int | None
    ) -> list[SampledToken]:
        """On the device lane: one forward over prompt and reply."""
        device, n = self.policy.device, len(reply)
        if n == 0:
            return []
        token_T = torch.tensor([*prompt, *reply[:-1]], device=device)
        position_T = torch.arange(len(token_T), device=device)
        with self.policy.weights_of(weights):
            hidden_TE = self.policy.hidden(token_T, position_T, attention.ForestLayout([[(0, len(token_T))]]))
            temperature_n = torch.from_numpy(np.full(n, temperature, np.float32)).to(device)
            logprob_nV = head.logprobs(self.policy.logits(hidden_TE[-n:]), temperature_n)
        return [
            SampledToken(token, float(logprob_nV[i, token]), most_likely(logprob_nV[i], top) if top else ())
            for i, token in enumerate(reply)
        ]
