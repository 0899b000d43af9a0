"""Functions that are machine code where numba is installed, and plain Python where it is not.

What they compute is the same in both cases; machine code takes a thirtieth of the time. The
first process that calls one compiles it; what it compiled lies in a cache beside the source.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache, update_wrapper
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any, Final, ParamSpec, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

_P = ParamSpec("_P")
_R = TypeVar("_R")

AVAILABLE: Final = (
    find_spec("numba") is not None and os.environ.get("NUMBA_DISABLE_JIT", "0") == "0"
)

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Records = Any
"""An array of a structured type, or a record; compiled functions read fields as attributes."""


COMPILING: Final = (
    "numba compiles it first, once after an installation; the limit does not count that"
)
NO_COMPILER: Final = (
    "numba is not installed, or NUMBA_DISABLE_JIT is set, so schedules were searched some thirty"
    " times slower: pip install 'pipeplan[plan]'"
)


def compiled(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """The function as machine code, if numba is there.

    numba takes half a second to load, so that nothing happens before a function is called. Then
    all of its module are taken, and those of other modules that it imports: they call each other.
    """
    return cast("Callable[_P, _R]", _Lazy(function)) if AVAILABLE else function


def compile_s() -> float:
    """Seconds that this process has loaded numba and compiled so far: no search is to blame."""
    return _TIMER.seconds


@contextmanager
def compiling_told(tell: Callable[[], None]) -> Iterator[None]:
    """Tell of all that is compiled meanwhile; what a cache has is only read."""
    before, _TIMER.tell = _TIMER.tell, tell
    try:
        yield
    finally:
        _TIMER.tell = before


class _CompileTimer:
    """Adds up times, and tells of compilations.

    What begins before the last one has ended is part of that.
    """

    def __init__(self) -> None:
        self.seconds, self._depth, self._began = 0.0, 0, 0.0
        self.tell: Callable[[], None] | None = None
        """Whom compilations are told."""

    def compiles(self) -> None:
        """No cache has the function that is called."""
        self.start()
        if self.tell:
            self.tell()

    def start(self) -> None:
        if not self._depth:
            self._began = time.monotonic()
        self._depth += 1

    def end(self) -> None:
        self._depth -= 1
        if not self._depth:
            self.seconds += time.monotonic() - self._began


_TIMER: Final = _CompileTimer()


@cache
def _loaded() -> Any:
    """Numba's `njit`, whose work is timed from now on."""
    _TIMER.start()
    from numba import njit
    from numba.core import event

    class CompileListener(event.Listener):
        def on_start(self, event: object) -> None:
            _TIMER.compiles()

        def on_end(self, event: object) -> None:
            _TIMER.end()

    event.register("numba:compile", CompileListener())  # type: ignore[no-untyped-call]
    _TIMER.end()
    return njit


class _Lazy:
    """A function that is compiled when it is called."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.machine_code: Any = None
        update_wrapper(self, function)

    def __call__(self, *args: Any) -> Any:
        if self.machine_code is None:
            _compile(self.function.__globals__)
        return self.machine_code(*args)


def _compile(names: dict[str, Any]) -> frozenset[str]:
    """Replace the lazy functions of one module by machine code, and those that it imports.

    Returns:
        The files that its machine code is made of.
    """
    if names["__name__"] in _FILES:
        return _FILES[names["__name__"]]
    njit, own, files = _loaded(), [], {names["__file__"]}
    for name, value in list(names.items()):
        if isinstance(value, _Lazy):
            if value.function.__globals__ is names:
                own.append(name)
            else:
                files |= _compile(value.function.__globals__)
                names[name] = value.machine_code
    for name in own:
        value = names[name]
        try:
            value.machine_code = njit(cache=True)(value.function)
        except RuntimeError:  # neither the source's folder nor the user's cache can be written
            value.machine_code = njit(value.function)
        else:
            _stamp(value.machine_code, files)
        names[name] = value.machine_code
    return _FILES.setdefault(names["__name__"], frozenset(files))


_FILES: Final[dict[str, frozenset[str]]] = {}
"""By module that is compiled: its file and those of what it calls."""


def _stamp(code: Any, files: Iterable[str]) -> None:
    """Let a cached function be made anew when one of `files` changes: numba looks at its own."""
    stats = [os.stat(file) for file in sorted(files)]
    stamp = tuple((stat.st_mtime, stat.st_size) for stat in stats)
    code._cache._cache_file._source_stamp = stamp  # noqa: SLF001


def with_attributes(records: Records) -> Records:
    """The same records for a function that is `compiled`; copies of them where it is not.

    Plain Python reads attributes of numpy's own records twenty times slower.
    """
    if AVAILABLE:
        return records
    names = records.dtype.names
    return [SimpleNamespace(**dict(zip(names, row, strict=True))) for row in records.tolist()]
