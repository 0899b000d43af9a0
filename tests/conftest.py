"""What holds for every test."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest

FIRST = (
    "test_docs_run",
    "test_faults",
    "test_torchrun",
    "test_large",
    "test_joining",
    "test_communicators",
    "test_rematerialize",
)
"""Files that take longest: workers that begin with them end together."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The longest files first where several processes run tests (`--no-loadscope-reorder`)."""
    if hasattr(config, "workerinput"):
        places = {name: place for place, name in enumerate(FIRST)}
        items.sort(key=lambda item: places.get(Path(item.path).stem, len(FIRST)))


@pytest.fixture(scope="module", autouse=True)
def small_searched_heap() -> None:
    """What older tests and imports left is searched no more when garbage is collected.

    Torch and its compilers keep millions of objects, which cost half a second at each collection.
    """
    gc.collect()
    gc.freeze()
