"""The raw completions dialect: prompts as text or ids, the legacy logprobs shape."""

from __future__ import annotations

import json
import math

import pytest
from openai.types import Completion as OpenAICompletion

from minirllm.dialects import DIALECTS, completions
from minirllm.errors import RequestError
from minirllm.types import Choice, Completion, Delta, Message, ModelReply, ModelRequest, SampledToken
from tests.bodies import text_of


def parse(**fields) -> ModelRequest:
    return completions.parse({"prompt": "Say", **fields})


def reply(n: int = 1) -> ModelReply:
    def completion() -> Completion:
        return Completion([1, 2, 9], [-0.5, -1.0, -math.inf], "stop", 0, top_logprobs=[((1, -0.5), (2, -2.0))] * 3)

    choices = [Choice(k, f"c{k}", Message("assistant", "Hello"), completion(), "stop") for k in range(n)]
    return ModelReply("cmpl-c0", "tiny", 1700000000, [5, 6], choices)


@pytest.mark.parametrize(
    ("prompt", "expected"), [("Say", "Say"), ([1, 2], [1, 2]), (["Say"], "Say"), ([[1, 2]], [1, 2])]
)
def test_one_prompt_as_text_or_ids(prompt, expected) -> None:
    request = parse(prompt=prompt)
    assert request.prompt == expected
    assert request.messages is None


@pytest.mark.parametrize(
    "prompt", [None, "", [], ["a", "b"], [[1], [2]], [1, "a"], [-1], [1.5], [True], [2**40], 5, {"a": 1}, [""], [[]]]
)
def test_any_other_prompt_is_refused(prompt) -> None:
    with pytest.raises(RequestError) as caught:
        parse(prompt=prompt)
    assert caught.value.param == "prompt"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("echo", True),
        ("suffix", "x"),
        ("best_of", 3),
        ("logit_bias", {"1": 2}),
        ("logprobs", True),
        ("logprobs", 21),
        ("logprobs", -1),
        ("max_tokens", 0),
    ],
)
def test_a_wrong_or_unsupported_field_is_refused_by_name(field, value) -> None:
    with pytest.raises(RequestError) as caught:
        parse(**{field: value})
    assert caught.value.param == field


def test_best_of_may_repeat_n_and_defaults_pass() -> None:
    request = parse(n=2, best_of=2, echo=False, suffix=None, logprobs=0, max_tokens=4, user="u")
    assert (request.n, request.logprobs, request.params.top_logprobs, request.params.max_tokens) == (2, True, 0, 4)
    assert parse().logprobs is False


def test_the_answer_has_legacy_logprobs_with_offsets() -> None:
    body = completions.response(reply(2), parse(logprobs=2, n=2), text_of)
    assert body["choices"][1]["logprobs"] == {
        "tokens": ["He", "llo", ""],
        "token_logprobs": [-0.5, -1.0, -9999.0],
        "top_logprobs": [{"He": -0.5, "llo": -2.0}] * 3,
        "text_offset": [0, 2, 5],
    }
    assert body["usage"]["completion_tokens"] == 6
    assert body["usage"]["prompt_tokens"] == 2
    parsed = OpenAICompletion.model_validate(body)
    assert [c.text for c in parsed.choices] == ["Hello", "Hello"]
    json.dumps(body, allow_nan=False)


def test_token_ids_stand_where_vllm_has_them() -> None:
    body = completions.response(reply(), parse(return_token_ids=True), text_of)
    assert body["choices"][0]["token_ids"] == [1, 2, 9]
    assert body["choices"][0]["prompt_token_ids"] == [5, 6]
    assert body["choices"][0]["logprobs"]["top_logprobs"] is None
    assert "token_ids" not in completions.response(reply(), parse(), text_of)["choices"][0]


def test_a_stream_concatenates_to_the_answer() -> None:
    request = parse(stream=True, logprobs=0, return_token_ids=True, stream_options={"include_usage": True})
    stream = completions.Stream(request, text_of, "tiny")
    stream.accepted("cmpl-c0", (5, 6))
    frames = [
        *stream.start(),
        *stream.delta(Delta(0, "He", tokens=(SampledToken(1, -0.5),))),
        *stream.keep_alive(),
        *stream.finish(reply()),
    ]
    assert frames[-1] == "data: [DONE]\n\n"
    events = [json.loads(frame[6:]) for frame in frames[:-1]]
    choices = [choice for event in events for choice in event["choices"]]
    assert {event["id"] for event in events} == {"cmpl-c0"}
    assert "".join(c["text"] for c in choices) == "Hello"
    assert [i for c in choices for i in c.get("token_ids", [])] == [1, 2, 9]
    assert [o for c in choices if c["logprobs"] for o in c["logprobs"]["text_offset"]] == [0, 2, 5]
    assert [c["finish_reason"] for c in choices] == [None, None, None, None, "stop"]
    assert choices[0]["prompt_token_ids"] == [5, 6]
    assert events[-1]["usage"]["total_tokens"] == 5
    for event in events:
        OpenAICompletion.model_validate(
            {**event, "choices": [{**c, "finish_reason": c["finish_reason"] or "stop"} for c in event["choices"]]}
        )


def test_both_dialects_are_registered_under_their_routes() -> None:
    routes = {name: dialect.ROUTES for name, dialect in DIALECTS.items()}
    assert (routes["chat"], routes["completions"]) == (("/v1/chat/completions",), ("/v1/completions",))
