"""What an installation needs and holds."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import pipeplan
from pipeplan.chain import Chain, Layer
from pipeplan.cli import main
from pipeplan.plan import Plan

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def names(requirements: list[str]) -> set[str]:
    """The packages that requirements name."""
    return {re.split(r"[^A-Za-z0-9_-]", line, maxsplit=1)[0] for line in requirements}


def test_extras_keep_torch_and_solvers_apart() -> None:
    """Planning pulls no torch, a training node neither ortools nor numba."""
    base, extras = names(PROJECT["dependencies"]), PROJECT["optional-dependencies"]
    assert not base & {"torch", "ortools", "transformers", "matplotlib", "numba"}
    assert "torch" not in names(extras["plan"])
    assert not names(extras["run"]) & {"ortools", "numba"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project's wheel, built from a copy so that nothing is left in the working tree."""
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(
        ROOT / "pipeplan", source / "pipeplan", ignore=shutil.ignore_patterns("__pycache__")
    )
    build = "from setuptools.build_meta import build_wheel; print(build_wheel('dist'))"
    done = subprocess.run(
        [sys.executable, "-c", build], cwd=source, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return source / "dist" / done.stdout.splitlines()[-1]


def test_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    """Every module, schema and type marker is in the wheel; tests and examples are not."""
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    kept = {
        str(file.relative_to(ROOT))
        for pattern in ("*.py", "*.json", "templates/*", "py.typed")
        for file in (ROOT / "pipeplan").rglob(pattern)
    }
    assert packed == kept
    assert f"pipeplan-{pipeplan.__version__}-" in wheel.name


@pytest.mark.parametrize("missing", [("torch",), ("torch", "ortools", "numba", "matplotlib")])
def test_wheel_plans_without(missing: tuple[str, ...], wheel: Path, tmp_path: Path) -> None:
    """The unpacked wheel plans a chain file without torch; also without the planner's extra.

    Without ortools plans are searched greedily only, and the plan says so.
    """
    place = tmp_path / "installed"
    zipfile.ZipFile(wheel).extractall(place)
    layers = tuple(
        Layer(name=name, forward_ns=d, backward_ns=d, output_bytes=1)
        for name, d in zip("abc", (1, 2, 1), strict=True)
    )
    (tmp_path / "chain.json").write_text(Chain(name="three", layers=layers).to_json())
    code = f"""
import sys
sys.modules.update(dict.fromkeys({missing!r}))
import pipeplan
from pipeplan.cli import main
from pipeplan.plan import Plan
print(pipeplan.__file__)
machines = ["--gpus", "2", "--memory", "1MB", "--bandwidth", "inf"]
sys.exit(main(["plan", "chain.json", *machines, "-o", "plan.json"]))
"""
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(place)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(place))
    plan = Plan.read(tmp_path / "plan.json")
    assert plan.period_per_microbatch == 4
    assert ("ortools is not installed" in " ".join(done.stdout.split())) == ("ortools" in missing)


def test_training_needs_no_ortools(tmp_path: Path) -> None:
    """Without the planner's extra a plan is launched, its run reported and made a page."""
    chain, plan, run = (str(tmp_path / name) for name in ("chain.json", "plan.json", "run"))
    task = f"{ROOT / 'examples' / 'mlp.py'}:task"
    assert main(["profile", task, "--repeats", "2", "--warmup", "0", "-o", chain]) == 0
    machines = ["--gpus", "1", "--memory", "1GiB", "--bandwidth", "inf"]
    assert main(["plan", chain, *machines, "--semantics", "flush", "-o", plan]) == 0
    code = f"""
import sys
sys.modules.update(dict.fromkeys(("ortools", "numba", "matplotlib")))
from pipeplan.launch.__main__ import main as launch
from pipeplan.cli import main
from pipeplan.plan import Plan
assert launch(["--plan", {plan!r}, "--task", {task!r}, "--steps", "3", "--out", {run!r}]) == 0
assert main(["verify", {plan!r}]) == 0
assert main(["simulate", {plan!r}]) == 0
assert main(["report", {run!r}, "--html", {run + ".html"!r}]) == 0
"""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "flush: step" in done.stdout
    assert (tmp_path / "run" / "model.pt").is_file()
    assert "plan over run" in (tmp_path / "run.html").read_text()


def test_a_package_that_is_too_old_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's own message is that `pipeplan` has no such name."""

    def old(_: str) -> object:
        raise AttributeError("type object 'Tag' has no attribute 'inplace'")

    monkeypatch.setattr(pipeplan.importlib, "import_module", old)
    with pytest.raises(
        ImportError, match="Pipeline: cannot be imported: type object 'Tag' has no"
    ):
        pipeplan.Pipeline  # noqa: B018
