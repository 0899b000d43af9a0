"""A data set as micro-batches by number, as `Task.data` gives them.

Micro-batch n is batch n mod E of epoch n div E, where an epoch has E whole batches; the order of
an epoch depends on the seed and the epoch alone, and so do the numbers that a sample draws on its
micro-batch. So every rank and every later run gives the same tensors for the same number, whoever
loads them: replicas have different numbers, and a resumed run goes on with the next one.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from ctypes import c_bool
from functools import lru_cache, partial
from multiprocessing import resource_tracker
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from multiprocessing.sharedctypes import RawValue
from multiprocessing.util import Finalize
from typing import Any, Protocol, Self

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
    get_worker_info,
)

from pipeplan.errors import InputError
from pipeplan.repeat import kept_generators, seed_all

_SPREAD = 1_000_003
"""Between the seeds of two runs: more than there are micro-batches or epochs to draw for."""


class Samples(Protocol):
    """A data set of torch or Hugging Face: samples by number."""

    def __len__(self) -> int:
        """How many there are."""

    def __getitem__(self, index: int, /) -> Any:
        """One of them."""


def batches(
    samples: Samples | DataLoader[Any],
    *,
    size: int | None = None,
    shuffle: bool = False,
    seed: int = 0,
    collate: Callable[[list[Any]], Any] | None = None,
    workers: int = 0,
    prefetch: int = 2,
) -> Batches:
    """`samples` as the `data` of a task.

    Args:
        samples: a data set with a length; or a `DataLoader`, of which data set, batch size,
            whether it shuffles, collate_fn, workers, how they start and prefetch are taken.
        size: samples in one micro-batch; what is left of an epoch is dropped.
        shuffle: every epoch in another order.
        seed: of the orders, and of what samples draw (augmentation).
        collate: samples -> micro-batch; None stacks them as `default_collate` does.
        workers: processes that load ahead; 0 loads when a micro-batch is needed.
        prefetch: micro-batches per worker that wait ready.

    Raises:
        InputError: if there is no length, less than one batch, an order or samples of the loader's
            own, or a `worker_init_fn`.
    """
    if not isinstance(samples, DataLoader):
        by_number = _ByNumber(samples, size or 0, seed if shuffle else None, seed, collate)
        return Batches(by_number, workers, prefetch)
    loader = samples
    if size is not None or collate is not None or shuffle or workers:
        raise InputError(
            "batches: got a DataLoader and size, shuffle, collate or workers, need them in one"
            " place: the loader says them"
        )
    _check_repeats(loader)
    order = seed if type(loader.sampler) is RandomSampler else None
    assert loader.batch_size is not None
    by_number = _ByNumber(loader.dataset, loader.batch_size, order, seed, loader.collate_fn)
    prefetch = loader.prefetch_factor or prefetch
    return Batches(by_number, loader.num_workers, prefetch, loader.multiprocessing_context)


def _check_repeats(loader: DataLoader[Any]) -> None:
    """Refuse a loader whose batches are not those that are made here by number.

    Raises:
        InputError: if it has an order, samples or batches of its own, or prepares its workers.
    """
    sampler = loader.sampler
    if (
        type(sampler) not in (RandomSampler, SequentialSampler)
        or type(loader.batch_sampler) is not BatchSampler
        or not loader.batch_size
    ):
        own = f" and a {type(loader.batch_sampler).__name__}" * (loader.batch_sampler is not None)
        raise InputError(
            f"batches: got a DataLoader with a {type(sampler).__name__}{own} and batch size"
            f" {loader.batch_size}, need shuffle=True or False and a batch size. {_INSTEAD}"
        )
    assert isinstance(sampler, RandomSampler | SequentialSampler)
    source: object = sampler.data_source
    if source is not loader.dataset:
        raise InputError(
            f"batches: got a DataLoader whose {type(sampler).__name__} has another data source"
            f" (a {type(source).__name__} of {len(sampler.data_source)}) than its"
            f" data set, need the same object: shuffle=True or False. {_INSTEAD}"
        )
    if loader.worker_init_fn is not None:
        raise InputError(
            "batches: got a DataLoader with a worker_init_fn, need none: every rank also makes"
            " micro-batches in its own process, where it would not be called. Do what it does in"
            " the data set's __getitem__, at its first call."
        )
    if isinstance(sampler, RandomSampler):
        _check_whole(sampler)


_INSTEAD = "Give the data set, torch.utils.data.Subset of it, or number -> micro-batch."


def _check_whole(sampler: RandomSampler) -> None:
    """Refuse what an epoch here is not: anything but each sample once."""
    samples = len(sampler.data_source)
    if sampler.replacement or sampler.num_samples != samples:
        raise InputError(
            f"batches: got a DataLoader with RandomSampler(replacement={sampler.replacement},"
            f" num_samples={sampler.num_samples}), need each of its {samples} samples once in an"
            " epoch: shuffle=True. Or give number -> micro-batch."
        )


class Batches:
    """Micro-batches by number; made by `batches`."""

    def __init__(
        self,
        by_number: _ByNumber,
        workers: int,
        prefetch: int,
        starts: BaseContext | None = None,
    ) -> None:
        """`by_number` makes them, `starts` says how workers do; the rest as `batches` has it."""
        self._by_number, self._workers, self._prefetch = by_number, workers, prefetch
        self._starts = starts

    def __call__(self, number: int) -> Any:
        """Micro-batch `number`."""
        return self._by_number[number]

    def ahead(self, numbers: Iterator[int]) -> Iterator[Any] | None:
        """The micro-batches `numbers`, which workers load before they are asked for.

        None: there are no workers. They end with the last reference to what is returned.
        """
        if not self._workers:
            return None
        given = self._workers, self._prefetch, self._starts
        return _LoadedAhead(self._by_number, numbers, *given)


STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""By which people and launchers stop a rank: it saves, and may need its workers until then."""


