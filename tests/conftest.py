"""What holds for every test."""

from __future__ import annotations

import gc

import pytest


@pytest.fixture(scope="module", autouse=True)
def small_searched_heap() -> None:
    """What older tests and imports left is searched no more when garbage is collected.

    Torch and its compilers keep millions of objects, which cost half a second at each collection.
    """
    gc.collect()
    gc.freeze()
