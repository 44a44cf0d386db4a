"""Answers, streams and errors of the Gemini dialect have every field that is documented."""

from __future__ import annotations

import json
import math

import pytest

from minirllm.dialects import gemini
from minirllm.errors import ContextOverflow, QuotaExceeded, RequestError, SessionClosed, Unauthorized, UnknownSession
from minirllm.types import CallDelta, Choice, Completion, Delta, Message, ModelReply, ModelRequest, ToolCall
from tests.bodies import text_of

USER = {"role": "user", "parts": [{"text": "hi"}]}
GENERATE, STREAM, *_ = gemini.ROUTES


def parse(route: str = GENERATE, **fields) -> ModelRequest:
    return gemini.parse({"contents": [USER], **fields}, route)


def configured(**config) -> ModelRequest:
    return parse(generationConfig=config)


def reply(*messages: Message, finish="stop", **fields) -> ModelReply:
    choices = []
    for index, message in enumerate(messages or (Message("assistant", "Hello"),)):
        tops = [((1, -0.5),), ((2, -1.0),), ()]
        completion = Completion([1, 2, 9], [-0.5, -1.0, -math.inf], "stop", 0, top_logprobs=tops, cached_tokens=1)
        choices.append(Choice(index, f"c{index}", message, completion, finish))
    return ModelReply("chatcmpl-c0", "tiny", 1700000000, [5, 6, 7], choices, **fields)


def test_a_plain_answer_has_every_field() -> None:
    assert gemini.response(reply(), parse(), text_of) == {
        "candidates": [
            {"content": {"parts": [{"text": "Hello"}], "role": "model"}, "index": 0, "finishReason": "STOP"}
        ],
        "modelVersion": "tiny",
        "responseId": "c0",
        "usageMetadata": {
            "promptTokenCount": 3,
            "candidatesTokenCount": 3,
            "totalTokenCount": 6,
            "cachedContentTokenCount": 1,
        },
    }


def test_thoughts_text_and_calls_are_parts_in_this_order() -> None:
    message = Message("assistant", "I run it", (ToolCall("call_0", "run", '{"cmd": "ls"}'),), reasoning="hm")
    call = {"functionCall": {"id": "call_0", "name": "run", "args": {"cmd": "ls"}}}
    asked = configured(thinkingConfig={"includeThoughts": True})
    (candidate,) = gemini.response(reply(message, finish="tool_calls"), asked, text_of)["candidates"]
    assert candidate["content"]["parts"] == [{"text": "hm", "thought": True}, {"text": "I run it"}, call]
    assert candidate["finishReason"] == "STOP"
    again = parse(contents=[USER, candidate["content"], USER])
    assert again.messages[1] == message
    (unasked,) = gemini.response(reply(message), parse(), text_of)["candidates"]
    assert unasked["content"]["parts"] == [{"text": "I run it"}, call]


def test_an_answer_cut_off_an_empty_one_and_a_broken_call() -> None:
    cut = gemini.response(reply(Message("assistant"), finish="length"), parse(), text_of)["candidates"][0]
    assert (cut["finishReason"], cut["content"]["parts"]) == ("MAX_TOKENS", [{"text": ""}])
    broken = gemini.response(reply(Message("assistant", "{oops", malformed=True)), parse(), text_of)["candidates"][0]
    assert broken["malformedToolCall"] is True


def test_logprobs_carry_token_ids() -> None:
    body = gemini.response(reply(), configured(responseLogprobs=True, logprobs=1), text_of)
    result = body["candidates"][0]["logprobsResult"]
    assert [entry["tokenId"] for entry in result["chosenCandidates"]] == [1, 2, 9]
    assert [entry["logProbability"] for entry in result["chosenCandidates"]] == [-0.5, -1.0, -9999.0]
    assert result["topCandidates"][1] == {"candidates": [{"token": "llo", "tokenId": 2, "logProbability": -1.0}]}
    json.dumps(body, allow_nan=False)


