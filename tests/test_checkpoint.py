"""What is saved is what is loaded, bit for bit, here and by plain peft and transformers; what is torn is not used."""

import asyncio
import json
import resource

import numpy as np
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from minirllm import checkpoint
from minirllm.algorithms import create
from minirllm.batch import build
from minirllm.config import Config
from minirllm.errors import CheckpointError, ModelError
from minirllm.models import tiny
from minirllm.policy import Policy
from minirllm.trainer import Trainer
from minirllm.tree import TokenTree
from minirllm.types import Completion, Episode, Step, Trajectory


@pytest.fixture
def make():
    """(policy, trainer) of a fresh tiny model; determinism off, since nothing here samples."""
    policies = []

    def new(rank=2, seed=1):
        config = Config(
            model="tiny", lora_rank=rank, lr=1e-2, lr_schedule="cosine", steps=4, warmup_steps=1, determinism="off"
        )
        policies.append(Policy(*tiny.build(seed), config))
        return policies[-1], Trainer(policies[-1], config, create("grpo"))

    yield new
    for policy in policies:
        policy.close()


def batch(policy, step):
    """A batch that depends on the step only."""
    rng = np.random.default_rng(step)
    episodes = []
    for index in range(3):
        tree, answer = TokenTree(), rng.integers(0, 256, 5).tolist()
        node = tree.add([1, 2, 3], Completion(answer, [-5.0] * 5, "stop", policy.version), f"c{index}")
        trajectory = Trajectory(steps=[Step(f"c{index}", node=node, prompt_length=3, response_length=5)])
        episodes.append(
            Episode(
                id=f"t:{index}",
                task_id="t",
                rollout_idx=index,
                reward=float(index),
                tree=tree,
                trajectories=[trajectory],
            )
        )
    return build(episodes, policy.config, create("grpo"), policy.version)


def train(policy, trainer, steps):
    async def run():
        for _ in range(steps):
            await trainer.update(batch(policy, trainer.step))

    asyncio.run(run())
    return policy.weights_sha256()


def logits(model):
    with torch.no_grad():
        return model(input_ids=torch.arange(1, 20)[None], use_cache=False).logits


def flip(path, at=-1):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("rank", [0, 2])
def test_two_steps_and_two_more_after_a_resume_equal_four(make, tmp_path, rank):
    wanted = train(*make(rank), 4)
    policy, trainer = make(rank)
    halfway = train(policy, trainer, 2)
    path = checkpoint.save(tmp_path / "checkpoints", 2, policy, trainer, {"cursor": [7, 8], "best": 0.25})
    assert path.name == "step_000002"

    policy, trainer = make(rank)
    assert policy.weights_sha256() != halfway
    assert checkpoint.load(path, policy, trainer) == {"cursor": [7, 8], "best": 0.25}
    assert (policy.weights_sha256(), policy.version, trainer.step) == (halfway, 2, 2)
    assert train(policy, trainer, 2) == wanted


def test_without_the_moments_the_resume_would_differ(make, tmp_path):
    wanted = train(*make(), 4)
    policy, trainer = make()
    train(policy, trainer, 2)
    trainer.optimizer.state.clear()
    assert train(policy, trainer, 2) != wanted


def test_a_parameter_without_gradient_has_no_state_and_resumes_like_the_others(make):
    """A part of the model that the first steps do not use: torch starts its moments and its count when it is used."""

    def trainer_of(policy):
        policy.model.register_parameter("late", torch.nn.Parameter(torch.ones(3)))
        return Trainer(policy, policy.config, create("grpo"))

    def step(trainer, number):
        if number >= 2:
            trainer.policy.model.late.grad = torch.full((3,), float(number))
        train(trainer.policy, trainer, 1)

    whole = trainer_of(make()[0])
    for number in range(4):
        step(whole, number)
    for saved_after in (1, 3):
        first = trainer_of(make()[0])
        for number in range(saved_after):
            step(first, number)
        tensors, numbers = first.state_dict()
        assert ("exp_avg/late" in tensors) == (saved_after == 3)
        second = trainer_of(first.policy)
        second.policy.model.late.data.copy_(first.parameters["late"].data)
        second.load_state_dict({name: value.clone() for name, value in tensors.items()}, numbers)
        for number in range(saved_after, 4):
            step(second, number)
        assert second.policy.weights_sha256() == whole.policy.weights_sha256()
        assert int(second.optimizer.state[second.parameters["late"]]["step"]) == 2  # its own count


