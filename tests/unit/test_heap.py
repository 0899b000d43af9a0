"""Freed blocks: the system's again at once, unless the user wants otherwise."""

from __future__ import annotations

import ctypes
import os
import platform
import subprocess
import sys

import pytest

from pipeplan import heap
from pipeplan.cli import entry

GLIBC = platform.libc_ver()[0] == "glibc"
_PROBE = """
import ctypes, os, sys
from pipeplan.heap import give_back_large_blocks

C = ctypes.CDLL(None)
C.malloc.restype = ctypes.c_void_p
C.malloc.argtypes = [ctypes.c_size_t]
C.free.argtypes = [ctypes.c_void_p]


def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def block(size):
    made = C.malloc(size)
    ctypes.memset(made, 1, size)
    return made


if "early" in sys.argv:
    give_back_large_blocks(os.environ)
C.free(block(30 * 2**20))  # from here on glibc has blocks of up to 30 MiB in its heap
if "late" in sys.argv:
    give_back_large_blocks(os.environ)
size = 16 * 2**20
freed, above = block(size), block(2**19)  # larger than any hole that imports leave below
full = resident()
C.free(freed)
print(size - (full - resident()))
"""


def kept(*words: str, **environment: str) -> int:
    """Bytes still resident of 16 MiB that a fresh process freed below another block."""
    done = subprocess.run(
        [sys.executable, "-c", _PROBE, *words],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return int(done.stdout)


@pytest.mark.skipif(not GLIBC, reason="only glibc keeps blocks")
def test_large_blocks_go_back() -> None:
    """Whenever it is said, also when glibc has begun to keep them; without it they stay."""
    assert kept() > 15 * 2**20
    assert kept("early") < 2**20
    assert kept("late") < 2**20


@pytest.mark.skipif(not GLIBC, reason="only glibc keeps blocks")
@pytest.mark.parametrize(
    "environment",
    [
        {"MALLOC_MMAP_THRESHOLD_": str(2**25), "MALLOC_TRIM_THRESHOLD_": str(2**26)},
        {"GLIBC_TUNABLES": f"glibc.malloc.check=0:glibc.malloc.mmap_threshold={2**25}"},
    ],
)
def test_what_the_user_sets_holds(environment: dict[str, str]) -> None:
    """Blocks below a threshold of the environment stay."""
    assert kept("early", **environment) > 15 * 2**20


def test_nothing_happens_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not on another system, nor with a C library that has no such option or refuses it."""
    monkeypatch.setattr(ctypes, "CDLL", lambda _: object())
    assert not heap.give_back_large_blocks({})
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(ctypes, "CDLL", lambda _: pytest.fail("looked for the C library"))
    assert not heap.give_back_large_blocks({})


def test_a_profile_has_its_blocks_as_a_run_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command's own process, and no other verb; who calls `main` with words keeps its heap."""
    asked: list[object] = []
    monkeypatch.setattr(entry, "give_back_large_blocks", asked.append)
    words = ["profile", "no.such.module:task", "-o", "chain.json"]
    assert entry.main(words) == 2
    for own, calls in ((["show", "none.json"], 0), (words, 1)):
        monkeypatch.setattr(sys, "argv", ["pipeplan", *own])
        assert entry.main() == 2
        assert len(asked) == calls
