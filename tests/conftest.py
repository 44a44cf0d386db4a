"""What every test gets: a watched event loop, one torch thread, no hub access, and the two models.

Owns: fixtures shared by all test files. Does not know: any module under test.
"""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "0" if os.environ.get("MINIRLLM_NET") == "1" else "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", os.environ["HF_HUB_OFFLINE"])
os.environ.setdefault("OMP_NUM_THREADS", "1")  # bits and speed must not depend on the machine's core count

import signal
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from blockbuster import BlockBuster, blockbuster_ctx

import minirllm  # noqa: F401  # before torch: sets the variables that its arithmetic depends on
from tests import engine, podman
from tests.distilled import other_model, student  # noqa: F401
from tests.sampled import make_policy  # noqa: F401


def pytest_configure() -> None:
    """In the background of a script SIGINT is ignored, and every program that a test starts would inherit that."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """`gpu` tests are skipped without a CUDA device, `net` tests without MINIRLLM_NET=1."""
    for item in items:
        if item.get_closest_marker("gpu") and not _cuda():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
        if item.get_closest_marker("net") and os.environ.get("MINIRLLM_NET") != "1":
            item.add_marker(pytest.mark.skip(reason="needs the network: set MINIRLLM_NET=1"))


def _cuda() -> bool:
    import torch

    return torch.cuda.is_available()


@pytest.fixture(scope="session")
def docker_engine() -> Iterator[str]:
    """The URL of a Docker engine, or of podman where MINIRLLM_ENGINE says so."""
    try:
        with (podman if os.environ.get("MINIRLLM_ENGINE") == "podman" else engine).running() as url:
            yield url
    except engine.NoEngine as error:
        pytest.skip(f"the docker sandbox IS NOT TESTED, as no engine can be started: {error}")


@pytest.fixture
def docker_image(docker_engine: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """An image with bash, coreutils and Python, on the engine that DOCKER_HOST then names."""
    for name, value in {"DOCKER_HOST": docker_engine, **engine.variables()}.items():
        monkeypatch.setenv(name, value)
    return engine.IMAGE


def _provider(name: str) -> None:
    """Skip, where a provider's package or machine cannot be played."""
    if not _importable(name):
        pytest.skip(f"the {name} sandbox IS NOT TESTED: its package is not installed (pip install 'minirllm[{name}]')")
    if os.geteuid():
        pytest.skip(f"the {name} sandbox IS NOT TESTED: the machines of its fake need root")


@pytest.fixture
def daytona_account(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A fake of Daytona, and an account there."""
    _provider("daytona")
    from tests.fake_daytona import FakeDaytona
    from tests.machine import elsewhere

    with elsewhere(FakeDaytona()) as fake:
        monkeypatch.setenv("DAYTONA_API_KEY", "key")
        monkeypatch.setenv("DAYTONA_API_URL", fake.url)
        yield fake


@pytest.fixture(scope="session")
def fake_modal() -> Iterator[Any]:
    """One for all tests, as the package keeps its first connection."""
    _provider("modal")
    from tests.fake_modal import FakeModal
    from tests.machine import elsewhere

    with elsewhere(FakeModal()) as fake, pytest.MonkeyPatch.context() as patch:
        patch.setenv("MODAL_SERVER_URL", fake.url)
        patch.setenv("MODAL_TOKEN_ID", "ak-1")
        patch.setenv("MODAL_TOKEN_SECRET", "as-1")
        yield fake
        modal = sys.modules.get("modal")
        if modal is not None:
            modal.Client.from_env().close()


@pytest.fixture
def modal_account(fake_modal: Any) -> Any:
    """A fake of Modal, and an account there."""
    fake_modal.created.clear()
    fake_modal.asked.clear()
    fake_modal.dockerfiles.clear()
    return fake_modal


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Undo what an earlier test did to torch's thread count. Costs nothing when torch was never imported."""
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


@pytest.fixture(autouse=True)
def blocking() -> Iterator[BlockBuster]:
    """A blocking call by the package while an event loop runs in that thread fails the test.

    Only calls with the package or a task on the stack count: pytest, the test itself and third-party clients may block.
    """
    with blockbuster_ctx(["minirllm", "tasks"] if _importable("tasks") else ["minirllm"]) as watch:
        for function in watch.functions.values():
            # a module's first import reads its file, and so do tracebacks that show source lines
            function.can_block_in("<frozen importlib._bootstrap>", {"_find_and_load"})
            function.can_block_in("linecache.py", {"checkcache", "updatecache"})
            function.can_block_in("minirllm/sandboxes/daytona.py", {"there"})  # on a loop of the provider's package
        yield watch


def _importable(name: str) -> bool:
    import importlib.util

    return importlib.util.find_spec(name) is not None


@pytest.fixture(scope="session")
def tiny() -> tuple[object, object]:
    """(model, tokenizer) of `minirllm.models.tiny`, shared: a test that changes the weights builds its own."""
    from minirllm.models import tiny

    return tiny.build()


@pytest.fixture(scope="session")
def smollm2() -> object:
    """The embedded SmolLM2-135M-Instruct as a `LoadedModel`, shared: a test that changes the weights loads its own."""
    from minirllm import models

    return models.load("smollm2-135m")
