"""Weights and data that come out the same at every call, or are refused."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from pipeplan import Pipeline
from pipeplan.capture import profile, profile_task
from pipeplan.capture.estimation.task_estimate import estimate_task
from pipeplan.capture.measurement.fused_stages import measure_stages
from pipeplan.devices import find_device
from pipeplan.errors import InputError
from pipeplan.launch.__main__ import main as launch
from pipeplan.repeat import check_data, fingerprint, kept_generators, seed_all
from pipeplan.task import Task
from tests import launch_task, pipelines

Data = Callable[[int], tuple[Tensor, Tensor]]


def _loader() -> DataLoader[tuple[Tensor, ...]]:
    rows, classes = zip(*map(pipelines.data, range(8)), strict=True)
    return DataLoader(TensorDataset(torch.cat(rows), torch.cat(classes)), 5, shuffle=True)


def _next_of_a_loader() -> Data:
    def endless() -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            yield from ((rows, classes) for rows, classes in _loader())

    batches = endless()
    return lambda _: next(batches)


def _listed_loader() -> Data:
    batches = [(rows, classes) for rows, classes in _loader()]
    return lambda number: batches[number % len(batches)]


def _drawn(_: int) -> tuple[Tensor, Tensor]:
    return torch.randn(5, 6), torch.randint(0, 3, (5,))


def _by_numpy(number: int) -> tuple[Tensor, Tensor]:
    rows, classes = pipelines.data(number)
    return rows + float(np.random.rand()), classes


def _target_drawn(number: int) -> tuple[Tensor, Tensor]:
    return pipelines.data(number)[0], torch.randint(0, 3, (5,))


def _second_only(number: int) -> tuple[Tensor, Tensor]:
    return _drawn(number) if number else pipelines.data(number)


REFUSED: dict[str, tuple[Data, str]] = {
    "the next of a shuffled loader": (_next_of_a_loader(), r"data\(0\): got another input"),
    "drawn from torch": (_drawn, r"data\(0\): got another input"),
    "noise of numpy": (_by_numpy, r"data\(0\): got another input"),
    "a drawn target": (_target_drawn, r"data\(0\): got another target"),
    "from the second on": (_second_only, r"data\(1\): got another input"),
}


def of(data: Data) -> Task:
    """The toy task with other data."""
    return replace(launch_task.task(0), data=data)


@pytest.mark.parametrize("name", REFUSED)
def test_data_that_are_no_function_of_the_number(name: str) -> None:
    """Whoever takes a task refuses it before any work: measuring, estimating, training."""
    data, message = REFUSED[name]
    plan = launch_task.plan(1, "flush")
    for take in (
        lambda: profile_task(of(data), repeats=1, warmup=0),
        lambda: estimate_task(of(data), find_device("a100")),
        lambda: measure_stages(of(data), plan, repeats=1, warmup=0),
        lambda: Pipeline(of(data), plan),
    ):
        with pytest.raises(InputError, match=f"task: {message} at the second call"):
            take()


def drawing(seed: int) -> Task:
    """For `launch`: data that are drawn."""
    return replace(launch_task.task(seed), data=_drawn)


def test_launch_refuses_them(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """One line, exit code 2, nothing written."""
    file = tmp_path / "plan.json"
    file.write_text(launch_task.plan(1, "flush").to_json())
    words = ["--plan", str(file), "--task", "tests.unit.test_repeat:drawing"]
    assert launch([*words, "--out", str(tmp_path / "run")]) == 2
    assert "error: task: data(0): got another input at the second call" in capfd.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("data", [pipelines.data, _listed_loader(), lambda _: pipelines.data(3)])
def test_data_that_repeat(data: Data) -> None:
    """Seeded by number, a loader's batches in a list, always the same one: taken as they are."""
    assert check_data(of(data)) == check_data(of(data))
    assert check_data(of(data)) != check_data(of(lambda number: pipelines.data(number + 9)))


def test_one_micro_batch_is_enough() -> None:
    """A data set of one micro-batch has no second one to look at."""
    batches = [pipelines.data(0)]
    assert check_data(of(lambda number: batches[number]))
    with pytest.raises(InputError, match=r"data\(0\) failed"):
        check_data(of(lambda number: batches[number + 1]))


def by_generators() -> Task:
    """Weights from numpy, Python and torch, none of which the task seeds."""
    layers = [nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)]
    with torch.no_grad():
        layers[0].weight.copy_(torch.from_numpy(np.random.rand(6, 6)))
        layers[1].weight.fill_(random.random())
    return replace(launch_task.task(0), model=layers)


def weights(task: Task) -> str:
    """A fingerprint of all of the model's."""
    assert isinstance(task.model, list)
    return fingerprint(p for layer in task.model for p in layer.parameters())


def test_one_seed_for_all_generators(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models initialised by numpy and Python repeat with the seed, as those by torch do."""
    seed_all(5)
    first = weights(by_generators())
    assert weights(by_generators()) != first
    seed_all(5)
    assert weights(by_generators()) == first
    seed_all(2**32 + 6)
    assert weights(by_generators()) != first
    seen: list[str] = []

    def seeing() -> Task:
        torch.manual_seed(0)  # only the others are left to whoever loads
        made = by_generators()
        seen.append(weights(made))
        by_generators()  # the next one begins elsewhere
        return made

    monkeypatch.setattr(launch_task, "seeing", seeing, raising=False)
    for _ in range(2):
        profile("tests.launch_task:seeing", repeats=1, warmup=0, seed=7)
    assert seen[0] == seen[1]


def test_fingerprints_are_of_shape_type_and_bits() -> None:
    """NaN equals itself, zero is not minus zero, a view is what it shows; every type has one."""
    nan = torch.tensor([torch.nan, 1.0])
    assert fingerprint([nan]) == fingerprint([nan.clone()])
    kinds = [
        torch.zeros(4),
        -torch.zeros(4),
        torch.zeros(2, 2),
        torch.zeros(4, dtype=torch.bfloat16),
        torch.zeros(4, dtype=torch.bool),
        torch.zeros(4, dtype=torch.complex64),
        torch.zeros(0),
        torch.tensor(0.0),
        torch.zeros(4).to_sparse(),
    ]
    assert len({fingerprint([each]) for each in kinds}) == len(kinds)
    table = torch.arange(12.0).reshape(3, 4)
    assert fingerprint([table.T]) == fingerprint([table.T.contiguous()])
    assert fingerprint([table.T]) != fingerprint([table])
    assert all(fingerprint([a]) != fingerprint([b]) for a, b in itertools.pairwise(kinds))


@pytest.mark.parametrize(("initialized", "kept"), [(True, [0, 1, 2]), (False, [])])
def test_generators_of_gpus_are_kept_where_they_are_in_use(
    initialized: bool, kept: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Named, or torch warns of each of several GPUs; CUDA is not begun for it."""
    asked: list[list[int]] = []

    @contextmanager
    def fork(devices: Sequence[int]) -> Iterator[None]:
        asked.append(list(devices))
        yield

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: initialized)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.random, "fork_rng", fork)
    with kept_generators():
        pass
    assert asked == [kept]
