"""Data sets as micro-batches by number: the same everywhere, loaded ahead by workers."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
)

from pipeplan import Pipeline, batches
from pipeplan.batching import Batches
from pipeplan.errors import InputError
from pipeplan.plan import Semantics
from pipeplan.runtime.data.feed import TaskFeed, Uses
from pipeplan.task import Task
from tests import launch_task, pipelines

SAMPLES, SIZE = 22, 5


class Noisy(Dataset[tuple[Tensor, Tensor]]):
    """Samples that draw, as augmentation does."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.full((6,), float(index)) + 0.1 * torch.rand(6), torch.tensor(index % 3)


def made(workers: int = 0, seed: int = 1) -> Batches:
    """Shuffled micro-batches of five."""
    return batches(Noisy(), size=SIZE, shuffle=True, seed=seed, workers=workers)


def places(data: Batches, number: int) -> list[int]:
    """Which samples a micro-batch has."""
    return [int(row[0]) for row in data(number)[0]]


def test_numbers_mean_the_same_everywhere() -> None:
    """In any order of calls; an epoch has each sample once at most; another one another order."""
    one, two = made(), made()
    forwards = [one(number) for number in range(9)]
    backwards = [two(number) for number in reversed(range(9))][::-1]
    for mine, other in zip(forwards, backwards, strict=True):
        assert all(map(torch.equal, mine, other))
    epochs = [[place for n in range(4) for place in places(one, 4 * e + n)] for e in (0, 1)]
    assert all(len(set(epoch)) == 4 * SIZE for epoch in epochs)
    assert epochs[0] != epochs[1]
    assert places(made(seed=2), 0) != places(one, 0)


def test_draws_of_samples_leave_the_generators_alone() -> None:
    """Dropout draws what it draws without the data set."""
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    data = made(workers=1)
    coming = data.ahead(itertools.count(7))
    assert coming is not None
    next(coming)
    data(0)
    assert torch.equal(torch.rand(2), expected)


def test_workers_ask_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker is forked from a rank that uses CUDA, where torch refuses to start it anew."""

    def refuse(*_: object) -> Tensor:
        raise RuntimeError("Cannot re-initialize CUDA in forked subprocess")

    expected = made()(7)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_rng_state", refuse)
    coming = made(workers=1).ahead(iter([7]))
    assert coming is not None
    assert all(map(torch.equal, next(coming), expected))


def test_workers_load_what_comes_next() -> None:
    """A feed tells them its numbers; after a jump it tells them anew; the tensors are the same."""
    task, plain = pipelines.toy()[1], made()
    model = pipelines.toy()[0]
    data = made(workers=1)
    uses = Uses((1,), 1)
    numbers = {0: 3, 1: 4, 2: 9, 3: 2}
    feed = TaskFeed(replace(task, data=data), model, uses, lambda m: numbers.get(m, m))
    asked: list[int] = []
    ahead = data.ahead

    def note(numbers: Iterator[int]) -> Iterator[Any] | None:
        first = next(numbers)
        asked.append(first)
        return ahead(itertools.chain([first], numbers))

    data.ahead = note  # type: ignore[method-assign]
    for microbatch in (0, 1, 2, 3):
        source, target = plain(numbers[microbatch])
        assert torch.equal(feed.input(microbatch)[0], source)
        assert torch.equal(feed.target(microbatch), target)
    assert asked == [3]
    numbers[5] = 17
    assert torch.equal(feed.input(5)[0], plain(17)[0])
    assert asked == [3, 17]
    feed.close()
    assert torch.equal(feed.input(6)[0], plain(6)[0])
    assert asked == [3, 17, 6]
    feed.close()


@pytest.mark.parametrize("semantics", ["flush", "2bw"])
def test_trains_as_by_number_and_goes_on(semantics: Semantics) -> None:
    """Workers, a run in two parts with another pipeline: the losses of one run without workers."""
    plan = launch_task.plan(1, semantics)

    def task(workers: int) -> Task:
        return replace(launch_task.task(0), data=made(workers))

    with Pipeline(task(0), plan, seed=3) as whole:
        losses = whole.run(4)
    with Pipeline(task(1), plan, seed=3) as first:
        found, state = first.run(2), first.state_dict()
        state = copy.deepcopy(state)
    with Pipeline(task(1), plan, seed=3) as second:
        second.load_state_dict(state)
        found += second.run(2)
    assert found == losses


def test_a_loader_says_all() -> None:
    """Data set, batch size, order, workers and collate_fn are the loader's."""
    rows = TensorDataset(torch.arange(11.0), torch.arange(11))
    stacked = lambda each: torch.stack([x for x, _ in each])  # noqa: E731
    loader = DataLoader(rows, batch_size=4, collate_fn=stacked)
    data = batches(loader)
    assert data(1).tolist() == [4, 5, 6, 7]
    assert data(2).tolist() == [0, 1, 2, 3]
    shuffled = batches(DataLoader(rows, batch_size=4, shuffle=True), seed=5)
    assert sorted(torch.cat([shuffled(n)[1] for n in (0, 1)]).tolist()) != list(range(8))


class Stream(IterableDataset[int]):
    """Has no numbers."""

    def __iter__(self) -> Iterator[int]:
        return iter(())


def _drawing(**words: Any) -> DataLoader[Any]:
    samples = Noisy()
    return DataLoader(samples, batch_size=2, sampler=RandomSampler(samples, **words))


class Backwards(SequentialSampler):
    """An order of its own."""

    def __iter__(self) -> Iterator[int]:
        return reversed(range(SAMPLES))


class Pairs(BatchSampler):
    """Batches of its own."""


def _own(**words: Any) -> DataLoader[Any]:
    return DataLoader(Noisy(), **{"batch_size": 2} | words)


@pytest.mark.parametrize(
    ("samples", "words", "why"),
    [
        (Stream(), {"size": 2}, "got a Stream without a length"),
        (Noisy(), {}, "got 22 samples and size=0"),
        (Noisy(), {"size": 23}, "got 22 samples and size=23"),
        (DataLoader(Noisy(), batch_size=2), {"size": 2}, "in one place"),
        (DataLoader(Noisy(), batch_size=2, sampler=[3, 1]), {}, "got a DataLoader with a list"),
        (DataLoader(Noisy(), batch_size=None), {}, "batch size None"),
        (
            _drawing(replacement=True),
            {},
            r"replacement=True, num_samples=22\), need each of its 22",
        ),
        (_drawing(num_samples=9), {}, r"replacement=False, num_samples=9\)"),
        (_own(sampler=Backwards(Noisy())), {}, "got a DataLoader with a Backwards"),
        (
            _own(batch_size=1, batch_sampler=Pairs(SequentialSampler(Noisy()), 2, drop_last=True)),
            {},
            "with a SequentialSampler and a Pairs and batch size None",
        ),
        (_own(sampler=SequentialSampler(range(9))), {}, r"another data source \(a range of 9\)"),
        (_own(sampler=RandomSampler(range(9))), {}, r"another data source \(a range of 9\)"),
        (_own(num_workers=1, worker_init_fn=print), {}, "with a worker_init_fn, need none"),
    ],
)
def test_what_has_no_numbers_is_refused(samples: Any, words: dict[str, Any], why: str) -> None:
    """The message says what is needed."""
    with pytest.raises(InputError, match=why):
        batches(samples, **words)