def test_state_of_other_parameters_is_refused(make):
    policy, trainer = make()
    train(policy, trainer, 1)
    tensors, numbers = trainer.state_dict()
    name = next(iter(trainer.parameters))
    for wrong in (
        {**tensors, f"exp_avg/{name}": torch.zeros(1)},
        {**tensors, "exp_avg/other": torch.zeros(1)},
        {key: value for key, value in tensors.items() if key != f"exp_avg_sq/{name}"},
    ):
        with pytest.raises((KeyError, ValueError)):
            trainer.load_state_dict(wrong, numbers)
    trainer.load_state_dict(tensors, numbers)


def test_the_adapter_loads_with_plain_peft(make, tmp_path):
    policy, trainer = make(rank=2)
    train(policy, trainer, 2)
    path = checkpoint.save(tmp_path, 2, policy, trainer, {})
    model, _ = tiny.build(1)
    model.set_attn_implementation("eager")
    before = logits(model)
    loaded = logits(PeftModel.from_pretrained(model, path).eval())
    policy.model.get_base_model().set_attn_implementation("eager")
    assert torch.equal(loaded, logits(policy.model))
    assert not torch.equal(loaded, before)


def test_the_full_model_loads_with_plain_transformers(make, tmp_path):
    policy, trainer = make(rank=0)
    train(policy, trainer, 2)
    path = checkpoint.save(tmp_path, 2, policy, trainer, {})
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")
    policy.model.set_attn_implementation("eager")
    assert torch.equal(logits(model), logits(policy.model))
    tokenizer = AutoTokenizer.from_pretrained(path)
    assert tokenizer.encode("héllo") == policy.tokenizer.encode("héllo")
    assert tokenizer.chat_template == policy.tokenizer.chat_template


def test_a_flipped_bit_in_any_file_is_found_and_the_one_before_is_used(make, tmp_path):
    policy, trainer = make()
    train(policy, trainer, 1)
    first = checkpoint.save(tmp_path, 1, policy, trainer, {})
    second = checkpoint.save(tmp_path, 2, policy, trainer, {})
    assert checkpoint.newest(tmp_path) == (second, [])
    assert checkpoint.newest(tmp_path, until=1) == (first, [])
    assert checkpoint.newest(tmp_path, until=0) == (None, [])
    for file in sorted(second.iterdir()):
        flip(file)
        found, skipped = checkpoint.newest(tmp_path)
        assert found == first, file.name
        assert len(skipped) == 1
        assert file.name in skipped[0]
        with pytest.raises(CheckpointError, match=r"step_000002 is not whole"):
            checkpoint.load(second, policy, trainer)
        flip(file)
    assert checkpoint.newest(tmp_path) == (second, [])


def test_any_changed_byte_of_the_manifest_and_any_lost_last_byte_is_found(make, tmp_path):
    policy, trainer = make()
    first = checkpoint.save(tmp_path, 1, policy, trainer, {})
    second = checkpoint.save(tmp_path, 2, policy, trainer, {})
    manifest = second / "MANIFEST.json"
    for at in range(manifest.stat().st_size):
        flip(manifest, at)
        assert checkpoint.newest(tmp_path)[0] == first, f"byte {at}"
        flip(manifest, at)
    for file in second.iterdir():
        whole = file.read_bytes()
        file.write_bytes(whole[:-1])
        found, (skipped,) = checkpoint.newest(tmp_path)
        assert found == first
        assert file.name in skipped
        file.write_bytes(whole)
    assert checkpoint.newest(tmp_path) == (second, [])


