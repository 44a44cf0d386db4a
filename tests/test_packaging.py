"""The project file and the wheel: everything imported is declared, everything needed is inside, an install works."""

from __future__ import annotations

import ast
import os
import re
import shutil
import site
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

import minirllm

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
FAMILIES = {"minirllm.tasks": "tasks", "minirllm.harnesses": "harnesses"}


OURS = {"minirllm", "tasks", "harnesses"}
DISTRIBUTION = {"yaml": "pyyaml"}  # where it is not called like its module


def normal(name: str) -> str:
    """A distribution's name as registries compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def requirement(line: str) -> str:
    return normal(re.match(r"[\w.-]+", line)[0])


def imported() -> dict[str, set[str]]:
    """Outside packages that the installed code imports anywhere -> the files that do."""
    found: dict[str, set[str]] = {}
    for path in [p for folder in ("minirllm", "tasks", "harnesses") for p in (ROOT / folder).rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Import():
                    names = [alias.name for alias in node.names]
                case ast.ImportFrom():
                    names = [node.module or ""]
                case ast.Call(func=ast.Attribute(attr="import_module"), args=[ast.Constant(value=str(name))]):
                    names = [name]
                case _:
                    continue
            for name in {name.split(".")[0] for name in names} - set(sys.stdlib_module_names) - OURS:
                found.setdefault(normal(DISTRIBUTION.get(name, name)), set()).add(str(path.relative_to(ROOT)))
    return found


def test_what_is_imported_is_declared_and_the_other_way_round() -> None:
    declared = {requirement(line) for line in PROJECT["project"]["dependencies"]}
    extras = {
        requirement(line)
        for name, lines in PROJECT["project"]["optional-dependencies"].items()
        if name != "dev"
        for line in lines
    }
    used = imported()
    assert {name: files for name, files in used.items() if name not in declared | extras} == {}
    assert declared - set(used) == set()


def test_every_dependency_is_pinned_once() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert [line for line in lines if not re.fullmatch(r"[\w.-]+==[\w.!]+", line)] == []
    pins = [requirement(line) for line in lines]
    assert len(pins) == len(set(pins))
    wanted = PROJECT["project"]["dependencies"] + PROJECT["project"]["optional-dependencies"]["dev"]
    assert {requirement(line) for line in wanted} - set(pins) == set()


def test_every_folder_with_modules_is_packaged() -> None:
    folders = {".".join(p.parent.relative_to(ROOT).parts) for p in (ROOT / "minirllm").rglob("*.py")}
    assert set(PROJECT["tool"]["setuptools"]["packages"]) == folders | set(FAMILIES)


def test_importing_the_package_is_light_and_sets_the_environment() -> None:
    code = (
        "import sys, os, minirllm; assert not {'torch', 'numpy', 'httpx', 'transformers'} & set(sys.modules);"
        "assert minirllm.set_too_late == ();"
        "from minirllm import rollout, evaluator, Task, Episode, EvalOutput, Signal, Config;"
        "assert 'torch' not in sys.modules;"
        "assert set(minirllm.__all__) <= set(dir(minirllm));"
        "print(os.environ['GOMP_SPINCOUNT'], os.environ.get('MKL_CBWR'), os.environ['CUBLAS_WORKSPACE_CONFIG'])"
    )
    ours = ("GOMP_SPINCOUNT", "MKL_CBWR", "CUBLAS_WORKSPACE_CONFIG")
    env = {name: value for name, value in os.environ.items() if name not in ours}
    fresh = subprocess.run([sys.executable, "-c", code], env=env, cwd=ROOT, capture_output=True, text=True, check=True)
    settings = minirllm.arithmetic_settings(minirllm.cpuinfo())
    assert fresh.stdout.split() == ["1000", str(settings.get("MKL_CBWR")), ":4096:8"]
    chosen = {**env, "GOMP_SPINCOUNT": "7", "MKL_CBWR": "COMPATIBLE"}
    kept = subprocess.run(
        [sys.executable, "-c", code], env=chosen, cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert kept.stdout.split()[:2] == ["7", "COMPATIBLE"]
    late = "import sys; sys.modules['torch'] = sys; import minirllm; print(*minirllm.set_too_late)"
    said = subprocess.run([sys.executable, "-c", late], env=env, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "GOMP_SPINCOUNT" in said.stdout.split()


@pytest.mark.parametrize(
    ("cpuinfo", "mode"),
    [
        ("vendor_id : GenuineIntel\nflags : fpu avx2 avx512f\n", "AVX512,STRICT"),
        ("vendor_id : GenuineIntel\nflags : fpu avx2\n", "AVX2,STRICT"),
        ("vendor_id : GenuineIntel\nflags : fpu sse4_2\n", None),
        ("vendor_id : AuthenticAMD\nflags : fpu avx2 avx512f\n", None),
        ("", None),
    ],
)
def test_strict_arithmetic_is_asked_for_where_it_exists(cpuinfo: str, mode: str | None) -> None:
    assert minirllm.arithmetic_settings(cpuinfo).get("MKL_CBWR") == mode


def test_unknown_public_name() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = minirllm.nothing


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, so that no build folder is left in the checkout."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("minirllm", "tasks", "harnesses"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    build = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--wheel-dir",
        str(out),
        str(source),
    ]
    subprocess.run(build, check=True, timeout=110)
    (built,) = out.glob("*.whl")
    return built


@pytest.mark.slow
def test_wheel_holds_every_module(wheel: Path) -> None:
    inside = set(zipfile.ZipFile(wheel).namelist())
    wanted = {str(p.relative_to(ROOT)) for p in (ROOT / "minirllm").rglob("*.py")} | {"minirllm/py.typed"}
    wanted |= {f"minirllm/{p.relative_to(ROOT)}" for folder in FAMILIES.values() for p in (ROOT / folder).rglob("*.py")}
    assert wanted - inside == set()
    assert {name for name in inside if ".dist-info/" not in name} - wanted == set()
    assert any(name.endswith("licenses/LICENSE") for name in inside)


@pytest.mark.slow
def test_installed_wheel_works_outside_the_checkout(wheel: Path, tmp_path: Path) -> None:
    home = tmp_path / "venv"
    venv.create(home, with_pip=False)
    (packages,) = home.glob("lib/python*/site-packages")
    (packages / "others.pth").write_text(
        "\n".join(site.getsitepackages())
    )  # the dependencies, not the editable install
    python = str(home / "bin" / "python")
    subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "--python",
            python,
            "install",
            "--quiet",
            "--no-deps",
            "--force-reinstall",
            str(wheel),
        ],
        check=True,
        timeout=110,
    )

    def run(*command: str) -> str:
        env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=110)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    program = str(home / "bin" / "minirllm")
    assert {"train", "eval", "serve", "show"} <= set(run(program, "--help").split())
    assert run(program, "--version").split()[-1] == minirllm.__version__
    where = run(python, "-c", "import minirllm.tasks.first_letter as task; print(task.__file__)")
    assert Path(where.strip()).is_relative_to(packages)
    small = ["--model", "tiny", "--steps", "1", "--batch-size", "2", "--group-size", "2", "--set", "eval_tasks=0"]
    run(program, "train", "smoke", *small, "--run", "one")  # by name: there is no task file here
    assert (tmp_path / "runs" / "one" / "metrics.jsonl").is_file()
