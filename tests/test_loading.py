"""What is loaded runs no code: hostile model and checkpoint folders, and a look at all sources."""

from __future__ import annotations

import ast
import contextlib
import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from minirllm import checkpoint, models
from minirllm.config import Config
from minirllm.errors import CheckpointError, ModelError
from minirllm.files import sha256
from minirllm.models import tiny
from minirllm.policy import Policy
from minirllm.renderer import Renderer
from minirllm.types import Message
from tests.test_architecture import PACKAGE, imports, named, sources, tree

# Reading any of these can run code that the file brings.
SENT = {PACKAGE / "rewards" / name for name in ("asserts.py", "inside.py")}
UNSAFE = {"pickle", "cloudpickle", "dill", "joblib", "shelve", "marshal", "yaml", "_pickle"}
UNSAFE_CALLS = {"torch.load", "torch.hub.load", "np.load", "pd.read_pickle", "eval", "exec", "pickle.load"}


def _runs_code(node: ast.AST) -> bool:
    calls = [inner for inner in ast.walk(node) if isinstance(inner, ast.Call)]
    return isinstance(node, ast.FunctionDef) and any(ast.unparse(call.func) in UNSAFE_CALLS for call in calls)


def test_nothing_that_is_loaded_can_run_code() -> None:
    """A static look at all sources. The one pickle is the request to a grader process, over a pipe of our own; YAML is
    read by one module. Two files are sent into a sandbox as text and run code there: nothing here names what does that
    in them."""
    running = {function.name for path in SENT for function in ast.walk(tree(path)) if _runs_code(function)}
    assert running
    for path in set(sources()) - SENT:
        assert not running & {
            node.attr
            for node in ast.walk(tree(path))
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "inside"
        }
    users = {named(path) for path in sources() if {name.split(".")[0] for name in imports(path)} & UNSAFE}
    assert users == {"minirllm/rewards/process.py", "minirllm/sandboxes/compose.py"}
    composing = [node for node in ast.walk(tree(PACKAGE / "sandboxes/compose.py")) if isinstance(node, ast.Call)]
    read = [call for call in composing if ast.unparse(call.func).startswith("yaml.")]
    assert read  # into nodes, which are no objects, by the loader that makes none of the file's choice
    assert all(ast.unparse(call.func) == "yaml.compose_all" and "SafeLoader" in ast.unparse(call) for call in read)
    calls, remote = [], []
    for path in sources():
        for node in ast.walk(tree(path)):
            if path not in SENT and isinstance(node, ast.Call) and ast.unparse(node.func) in UNSAFE_CALLS:
                calls.append(f"{named(path)}:{node.lineno}")
            if isinstance(node, ast.keyword) and node.arg in ("trust_remote_code", "allow_pickle"):
                remote.append((named(path), ast.unparse(node.value)))
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".from_pretrained"):
                assert any(k.arg == "trust_remote_code" for k in node.keywords), f"{named(path)}:{node.lineno}"
    assert calls == []
    assert remote == [("minirllm/models/folder.py", "False")] * len(remote)
    assert remote


class Bomb:
    """Unpickled, it leaves a file."""

    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self) -> Any:
        return Path.touch, (self.mark,)


@pytest.fixture
def hostile(tmp_path: Path) -> tuple[Path, Path]:
    """(a whole model folder to spoil, the file that appears when code from it runs)."""
    folder, mark = tmp_path / "model", tmp_path / "ran"
    model, tokenizer = tiny.build()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    models.load(str(folder))
    for name in ("pytorch_model.bin", "adapter_model.bin", "training_args.bin", "optimizer.pt", "scheduler.pt"):
        (folder / name).write_bytes(pickle.dumps(Bomb(mark)))
    code = f"import pathlib\npathlib.Path({str(mark)!r}).touch()\nclass Evil: pass\n"
    for name in ("modeling_evil.py", "configuration_evil.py", "tokenization_evil.py", "__init__.py"):
        (folder / name).write_text(code)
    return folder, mark


def change(path: Path, **values: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def test_pickles_and_code_in_a_model_folder_are_not_looked_at(hostile: tuple[Path, Path]) -> None:
    folder, mark = hostile
    models.load(str(folder))  # its safetensors are whole
    assert not mark.exists()
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError):  # and pickles are no substitute
        models.load(str(folder))
    assert not mark.exists()


@pytest.mark.parametrize("where", ["config", "tokenizer"])
def test_code_of_a_model_never_runs(hostile: tuple[Path, Path], where: str) -> None:
    folder, mark = hostile
    if where == "config":
        auto = {"AutoConfig": "configuration_evil.Evil", "AutoModelForCausalLM": "modeling_evil.Evil"}
        change(folder / "config.json", auto_map=auto, model_type="evil", architectures=["Evil"])
    else:
        auto_map = {"AutoTokenizer": ["tokenization_evil.Evil", "tokenization_evil.Evil"]}
        change(folder / "tokenizer_config.json", auto_map=auto_map, tokenizer_class="Evil")
    with contextlib.suppress(ModelError) if where == "tokenizer" else pytest.raises(ModelError):
        models.load(str(folder))  # a tokenizer of an unknown class may be read as the data that it is
    assert not mark.exists()


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "optimizer.safetensors", "state.json", "MANIFEST.json"])
@pytest.mark.parametrize("as_link", [False, True])
def test_a_pickle_in_a_checkpoint_is_not_loaded(tmp_path: Path, name: str, as_link: bool) -> None:
    """Under the name of a safetensors or JSON file, with its digest in the manifest: refused, not run."""

    class Numbers:
        def state_dict(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
            return {"m": torch.zeros(3)}, {"step": 1}

        def load_state_dict(self, tensors: dict[str, torch.Tensor], numbers: dict[str, Any]) -> None: ...

    model, tokenizer = tiny.build()
    policy = Policy(model, tokenizer, Config(model="tiny", threads=1, determinism="off"))
    try:
        path = checkpoint.save(tmp_path / "checkpoints", 1, policy, Numbers(), {"seed": 0})
        mark, bomb = tmp_path / "ran", tmp_path / "bomb"
        bomb.write_bytes(pickle.dumps(Bomb(mark)))
        (path / name).unlink()
        if as_link:
            (path / name).symlink_to(bomb)
        else:
            shutil.copy(bomb, path / name)
        if name != "MANIFEST.json":
            manifest = json.loads((path / "MANIFEST.json").read_text())
            manifest["files"][name] = sha256(path / name)
            (path / "MANIFEST.json").write_text(json.dumps(manifest))
        with pytest.raises((CheckpointError, ModelError)) as refused:
            checkpoint.load(path, policy, Numbers())
        assert str(path) in str(refused.value)
        assert not mark.exists()
    finally:
        policy.close()


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}{% for m in messages %}{{ m.content }}{% endfor %}",
        "{{ cycler.__init__.__globals__.os.system('true') }}{% for m in messages %}{{ m.content }}{% endfor %}",
        "{% set x = messages.append %}{{ x({}) }}{% for m in messages %}{{ m.content }}{% endfor %}",
    ],
)
def test_a_chat_template_cannot_leave_its_sandbox(template: str) -> None:
    with pytest.raises(ModelError):
        Renderer(tiny.build_tokenizer(), template=template)


def test_message_is_data_for_the_template() -> None:
    renderer = Renderer(tiny.build_tokenizer())
    text = "{{ 7 * 7 }}{% raw %}"
    assert text in renderer.decode(renderer.prompt([Message("user", text)]))