def test_half_written_ones_are_ignored_and_cleared_away(make, tmp_path):
    policy, trainer = make()
    first = checkpoint.save(tmp_path, 1, policy, trainer, {})
    (tmp_path / ".step_000002.partial").mkdir()
    (tmp_path / ".step_000002.partial" / "state.json").write_text("{")
    (tmp_path / "step_000003").mkdir()  # what a file system that reorders writes may leave
    (tmp_path / "step_000004").mkdir()
    (tmp_path / "step_000004" / "MANIFEST.json").write_text('{"files": ["what"]}')
    (tmp_path / "notes").mkdir()
    found, skipped = checkpoint.newest(tmp_path)
    assert found == first
    assert ["step_000004" in skipped[0], "step_000003" in skipped[1]] == [True, True]
    assert "it has no MANIFEST.json, which is written last" in skipped[1]
    checkpoint.save(tmp_path, 2, policy, trainer, {})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes", "step_000001", "step_000002"]


def test_no_checkpoint_at_all(tmp_path):
    assert checkpoint.newest(tmp_path / "nowhere") == (None, [])


def test_a_missing_file_is_named(make, tmp_path):
    path = checkpoint.save(tmp_path, 1, *make(), {})
    (path / "optimizer.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"optimizer\.safetensors is missing"):
        checkpoint.verify(path)


def test_the_newest_and_the_best_are_kept(make, tmp_path):
    policy, trainer = make()
    for step in (1, 2, 3, 4, 5):
        checkpoint.save(tmp_path, step, policy, trainer, {}, keep=2, best_step=1 if step < 4 else 2)
        if step == 3:
            assert sorted(path.name for path in tmp_path.iterdir()) == ["step_000001", "step_000002", "step_000003"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_000002", "step_000004", "step_000005"]
    checkpoint.save(tmp_path, 6, policy, trainer, {}, keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step_000006"]


def test_the_same_step_can_be_saved_again(make, tmp_path):
    policy, trainer = make()
    checkpoint.save(tmp_path, 1, policy, trainer, {"try": 1})
    path = checkpoint.save(tmp_path, 1, policy, trainer, {"try": 2})
    assert checkpoint.load(path, policy, trainer) == {"try": 2}
    assert [entry.name for entry in tmp_path.iterdir()] == ["step_000001"]


@pytest.mark.parametrize("limit", [100, 2_000, 20_000])
def test_a_disk_that_fills_up_leaves_the_last_one_and_no_debris(make, tmp_path, limit):
    """A real failing write: the kernel refuses files beyond `limit` bytes. The adapter fails, or the moments do."""
    policy, trainer = make()
    train(policy, trainer, 1)
    first = checkpoint.save(tmp_path, 1, policy, trainer, {})
    assert max(path.stat().st_size for path in first.iterdir()) > limit
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, old[1]))
    try:
        with pytest.raises(
            CheckpointError, match=r"Cannot save a checkpoint of step 2 .* The last whole one is step_000001"
        ) as refused:
            checkpoint.save(tmp_path, 2, policy, trainer, {})
        assert "File too large." in str(refused.value)  # a limit of this process: no space would help
        assert "free" not in str(refused.value)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
    assert [path.name for path in tmp_path.iterdir()] == ["step_000001"]
    assert checkpoint.newest(tmp_path) == (first, [])
    train(policy, trainer, 1)  # training goes on


def test_another_rank_or_kind_of_training_is_refused(make, tmp_path):
    path = checkpoint.save(tmp_path, 1, *make(rank=2), {})
    with pytest.raises(ModelError, match=r"does not fit|another"):
        checkpoint.load(path, *make(rank=4))
    with pytest.raises(ModelError, match=r"lora_rank"):
        checkpoint.load(path, *make(rank=0))


def test_the_manifest_lists_every_other_file_and_all_is_json_or_safetensors(make, tmp_path):
    path = checkpoint.save(tmp_path, 1, *make(), {})
    names = {entry.name for entry in path.iterdir()}
    assert set(json.loads((path / "MANIFEST.json").read_text())["files"]) == names - {"MANIFEST.json"}
    assert {name.rpartition(".")[2] for name in names} <= {
        "json",
        "safetensors",
        "md",
        "jinja",
    }  # nothing that runs code when read
