"""Tests and benchmarks are strangers; folders of tests are rooms; a class name is one idea."""

from __future__ import annotations

import ast
import functools
from collections import Counter
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
BESIDE = {"docs", "research"}
"""Folders of unit tests that are no room of the package."""


class Names(NamedTuple):
    """Names in a file, wherever they are."""

    imported: list[str]
    """Modules."""
    classes: list[str]


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """All of them, nested ones too, but no expressions: most of a file, and they name nothing."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.expr):
            yield child
            yield from statements(child)


@functools.cache
def names_in(file: Path) -> Names:
    """What several tests ask: files are read once."""
    imported: list[str] = []
    classes: list[str] = []
    for node in statements(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            imported += (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            imported.append(node.module)
        elif isinstance(node, ast.ClassDef):
            classes.append(node.name)
    return Names(imported, classes)


@pytest.mark.parametrize(("here", "there"), [("tests", "benchmarks"), ("benchmarks", "tests")])
def test_tests_and_benchmarks_are_strangers(here: str, there: str) -> None:
    """What both need is in `pipeplan.testing`; neither is imported by the package or a study."""
    files = [*(ROOT / here).rglob("*.py"), *(ROOT / "pipeplan").rglob("*.py")]
    files += (ROOT / "research").rglob("*.py")
    wrong = [
        f"{file.relative_to(ROOT)}: {name}"
        for file in files
        for name in names_in(file).imported
        if name.split(".")[0] == there
    ]
    assert not wrong


def test_folders_are_rooms() -> None:
    """Each folder of unit tests is named as a package of pipeplan, or is one of a few others."""
    unit = ROOT / "tests" / "unit"
    names = {str(file.parent.relative_to(unit)) for file in unit.rglob("test_*.py")} - {"."}
    package = ROOT / "pipeplan"
    rooms = {str(each.parent.relative_to(package)) for each in package.rglob("__init__.py")}
    assert names - rooms == BESIDE


def test_pytest_looks_into_every_folder(pytestconfig: pytest.Config) -> None:
    """It passes over folders of some names, such as `dist`: tests in them would never run."""
    passed_over = pytestconfig.getini("norecursedirs")
    folders = {file.parent for file in (ROOT / "tests").rglob("test_*.py")}
    wrong = {
        str(folder)
        for folder in folders
        for part in folder.relative_to(ROOT).parts
        if any(fnmatch(part, pattern) for pattern in passed_over)
    }
    assert not wrong


def test_no_class_name_means_two_things() -> None:
    """Both judges of a plan count `StageBytes`, and share no code."""
    found = Counter(
        name
        for file in (ROOT / "pipeplan").rglob("*.py")
        for name in names_in(file).classes
        if not name.startswith("_")
    )
    assert {name for name, times in found.items() if times > 1} == {"StageBytes"}


def test_the_map_names_files_that_exist() -> None:
    """tests/README.md: each path in back quotes, from tests on, or beside the one before it."""
    text = (ROOT / "tests" / "README.md").read_text(encoding="utf-8")
    names = {file.name for file in (ROOT / "tests").rglob("*.py")}
    said = {part.split("::")[0] for part in text.split("`")[1::2] if ".py" in part}
    assert said
    for each in said:
        if "*" in each:
            assert list((ROOT / "tests").rglob(each.rpartition("/")[2])), each
        elif "/" in each:
            assert (ROOT / "tests" / each).is_file(), each
        else:
            assert each in names or f"test_paper_examples{each}" in names, each
