"""A teacher at a URL: two ways to say it, and servers that cannot, fail, or read otherwise."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from minirllm import stack
from minirllm.config import Config
from minirllm.errors import ConfigError, TeacherError
from minirllm.policy import Policy
from minirllm.renderer import Renderer
from minirllm.teachers import remote
from tests.distilled import ASKED, said, steps, taught
from tests.scoring import MODELS, Scorer, answering


@pytest.mark.parametrize("how", ["vllm", "echo", "strict"])
async def test_a_server_says_what_the_model_would(student: tuple[Policy, Renderer], other_model: str, how: str) -> None:
    policy, renderer = student
    answers = ([104, 105, 257], [104])
    near, far = said(policy, renderer, *answers), said(policy, renderer, *answers)
    want = await taught(student, near, teacher=other_model)
    async with answering(Scorer(5, how)) as (url, asked):
        got = await taught(student, far, teacher=url)
    for one, two in zip(steps(near), steps(far), strict=True):
        assert two.advantage == pytest.approx(one.advantage, abs=1e-5)
    assert got["teacher_kl"] == pytest.approx(want["teacher_kl"], abs=1e-5)
    assert got["teacher_agreement"] == want["teacher_agreement"]
    assert {body["model"] for body in asked if body} == {"scorer"}


async def test_a_servers_distribution_is_a_target(student: tuple[Policy, Renderer], other_model: str) -> None:
    policy, renderer = student
    near, far = said(policy, renderer, [104, 105]), said(policy, renderer, [104, 105])
    await taught(student, near, teacher=other_model, teacher_top_k=4)
    async with answering(Scorer(5)) as (url, _):
        await taught(student, far, teacher=url, teacher_top_k=4)
    (ids, values), (want_ids, want) = steps(far)[0].targets, steps(near)[0].targets
    assert ids.tolist() == want_ids.tolist()
    assert values == pytest.approx(want, abs=1e-5)
    async with answering(Scorer(5, "echo")) as (url, _):
        with pytest.raises(TeacherError, match="says no prompt_logprobs, from which teacher_top_k learns"):
            await taught(student, far, teacher=url, teacher_top_k=4)


async def test_a_server_that_cannot_score_is_told_in_a_sentence(student: tuple[Policy, Renderer]) -> None:
    def mute(path: str, body: Any) -> tuple[int, Any]:
        return 200, MODELS if path.endswith("models") else {"choices": [{"text": "x"}]}

    def several(path: str, body: Any) -> tuple[int, Any]:
        return 200, {"data": [{"id": "a"}, {"id": "b"}]}

    def denied(path: str, body: Any) -> tuple[int, Any]:
        return 401, {"error": {"message": "wrong key"}}

    for answer, error, words in (
        (mute, TeacherError, "has neither prompt_logprobs nor echo with logprobs, serve the model with vLLM"),
        (several, ConfigError, "Which model of .* it has a, b"),
        (denied, TeacherError, "answered HTTP 401: .*wrong key"),
    ):
        async with answering(answer) as (url, _):
            with pytest.raises(error, match=words):
                await taught(student, [], teacher=url)


def entries(change: Callable[[dict[str, Any]], Any]) -> Callable[[Any], Any]:
    """The `prompt_logprobs` of an answer with each entry changed."""
    return lambda told: told[:1] + [change(entry) for entry in told[1:]]


def others(**more: float) -> Callable[[Any], Any]:
    return entries(lambda entry: entry | {name.strip("_"): {"logprob": value} for name, value in more.items()})


@pytest.mark.parametrize(
    ("change", "options", "words"),
    [
        (lambda told: 5, {}, "did not score every token"),
        (lambda told: "x", {}, "did not score every token"),
        (lambda told: {"a": 1}, {}, "did not score every token"),
        (lambda told: [1] * len(told), {}, "did not score every token"),
        (entries(lambda entry: dict.fromkeys(entry, -1.0)), {}, "did not score every token"),
        (others(_1000000000000000000000000000000=-0.1), {}, "did not score every token"),
        (entries(lambda entry: {name: {"logprob": -1e308} for name in entry}), {}, "that is not finite"),
        (others(_7=math.nan), {"teacher_top_k": 2}, "did not score every token of .*one is not a number"),
        (others(_999999=-0.1), {"teacher_top_k": 2}, "finds token 999999 likely, but the student has 272 tokens"),
    ],
)
async def test_what_is_no_score_is_told_in_a_sentence(
    student: tuple[Policy, Renderer], change: Callable[[Any], Any], options: dict[str, Any], words: str
) -> None:
    policy, renderer = student
    right = Scorer(5)

    def answer(path: str, body: Any) -> tuple[int, Any]:
        status, told = right(path, body)
        for choice in told.get("choices", []):
            choice["prompt_logprobs"] = change(choice["prompt_logprobs"])
        return status, told

    async with answering(answer) as (url, _):
        with pytest.raises(TeacherError, match=words):
            await taught(student, said(policy, renderer, [104, 105]), teacher=url, **options)


VLLM = {
    "no such model": ({}, {"teacher_model": "scorr"}, ConfigError, "/v1 has no model scorr. .* it has scorer.$"),
    "no such model, top-k": (
        {}, {"teacher_model": "scorr", "teacher_top_k": 4}, ConfigError, "/v1 has no model scorr. .* it has scorer.$",
    ),
    "too many likely tokens": (
        {}, {"teacher_top_k": 21}, ConfigError,
        "does not say 21 likely tokens, lower teacher_top_k, or .*--max-logprobs 21.*: .*HTTP 400: Requested",
    ),
    "logits": ({"logits": True}, {}, TeacherError, r"gave a first call a log-probability above 0.*--logprobs-mode"),
}  # fmt: skip


@pytest.mark.parametrize(("has", "options", "error", "words"), VLLM.values(), ids=list(VLLM))
async def test_what_vllm_refuses_is_told_before_anything_is_sampled(
    student: tuple[Policy, Renderer], has: dict[str, Any], options: dict[str, Any], error: type[Exception], words: str
) -> None:
    scorer = Scorer(5)
    vars(scorer).update(has)
    async with answering(scorer) as (url, _):
        with pytest.raises(error, match=words) as told:
            await taught(student, [], teacher=url, **options)
    assert "serve the model with vLLM" not in str(told.value)
    assert "{" not in str(told.value)


@pytest.mark.parametrize("over", [0, 1])
async def test_a_call_longer_than_the_server_reads_is_named_and_nothing_asked(
    student: tuple[Policy, Renderer], over: int
) -> None:
    """One more token than it samples behind what it scores is one too many."""
    policy, renderer = student
    answer = [104] * 200
    size = len(renderer.prompt(ASKED)) + len(answer)
    scorer, episodes = Scorer(5), said(policy, renderer, answer, [104])
    scorer.longest = size + 1 - over
    async with answering(scorer) as (url, asked):
        if over:
            want = rf"reads {size - 1} tokens, and t:0 c0 has {size}: .*--max-model-len {size + 1}\), or lower max_cont"
            with pytest.raises(TeacherError, match=want):
                await taught(student, episodes, teacher=url)
            assert len([body for body in asked if body]) == 1  # at the start
        else:
            assert (await taught(student, episodes, teacher=url))["teacher_kl"] != 0


async def test_a_url_or_a_key_that_is_wrong_is_told_as_such(student: tuple[Policy, Renderer]) -> None:
    def elsewhere(path: str, body: Any) -> tuple[int, Any]:
        return 404, {"detail": "Not Found"}

    def locked(path: str, body: Any) -> tuple[int, Any]:
        return 401, {"error": "Unauthorized"}

    for answer, words in (
        (elsewhere, r"answered HTTP 404: Not Found; give its whole URL, such as http://host:8000/v1"),
        (locked, r"answered HTTP 401: Unauthorized; name the variable that holds its key by --set key_env=NAME"),
    ):
        async with answering(answer) as (url, _):
            for options in ({}, {"teacher_model": "m"}, {"teacher_model": "m", "key_env": "TEACHER_KEY"}):
                with pytest.raises(TeacherError, match=words):
                    await taught(student, [], teacher=url, **options)


async def test_a_server_with_another_tokenizer_is_noticed(student: tuple[Policy, Renderer]) -> None:
    scorer = Scorer(5)
    scorer.text = lambda id: chr(id % 26 + 65)
    async with answering(scorer) as (url, _):
        with pytest.raises(ConfigError, match="it has another tokenizer than the student; name its model by"):
            await taught(student, [], teacher=url)


async def test_a_server_that_fails_is_asked_again_and_one_that_is_gone_is_told(
    student: tuple[Policy, Renderer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "FIRST_WAIT", 0.01)
    scorer, calls = Scorer(5), [0]

    def failing(path: str, body: Any) -> tuple[int, Any]:
        calls[0] += 1
        return (503, {}) if calls[0] % 2 else scorer(path, body)

    policy, renderer = student
    async with answering(failing) as (url, _):
        assert (await taught(student, said(policy, renderer, [104]), teacher=url))["teacher_kl"] != 0
    with pytest.raises(TeacherError, match="does not answer"):
        await taught(student, [], teacher=url)


async def test_our_own_server_says_that_it_cannot_score(student: tuple[Policy, Renderer]) -> None:
    async with stack.serving(Config(model="tiny", threads=1), open_key="sk-open") as place:
        with pytest.raises(TeacherError, match=r"neither prompt_logprobs nor echo.*echo is not supported"):
            await taught(student, [], teacher=f"{place.base_url}/v1", teacher_model="tiny", key_env="TEACHER_KEY")


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEACHER_KEY", "sk-open")
