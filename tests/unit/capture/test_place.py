"""Where a model is measured: one device, its clock, its micro-batches, its allocator."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from pipeplan.capture import estimate_task, profile_task
from pipeplan.capture.layer_costs.allocator_overhead import AllocatorOverhead, AllocatorWatch
from pipeplan.capture.layer_costs.device_clock import ThreadClock, WallClock, device_of
from pipeplan.capture.layer_costs.micro_batches import MicroBatches
from pipeplan.devices import find_device
from pipeplan.errors import InputError
from tests.capture_tasks import mlp


def on_cuda(rows: int) -> Tensor:
    """A tensor that says it is on a GPU, which no machine needs to have."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        return torch.empty(rows, device="cuda")


def test_mixed_devices_are_refused_with_both_names() -> None:
    """A model on two devices is told where both tensors are, before anything runs."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    model[1].running_mean = on_cuda(4)
    message = r"0\.weight on cpu and 1\.running_mean on cuda:0; need one"
    with pytest.raises(InputError, match=message):
        profile_task(replace(mlp(), model=model))
    with pytest.raises(InputError, match=message):
        device_of(list(model))


def test_a_model_without_tensors_is_on_the_processor() -> None:
    """Nothing to place means the usual device."""
    assert device_of(nn.Sequential(nn.ReLU())).device == torch.device("cpu")
    assert device_of([]).is_cuda is False


def test_processor_keeps_the_task_as_it_is() -> None:
    """No copy is made where the micro-batches are there already."""
    task = mlp()
    place = device_of(task.model)
    assert place.bring(task) is task
    facts = place.facts()
    assert facts["device"] == "cpu"
    assert facts["threads"] == torch.get_num_threads()


def test_micro_batches_are_brought_to_the_model() -> None:
    """For a model on a GPU, input and target are moved there."""
    task = replace(mlp(), data=lambda _: (torch.ones(2, 3), torch.ones(2)))
    place = device_of(nn.ParameterList())
    place.device, place.is_cuda = torch.device("meta"), True
    source, target = place.bring(task).data(0)
    assert source.is_meta
    assert target.is_meta


def test_one_thread_is_timed_by_its_own_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waiting for something else is no time of one thread; several threads need the wall's."""
    thread, wall = ThreadClock(), WallClock()
    marks = [(clock, clock.mark()) for clock in (thread, wall)]
    time.sleep(0.05)
    own, passed = (clock.between(begin, clock.mark()) for clock, begin in marks)
    assert own < 20_000_000 < 45_000_000 < passed
    for threads, clock in ((1, "thread"), (2, "wall")):
        monkeypatch.setattr(torch, "get_num_threads", lambda count=threads: count)
        assert device_of([]).facts()["clock"] == clock


def test_a_remainder_of_samples_is_refused() -> None:
    """Ten samples in micro-batches of four leave two: told, not trained on."""
    samples = torch.ones(10, 64)
    task = replace(mlp(), data=lambda n: (samples[4 * n : 4 * n + 4], samples[4 * n : 4 * n + 4]))
    message = r"data\(2\): got input of shape \[2, 64\].*need of shape \[4, 64\].*divides them"
    with pytest.raises(InputError, match=message):
        MicroBatches(task).fetch(2)
    with pytest.raises(InputError, match=message):
        profile_task(task, repeats=3, warmup=0)


def test_targets_and_types_must_stay_the_same() -> None:
    """The target's shape and the types count, too; mode fake looks at the second micro-batch."""
    task = replace(mlp(), data=lambda n: (torch.ones(4, 64), torch.ones(4 + n, 64)))
    with pytest.raises(InputError, match=r"data\(1\): got target of shape \[5, 64\]"):
        estimate_task(task, find_device("h100"))
    types = [torch.float32, torch.float64]
    task = replace(mlp(), data=lambda n: (torch.ones(4, 64, dtype=types[n]), torch.ones(4, 64)))
    with pytest.raises(InputError, match=r"torch\.float64, need .*torch\.float32"):
        MicroBatches(task).fetch(1)


class Counters:
    """An allocator that rounds up to 512 bytes, as torch's statistics would show it."""

    def __init__(self) -> None:
        self.values = {f"{kind}_bytes.all.{at}": 0 for kind in KINDS for at in ("current", "peak")}

    def take(self, size: int) -> None:
        """One allocation, or the end of one if negative."""
        rounded = (abs(size) + 511) // 512 * 512 * (1 if size > 0 else -1)
        for kind, amount in zip(KINDS, (size, rounded), strict=True):
            self.values[f"{kind}_bytes.all.current"] += amount
            peak = f"{kind}_bytes.all.peak"
            current = self.values[f"{kind}_bytes.all.current"]
            self.values[peak] = max(self.values[peak], current)

    def reset(self) -> None:
        """Peaks are what is held now."""
        for kind in KINDS:
            self.values[f"{kind}_bytes.all.peak"] = self.values[f"{kind}_bytes.all.current"]


KINDS = ("requested", "allocated")


def test_rounding_and_scratch_are_told_apart() -> None:
    """What was there before does not count; rounding and scratch are separate figures."""
    counters = Counters()
    counters.take(10**6)
    counters.take(-(10**6))
    counters.take(700)
    watch = AllocatorWatch(lambda: counters.values, counters.reset)
    with watch:
        counters.take(1000)
        counters.take(100)
        counters.take(-100)
    assert watch.overhead(1000) == AllocatorOverhead(rounding=(1024 + 512) - 1100, scratch=100)
    assert watch.overhead(5000).scratch == 0
    worst = AllocatorOverhead(rounding=1, scratch=5).worst(
        AllocatorOverhead(rounding=3, scratch=2)
    )
    assert worst == AllocatorOverhead(rounding=3, scratch=5)


def test_the_processor_reports_no_rounding() -> None:
    """Only a caching allocator has such figures."""
    chain = profile_task(mlp(), repeats=1, warmup=0)
    assert "allocator_rounding_bytes" not in chain.device