@pytest.mark.parametrize(
    ("problem", "status"),
    [
        (RequestError("wrong"), "INVALID_ARGUMENT"),
        (Unauthorized("key"), "UNAUTHENTICATED"),
        (QuotaExceeded("no calls left"), "PERMISSION_DENIED"),
        (UnknownSession("none"), "NOT_FOUND"),
        (SessionClosed("over"), "NOT_FOUND"),
        (RequestError("bug", status=500), "INTERNAL"),
        (RequestError("busy", status=503), "UNAVAILABLE"),
    ],
)
def test_errors_have_googles_shape(problem, status) -> None:
    assert gemini.error(problem) == {"error": {"code": problem.status, "message": problem.message, "status": status}}


def test_overflow_is_said_in_googles_words() -> None:
    said = gemini.error(ContextOverflow(100, 120))["error"]["message"]
    assert said == "The input token count (120) exceeds the maximum number of tokens allowed (100)."


# ---- streams ----


def chunks(frames: list[str]) -> list[dict]:
    assert all(frame.startswith("data: ") and frame.endswith("\n\n") and frame.count("\n") == 2 for frame in frames)
    return [json.loads(frame[6:]) for frame in frames]


def run(answer: ModelReply, *deltas: Delta, **fields) -> list[dict]:
    stream = gemini.Stream(parse(STREAM, **fields), text_of, "tiny")
    stream.accepted(answer.id, answer.prompt_ids)
    frames = stream.start()
    for delta in deltas:
        frames += stream.delta(delta)
    return chunks([*frames, *stream.finish(answer)])


def parts(chunks: list[dict], index: int = 0) -> list[dict]:
    """The parts of a candidate, those without anything left out."""
    candidates = [candidate for chunk in chunks for candidate in chunk["candidates"] if candidate["index"] == index]
    return [part for candidate in candidates for part in candidate["content"]["parts"] if part != {"text": ""}]


def test_a_stream_in_pieces_ends_with_reason_and_usage() -> None:
    got = run(reply(), Delta(0, "He"), Delta(0, "llo"))
    assert parts(got) == [{"text": "He"}, {"text": "llo"}]
    assert [chunk["candidates"][0].get("finishReason") for chunk in got] == [None, None, None, "STOP"]
    assert [("usageMetadata" in chunk) for chunk in got] == [False, False, False, True]
    assert {(chunk["responseId"], chunk["modelVersion"]) for chunk in got} == {("c0", "tiny")}


def test_calls_come_whole_at_the_end_and_a_broken_one_is_text() -> None:
    call = ToolCall("call_0", "run", '{"cmd": "ls"}')
    pieces = [Delta(0, "so"), Delta(0, calls=(CallDelta(0, "call_0", "run", '{"cmd'),))]
    got = parts(run(reply(Message("assistant", "so", (call,)), finish="tool_calls"), *pieces))
    assert got == [{"text": "so"}, {"functionCall": {"id": "call_0", "name": "run", "args": {"cmd": "ls"}}}]
    broken = run(reply(Message("assistant", "so {oops", malformed=True)), *pieces, Delta(0, " {oops"))
    assert parts(broken) == [{"text": "so"}, {"text": " {oops"}]


def test_an_answer_given_again_comes_whole() -> None:
    asked = {"generationConfig": {"thinkingConfig": {"includeThoughts": True}}}
    got = run(reply(Message("assistant", "Hello", reasoning="hm")), **asked)
    assert parts(got) == [{"text": "hm", "thought": True}, {"text": "Hello"}]


def test_every_candidate_of_a_stream_ends() -> None:
    got = run(
        reply(Message("assistant", "a"), Message("assistant", "b")),
        Delta(1, "b"),
        generationConfig={"candidateCount": 2},
    )
    assert (parts(got, 0), parts(got, 1)) == ([{"text": "a"}], [{"text": "b"}])
    ends = [c["index"] for chunk in got for c in chunk["candidates"] if "finishReason" in c]
    assert ends == [0, 1]


def test_extras_and_errors_of_a_stream() -> None:
    assert run(reply(overridden={"top_k": 0}))[-1]["overridden"] == {"top_k": 0}
    stream = gemini.Stream(parse(STREAM), text_of, "tiny")
    (bare,) = stream.fail(RequestError("boom"))
    assert json.loads(bare)["error"]["message"] == "boom"
