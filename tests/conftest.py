"""What holds for every test."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest

HERE = Path(__file__).parent
FIRST = (
    "unit/docs/test_run.py",
    "distributed/test_faults.py",
    "distributed/test_torchrun.py",
    "distributed/test_large.py",
    "distributed/test_joining.py",
    "distributed/test_communicators.py",
    "zoo/test_smoke.py",
    "unit/runtime/test_layer_programs.py",
    "unit/rematerialized/test_rematerialize.py",
)
"""Files that take longest: workers that begin with them end together."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The longest files first where several processes run tests (`--no-loadscope-reorder`)."""
    if hasattr(config, "workerinput"):
        places = {HERE / name: place for place, name in enumerate(FIRST)}
        items.sort(key=lambda item: places.get(item.path, len(FIRST)))


@pytest.fixture(scope="module", autouse=True)
def small_searched_heap() -> None:
    """What older tests and imports left is searched no more when garbage is collected.

    Torch and its compilers keep millions of objects, which cost half a second at each collection.
    """
    gc.collect()
    gc.freeze()
