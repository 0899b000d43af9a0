"""Ranks that do not belong together are told so when they join, in one line; nobody waits.

A rank that waited would do so for `launches.TIMEOUT_S`, longer than `launched` lets it.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import launch_task
from tests.distributed.launches import STEPS, Told, launched, spec


@dataclass(frozen=True)
class Case:
    """How the last rank differs, and what is said."""

    own: Callable[[Path, list[str]], list[str]]
    """Folder, words of all -> words of the last rank."""
    said: str
    ranks: int = 2
    gpus: int | None = None
    """Of each replica; None: one replica."""


def _other_plan(folder: Path, words: list[str], gpus: int, seed: int) -> list[str]:
    file = folder / "other.json"
    file.write_text(launch_task.plan(gpus, "flush", seed).to_json())
    return ["--plan", str(file), *words[2:]]


def _with(*more: str) -> Callable[[Path, list[str]], list[str]]:
    return lambda _, words: [*words, *more]


CASES = {
    "plan": Case(
        lambda folder, words: _other_plan(folder, words, 4, seed=1),
        r"join: plan: got \w+ on ranks 0-2, \w+ on rank 3, need the same on all ranks",
        ranks=4,
    ),
    "plan for more": Case(
        lambda folder, words: _other_plan(folder, words, 4, seed=0),
        "rank 1: launch: got 2 ranks, need 4",
    ),
    "no plan": Case(
        lambda folder, words: ["--plan", str(folder / "absent.json"), *words[2:]],
        "rank 1: .*absent.json",
    ),
    "seed": Case(_with("--seed", "1"), "join: seed: got 0 on rank 0, 1 on rank 1, need the same"),
    "steps": Case(_with("--steps", "7"), "join: --steps: got 6 on rank 0, 7 on rank 1"),
    "saving": Case(_with("--save-every", "2"), "join: --save-every: got None on rank 0, 2 on"),
    "data": Case(
        _with("--task", "tests.launch_task:other_data"),
        r"join: data of micro-batches 0 and 1: got \w+ on rank 0, \w+ on rank 1, .*task.data must",
    ),
    "weights": Case(
        _with("--task", "tests.launch_task:other_weights"),
        r"join: initial weights: '3.weight': got \w+ on rank 0, \w+ on rank 1, .*seed torch",
    ),
    "weights of a replica": Case(
        _with("--task", "tests.launch_task:other_weights"),
        r"join: initial weights: '3.weight': got \w+ on rank 0, \w+ on rank 1, .*seed torch",
        gpus=1,
    ),
    "out": Case(
        lambda folder, words: [*words[:-1], str(folder / "elsewhere" / "run")],
        "--out .*run: rank 1: got a directory of its own, need one that all ranks share",
    ),
}


@functools.cache
def told(folder: Path) -> dict[str, Told]:
    """All cases, one after the other."""
    specs = []
    for name, case in CASES.items():
        place = folder / name.replace(" ", "-")
        place.mkdir()
        gpus = case.gpus or case.ranks
        words = ("--replicas", str(case.ranks // gpus))
        made: dict[str, Any] = spec(place, launch_task.plan(gpus, "flush"), *words)
        made["ranks"] = case.ranks
        made["own"] = {str(case.ranks - 1): case.own(place, made["words"])}
        specs.append(made)
    return dict(zip(CASES, launched(*specs), strict=True))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where all cases are."""
    return tmp_path_factory.mktemp("joining")


@pytest.mark.parametrize("name", CASES)
def test_one_rank_differs(folder: Path, name: str) -> None:
    """All end with 2 and nobody waits, rank 0 says why, nothing is made or left behind."""
    case, ranks = CASES[name], told(folder)[name]
    assert [each["code"] for each in ranks] == [2] * case.ranks, ranks
    lines = [line for each in ranks for line in each["said"].splitlines()]
    assert len(lines) == 1, ranks
    assert re.match(f"error: {case.said}", ranks[0]["said"]), ranks
    place = folder / name.replace(" ", "-")
    assert not (place / "run").exists()
    assert not (place / "elsewhere").exists()


@pytest.mark.parametrize("ranks", [1, 2])
def test_weights_of_numpy_and_data_of_a_loader(tmp_path: Path, ranks: int) -> None:
    """They follow from the seed on every rank: bit-equal to one process that is seeded alike."""
    words = ("--task", "tests.launch_task:elsewhere_made")
    (told,) = launched(spec(tmp_path, launch_task.plan(ranks, "flush"), *words))
    assert [each["code"] for each in told] == [0] * ranks, told
    state = torch.load(tmp_path / "run" / "model.pt")
    expected = launch_task.trained("flush", STEPS, make=launch_task.elsewhere_made)
    assert state.keys() == expected.weights.keys()
    assert all(torch.equal(state[name], value) for name, value in expected.weights.items())
    usual = launch_task.trained("flush", STEPS)
    assert not torch.equal(state["3.weight"], usual.weights["3.weight"])
