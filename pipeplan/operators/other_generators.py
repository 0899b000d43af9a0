"""Random numbers that are not torch's: what a graph has drawn once, a run would draw anew."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from pipeplan.operators.refusals import UncapturableError


@contextmanager
def not_drawn_from() -> Iterator[None]:
    """Puts Python's and numpy's own generators back.

    Raises:
        UncapturableError: if something inside has drawn from one.
    """
    before, states = _positions(), (random.getstate(), np.random.get_state())
    try:
        yield
        drawn = _positions() != before
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
    if drawn:
        raise UncapturableError("the forward draws from Python's or numpy's generator")


def _positions() -> tuple[Any, ...]:
    parts: tuple[Any, ...] = tuple(np.random.get_state())
    arrays = (each.tobytes() if isinstance(each, np.ndarray) else each for each in parts)
    return random.getstate(), *arrays