class _LoadedAhead:
    """What workers load ahead; they outlast signals, which launchers send to the whole group.

    They end with their rank, however it ends, and when this is given up.
    """

    def __init__(
        self,
        by_number: _ByNumber,
        numbers: Iterator[int],
        workers: int,
        prefetch: int,
        starts: BaseContext | None,
    ) -> None:
        """Starts the workers; the rest as `Batches` has it."""
        over = RawValue(c_bool, False)
        loader = DataLoader(
            by_number,
            batch_size=None,
            sampler=numbers,
            num_workers=workers,
            prefetch_factor=prefetch,
            multiprocessing_context=starts,
            generator=torch.Generator(),  # or it would draw from the one that layers draw from
            worker_init_fn=partial(_outlast_signals, over),
        )
        with _held_back(starts):
            self._coming: Iterator[Any] = iter(loader)
        # From here on workers obey torch, and Python at its end, which terminate late ones. One of
        # Python's own finalizers: they alone are sure to come before the latter.
        Finalize(self, _set, (over,), exitpriority=0)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        return next(self._coming)


@contextmanager
def _held_back(starts: BaseContext | None) -> Iterator[None]:
    """Signals wait: they would end a worker that has begun and does not handle them yet.

    All workers but forked ones need Python's resource tracker. It is started inside, for SIGUSR1
    would end it as well; as it starts, it lets SIGINT and SIGTERM through again (Python 3.11).
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    if (starts or multiprocessing).get_start_method() != "fork":
        resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _outlast_signals(over: c_bool, _: int) -> None:
    """In a worker: heed signals no more until it is `over`, but end with the rank.

    They get a handler, and are not ignored: what a data set starts would ignore them, too. Torch's
    own watch on the rank sees nothing where a server forks the workers.
    """

    def heed(*_: object) -> None:
        if over.value:
            os._exit(0)

    def end_with(rank: BaseProcess) -> None:
        rank.join()
        os._exit(0)

    signal.set_wakeup_fd(-1)  # the rank's: it would take a worker's signals for its own
    for number in STOP_SIGNALS:
        signal.signal(number, heed)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    if rank := multiprocessing.parent_process():
        threading.Thread(target=end_with, args=(rank,), daemon=True).start()


def _set(flag: c_bool) -> None:
    flag.value = True


class _ByNumber(torch.utils.data.Dataset[Any]):
    """Micro-batches as the samples of a data set, so that one worker makes a whole one."""

    def __init__(
        self,
        samples: Any,
        size: int,
        order: int | None,
        seed: int,
        collate: Callable[[list[Any]], Any] | None,
    ) -> None:
        """See `batches`; `order` is the seed of the orders, None for none."""
        if isinstance(samples, IterableDataset) or not hasattr(samples, "__len__"):
            raise InputError(
                f"batches: got a {type(samples).__name__} without a length, need a data set whose"
                " samples have numbers: then every rank finds the same ones, and a run can go on"
            )
        if size < 1 or len(samples) < size:
            raise InputError(
                f"batches: got {len(samples)} samples and size={size}, need size=1 or more and"
                " samples for one micro-batch"
            )
        self._samples, self._size, self._order = samples, size, order
        self._seed, self._collate = seed, collate or default_collate
        self._each = len(samples) // size
        """Micro-batches of an epoch."""

    def __getitem__(self, number: int) -> Any:
        epoch, place = divmod(number, self._each)
        places: Sequence[int] = range(len(self._samples))
        if self._order is not None:
            places = _permutation(self._order * _SPREAD + epoch, len(self._samples))
        # A forked process cannot ask GPUs.
        gpus: list[int] | None = [] if get_worker_info() else None
        with kept_generators(gpus):
            seed_all(self._seed * _SPREAD + number)
            begin = place * self._size
            return self._collate([self._samples[i] for i in places[begin : begin + self._size]])


@lru_cache(maxsize=2)
def _permutation(seed: int, count: int) -> list[int]:
    """An order of `count` samples; the last ones are kept."""
    generator = torch.Generator().manual_seed(seed)
    order: list[int] = torch.randperm(count, generator=generator).tolist()
    return order
