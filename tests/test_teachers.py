"""Teachers in this process: what they read and say, what only they are told, and what is learned of it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from minirllm import Task, algorithms
from minirllm.batch import build
from minirllm.config import Config
from minirllm.errors import ConfigError, TaskError, TeacherError
from minirllm.models import tiny
from minirllm.policy import Policy
from minirllm.renderer import Renderer
from minirllm.teachers import Reading, local, privileged
from minirllm.trainer import Trainer
from minirllm.tree import merge
from minirllm.types import Message
from tests.distilled import ASKED, DISTILL, alone, said, steps, taught, thought
from tests.sampled import accumulate


@pytest.mark.parametrize("limit", [640, 16])
async def test_the_advantage_is_the_teachers_logprob_minus_the_students(
    student: tuple[Policy, Renderer], other_model: str, limit: int
) -> None:
    """Whether the rollouts are one forest or several, and against the plain model, one sequence at a time."""
    policy, renderer = student
    answers = [[104, 105, 257], [104, 120], [99]]
    episodes, prompt = said(policy, renderer, *answers), renderer.prompt(ASKED)
    metrics = await taught(student, episodes, teacher=other_model, micro_batch_tokens=limit)
    model, hits, gaps = tiny.build(seed=5)[0], [], []
    for answer, step, episode in zip(answers, steps(episodes), episodes, strict=True):
        rows = alone(model, prompt, answer)
        want = rows.gather(1, torch.tensor(answer)[:, None])[:, 0].double().numpy()
        gap = want - np.array(episode.tree.response(step.node)[1])
        assert step.advantage == pytest.approx(gap.tolist(), abs=1e-5)
        assert step.targets is None
        hits += (rows.argmax(1) == torch.tensor(answer)).tolist()
        gaps += gap.tolist()
    assert metrics["teacher_kl"] == pytest.approx(-np.mean(gaps), abs=1e-5)
    assert metrics["teacher_agreement"] == np.mean(hits)


async def test_the_base_and_the_student_itself_as_teachers(student: tuple[Policy, Renderer]) -> None:
    policy, renderer = student
    episodes = said(policy, renderer, [104, 105])
    metrics = await taught(student, episodes, teacher="base")
    want = alone(tiny.build()[0], renderer.prompt(ASKED), [104, 105]).gather(1, torch.tensor([[104], [105]]))[:, 0]
    assert thought(episodes) == pytest.approx(want.tolist(), abs=1e-5)
    assert metrics["teacher_kl"] != 0
    task = Task("t", metadata={"answer": "42"})
    told = said(policy, renderer, [104, 105], task=task)
    await taught(student, told, teacher="self", privileged="answer")
    prompt = renderer.prompt([Message("user", "hi\n\n(answer: 42)")])
    probe = local._tree([[Reading("x", prompt, [104, 105])]])[0]
    forest = merge([probe])[0]
    want = policy.score(forest)[0].detach()[torch.from_numpy(forest.trained_T)]
    assert thought(told) == pytest.approx(want.tolist(), abs=1e-6)


async def test_turns_are_read_one_behind_the_other(student: tuple[Policy, Renderer], other_model: str) -> None:
    """The second call's prompt goes on behind the first one's sample: each token of the tree is computed once."""
    readings = [Reading("a", [1, 2], [3, 4]), Reading("b", [1, 2, 3, 4, 5], [6], "a"), Reading("c", [1, 2], [3])]
    tree, ends = local._tree([readings[:2], readings[2:]])
    assert tree.num_tokens == 2 + 2 + 2 + 1
    assert [tree.response(ends[name])[0] for name in "abc"] == [[3, 4], [6], [3]]
    scorer = await local.load(Config(**{**DISTILL, "teacher": other_model}), *student)
    found = await scorer.score([[readings[:2], readings[2:]]], 2)
    model = tiny.build(seed=5)[0]
    for reading in readings:
        rows = alone(model, reading.prompt, reading.answer)
        want = rows.gather(1, torch.tensor(reading.answer)[:, None])[:, 0].tolist()
        assert found[reading.id].logprob_A == pytest.approx(want, abs=1e-5)
        assert found[reading.id].top_id_AK.tolist() == rows.topk(2).indices.tolist()


async def test_answers_without_tokens_have_no_scores(student: tuple[Policy, Renderer]) -> None:
    """As of what is no text to a teacher with another tokenizer, of some of a task's rollouts or of all."""
    scorer = await local.load(Config(**DISTILL), *student)
    some = [[Reading("a", [1, 2], [3])], [Reading("b", [1, 2], []), Reading("c", [1, 2], [4], "b")]]
    found = await scorer.score([some, [[Reading("d", [1], [])], []], []], 2)
    assert {name: len(scores.logprob_A) for name, scores in found.items()} == {"a": 1, "b": 0, "c": 1, "d": 0}
    assert found["d"].top_id_AK.shape == (0, 2)


async def test_a_reading_longer_than_the_teacher_reads_is_told(student: tuple[Policy, Renderer]) -> None:
    scorer = await local.load(Config(**DISTILL), *student)
    long = Reading("x", [1] * (student[0].max_positions + 1), [1])
    with pytest.raises(TeacherError, match=r"it reads 131072 tokens, and a call has 131074 of its own"):
        await scorer.score([[[long]]], 1)


# ---- what is learned ----


async def test_a_teachers_distribution_is_the_target_whatever_the_packing(
    student: tuple[Policy, Renderer], other_model: str
) -> None:
    """The loss is the mean KL(student || teacher) over the vocabulary, of each sampled token; with few tokens named,
    that of the vocabulary in which the others are one."""
    policy, renderer = student
    answers = [[104, 105, 257], [104, 120], [99]]
    model, prompt = tiny.build(seed=5)[0], renderer.prompt(ASKED)
    base = policy.model.get_base_model()
    for k in (3, 272):
        episodes = said(policy, renderer, *answers)
        await taught(student, episodes, teacher=other_model, teacher_top_k=k)
        wanted = []
        for answer in answers:
            q, p = (alone(one, prompt, answer) for one in (model, policy.model))
            base.set_attn_implementation("minirllm")
            top = q.topk(k).indices
            named = [log.gather(1, top).exp() for log in (p, q)]
            value = (named[0] * (named[0] / named[1]).log()).sum(1)
            rest = [1 - one.sum(1) for one in named]
            wanted.append(value + (rest[0] * (rest[0] / rest[1]).log() if k < 272 else 0))
        losses, gradients = [], []
        for more in ({}, {"micro_batch_tokens": 16}, {"packing": "paths"}):
            config = Config(**{**DISTILL, "teacher_top_k": k, "grad_clip": 0.0, **more})
            trainer = Trainer(policy, config, algorithms.create("distill"))
            loss, found = accumulate(policy, trainer, build(episodes, config, trainer.algorithm, 0))
            losses.append(loss)
            gradients.append(torch.cat([g.flatten() for g in found.values()]))
        assert losses == pytest.approx([torch.cat(wanted).mean().item()] * 3, rel=1e-3)
        assert gradients[0].norm() > 1e-3
        for gradient in gradients[1:]:
            torch.testing.assert_close(gradient, gradients[0], rtol=1e-3, atol=1e-6)


async def test_the_gradient_is_that_of_the_advantages(
    student: tuple[Policy, Renderer],
) -> None:
    """d/dw of the mean of -advantage * logprob, by autograd through the plain model."""
    policy, renderer = student
    answers = [[104, 105, 257], [99]]
    episodes = said(policy, renderer, *answers)
    await taught(student, episodes)
    config = Config(**{**DISTILL, "grad_clip": 0.0})
    trainer = Trainer(policy, config, algorithms.create("distill"))
    loss, found = accumulate(policy, trainer, build(episodes, config, trainer.algorithm, 0))
    policy.model.get_base_model().set_attn_implementation("eager")
    terms, prompt = [], renderer.prompt(ASKED)
    for answer, step in zip(answers, steps(episodes), strict=True):
        logits = policy.model(input_ids=torch.tensor([prompt + answer]), use_cache=False).logits[0]
        chosen = torch.log_softmax(logits[len(prompt) - 1 : -1], -1).gather(1, torch.tensor(answer)[:, None])[:, 0]
        terms.append(-torch.tensor(step.advantage) * chosen)
    torch.cat(terms).mean().backward()
    policy.model.get_base_model().set_attn_implementation("minirllm")
    for name, parameter in policy.trainable().items():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-3, atol=1e-6)
        parameter.grad = None
    assert loss == pytest.approx(-np.mean([a for step in steps(episodes) for a in step.advantage]), rel=1e-4)


def told_all(task: Task, messages: list[Message]) -> list[Message]:
    return [Message("system", task.metadata["secret"]), *messages]


def told_none(task: Task, messages: list[Message]) -> list[str]:
    return ["x"]


def told_number(task: Task, messages: list[Message]) -> list[Message]:
    return [Message("user", 7)]  # type: ignore[arg-type]


def told_wrong(task: Task, messages: list[Message]) -> list[Message]:
    return [Message("user", task.metadata["gone"])]


def test_a_key_of_the_task_or_a_function_tells_the_teacher() -> None:
    task, messages = Task("t", metadata={"answer": 7, "secret": "s"}), [Message("system", "s"), Message("user", "q")]
    assert privileged.find("answer")(task, messages) == [messages[0], Message("user", "q\n\n(answer: 7)")]
    assert privileged.find(f"{__name__}:told_all")(task, messages)[0] == Message("system", "s")
    for name, error, words in (
        ("grade", TeacherError, "task 't' has no 'grade' in its metadata, but answer, secret"),
        (f"{__name__}:told_none", TeacherError, "must return a list of Message objects with text, got"),
        (f"{__name__}:told_number", TeacherError, "must return a list of Message objects with text, got"),
        (f"{__name__}:told_wrong", TaskError, f"^privileged {__name__}:told_wrong: KeyError: 'gone'"),
    ):
        with pytest.raises(error, match=words):
            privileged.find(name)(task, messages)
    with pytest.raises(TeacherError, match="no message of the user"):
        privileged.find("answer")(task, messages[:1])
    with pytest.raises(ConfigError, match="is no function"):
        privileged.find(f"{__name__}:DISTILL")
    with pytest.raises(ConfigError, match="cannot be imported"):
        privileged.find("nowhere:at_all")
