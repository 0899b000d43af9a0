"""What a sampled step measures, term by term, is what the plan's replay predicts."""

from __future__ import annotations

import functools
from dataclasses import replace
from functools import partial
from random import Random
from typing import get_args

import pytest
import torch
from torch import Tensor, nn

from pipeplan import lowering, simulator
from pipeplan.chain import Chain
from pipeplan.errors import RankError
from pipeplan.memory_terms import GpuTerms, Purpose
from pipeplan.plan import MemoryRow, OpKind, Plan, Semantics
from pipeplan.program import Pattern
from pipeplan.runtime.build import Worker, build
from pipeplan.runtime.data.feed import TaskFeed, Uses
from pipeplan.runtime.instrument import CountedFeed, CountedTransport, sampling, states
from pipeplan.runtime.instrument.sampling import SampledSteps
from pipeplan.runtime.instrument.storage_log import StorageLog, StorageSample
from pipeplan.runtime.job import SessionOptions
from pipeplan.runtime.parameters.tied_parameters import untie
from pipeplan.runtime.transport.base import Transport
from pipeplan.simulator import costs
from pipeplan.split_model import SplitModel
from pipeplan.task import Task
from pipeplan.testing import plans, plans_offload
from pipeplan.testing.in_process import run_ranks
from tests import grids, pipelines
from tests.unit.runtime import test_memory, test_split_backward
from tests.unit.runtime.test_offload_inputs import leaving_checkpoints
from tests.unit.runtime.test_offload_runs import offloads

RANKS = 2
FAMILIES = ["GPT-2", "ResNet", "Llama", "T5"]
Sampled = list[tuple[int, GpuTerms]]


def made(family: str) -> tuple[SplitModel, Task]:
    """Small, with AdamW, and no norm of gradients, which no plan counts."""
    return test_split_backward.optimized(family, "adamw", clip_norm=None)


def chain_of(family: str) -> Chain:
    """Bytes as measured."""
    return test_split_backward.family_chain(family, "adamw")


def counted(
    plan: Plan,
    model: SplitModel,
    task: Task,
    transport: Transport,
    log: StorageLog | None = None,
    pattern: Pattern | None = None,
) -> tuple[Worker, SampledSteps, pipelines.Listener]:
    """A rank whose steps are sampled; `log` counts the whole run anyway."""
    always, heard = log is not None, pipelines.Listener()
    log = log or StorageLog()
    meter = SampledSteps(log, plan.semantics, always=always)
    feed = CountedFeed(TaskFeed(task, model, Uses.of(plan, model, transport.rank)), log)
    wrapped = CountedTransport(transport, log)
    pattern = pattern or lowering.lower(plan)
    worker = build(plan, pattern, model, task, feed, wrapped, heard, seed=0)
    meter.watch(worker)
    return worker, meter, heard


def enough(plan: Plan) -> int:
    """Steps such that there is one more behind the sampled one."""
    return 3 if plan.semantics == "flush" else 5


def sampled(
    plan: Plan, model: SplitModel, task: Task, steps: int | None = None, runs: int = 1
) -> Sampled:
    """(step, memory) of each rank of `runs` runs on end."""
    model, steps = untie(model, task.tied), steps or enough(plan)

    def work(transport: Transport) -> tuple[int, GpuTerms]:
        worker, meter, _ = counted(plan, model, task, transport)
        for run in range(runs):
            with meter:
                worker.executor.run(run * steps, steps)
        found = meter.memory()
        assert found is not None
        return found

    return run_ranks(len(plan.cluster.gpus), work)


def predicted(plan: Plan) -> list[GpuTerms]:
    """Of each GPU."""
    simulation = simulator.simulate(plan, lowering.lower(plan))
    return [simulation.terms(gpu) for gpu in range(len(plan.cluster.gpus))]


@functools.cache
def planned(family: str, semantics: Semantics, kind: str, seed: int = 1) -> Plan:
    """A valid plan on two ranks.

    Plain, with runs computed again, offloaded, with inputs of such runs offloaded, a step plan.
    """
    chain, rng = chain_of(family), Random(seed)
    again = kind in ("again", "checkpoints")
    made = partial(test_memory.planned_again, rng) if again else test_memory.planned
    plan = made(chain, RANKS, semantics, 1, seed)
    if kind == "step":
        plan = test_split_backward.stepped(plan, seed)
    elif kind in ("away", "checkpoints"):
        largest = max(layer.saved_bytes + layer.saved_output_bytes for layer in chain.layers)
        for _ in range(30):
            found = plans_offload.offloading(rng, plan, (largest * 10**9 // 2,))
            if leaving_checkpoints(found) if kind == "checkpoints" else offloads(found):
                return plans.settle(found)
        return planned(family, semantics, kind, seed + 1)
    return plan


CASES: list[tuple[Semantics, str]] = [
    ("flush", "plain"),
    ("2bw", "plain"),
    ("flush", "step"),
    ("flush", "again"),
    ("2bw", "again"),
    ("flush", "away"),
    ("2bw", "away"),
    ("flush", "checkpoints"),
    ("2bw", "checkpoints"),
]


def same(memory: GpuTerms, told: GpuTerms) -> None:
    """Each term of each stage at the peak, to the byte."""
    like = memory.like(told.peak)
    assert like.kind == told.peak.kind
    assert like.by_purpose() == told.peak.by_purpose()
    assert memory.peak.size == told.peak.size
    assert memory.host_size == told.host_size


def no_more(memory: GpuTerms, told: GpuTerms) -> None:
    """As `same`, but of what is saved, and of the workspace beside it, it may have less.

    Where a backward is split or several layers are offloaded as one run, T5's encoder's output
    counts for each layer that saves it (M9).
    """
    found, need = memory.like(told.peak).by_purpose(), told.peak.by_purpose()
    loose = {Purpose.SAVED, Purpose.SAVED_FOR_W, *WORK}
    assert 0.98 * told.peak.size <= memory.peak.size <= told.peak.size
    assert {k: v for k, v in found.items() if k[1] not in loose} == {
        k: v for k, v in need.items() if k[1] not in loose
    }


WORK = {Purpose.WORK_F, Purpose.WORK_B, Purpose.WORK_I, Purpose.WORK_W}


def claimed(plan: Plan, row: MemoryRow, told: GpuTerms) -> None:
    """Terms add up to the plan's peak; to less only where it counts riding tensors often (M9)."""
    rides = any(layer.riding for layer in plan.chain.layers)
    assert told.peak.size <= row.peak_bytes if rides else told.peak.size == row.peak_bytes


@grids.each_value(case=CASES, family=FAMILIES)
def test_measured_terms_are_the_predicted_ones(case: tuple[Semantics, str], family: str) -> None:
    """At the peak of each rank every term of every stage, to the byte; they add up to the peak."""
    semantics, kind = case
    plan = planned(family, semantics, kind)
    measured = sampled(plan, *made(family))
    for row, told, (step, memory) in zip(plan.memory, predicted(plan), measured, strict=True):
        assert step == (2 if semantics == "flush" else 4)
        claimed(plan, row, told)
        compare = no_more if family == "T5" and kind in ("step", "away", "checkpoints") else same
        compare(memory, told)


@pytest.mark.parametrize(("gpus", "semantics"), [(1, "flush"), (2, "2bw")])
def test_terms_of_a_boundary_that_two_stages_keep(gpus: int, semantics: Semantics) -> None:
    """It leaves with the second stage, and counts for the first while it is there."""
    chain, seed, lent = chain_of("ResNet"), 0, list[int]()
    largest = max(layer.saved_bytes + layer.saved_output_bytes for layer in chain.layers)
    plan = test_memory.planned(chain, gpus, semantics, 1, seed)
    while not lent:
        seed += 1
        plan = test_memory.planned(chain, gpus, semantics, 1, seed)
        plan = plans_offload.offloading(Random(seed), plan, (largest * 10**9 // 2,))
        lent = [x.id for x in plan.stages if costs.offloaded_output_bytes(plan, x.id)]
    plan = plans.settle(plan)
    measured = sampled(plan, *made("ResNet"))
    for told, (_, memory) in zip(predicted(plan), measured, strict=True):
        same(memory, told)
        found = {each.kind: each for each in memory.instants}
        for each in told.instants:
            if each.kind in {f"{stage}{OpKind.PREFETCH}" for stage in lent}:
                assert found[each.kind].by_purpose() == each.by_purpose()


@pytest.mark.parametrize("semantics", get_args(Semantics))
def test_no_bytes_are_without_a_purpose(semantics: Semantics) -> None:
    """At every instant of the step, not only at the peak, all bytes are of a term of the model."""
    plan = planned("GPT-2", semantics, "plain")
    for told, (_, memory) in zip(predicted(plan), sampled(plan, *made("GPT-2")), strict=True):
        kinds = {instant.kind: instant for instant in told.instants}
        for instant in memory.instants:
            assert all(term.purpose is not Purpose.OTHER for term in instant.terms)
            assert instant.size <= kinds[instant.kind].size
        assert Purpose.OTHER not in memory.curve.purposes
        assert max(map(sum, memory.curve.sizes)) == memory.peak.size
        assert min(memory.curve.times_ns) == 0


@pytest.mark.parametrize(("steps", "runs", "step"), [(1, 1, 1), (2, 1, 2), (1, 3, 2), (3, 2, 2)])
def test_the_second_step_is_sampled_if_there_is_one(steps: int, runs: int, step: int) -> None:
    """Else the first; in one run or in several, between which the pipeline is empty."""
    plan = planned("GPT-2", "flush", "plain")
    measured = sampled(plan, *made("GPT-2"), steps=steps, runs=runs)
    assert [found for found, _ in measured] == [step] * RANKS
    if step == 2:
        for told, (_, memory) in zip(predicted(plan), measured, strict=True):
            same(memory, told)


def test_later_steps_are_sampled_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counting is off in all other steps, and what a later sample says is the same."""
    monkeypatch.setattr(sampling, "EVERY", 4)
    opened: list[int] = []
    real = StorageLog.open

    def note(log: StorageLog, sample: StorageSample) -> None:
        opened.append(sample.step)
        real(log, sample)

    monkeypatch.setattr(StorageLog, "open", note)
    plan = planned("GPT-2", "2bw", "plain")
    measured = sampled(plan, *made("GPT-2"), steps=8)
    assert sorted(opened) == [3] * RANKS + [7] * RANKS
    for told, (_, memory) in zip(predicted(plan), measured, strict=True):
        same(memory, told)


@pytest.mark.parametrize("semantics", get_args(Semantics))
def test_beside_a_run_that_counts_all(semantics: Semantics) -> None:
    """The terms add up to the peak that counting the whole run finds, which is the planned one."""
    plan = planned("Llama", semantics, "away")
    model, task = made("Llama")
    model = untie(model, task.tied)

    def work(transport: Transport) -> tuple[int, GpuTerms]:
        log = StorageLog()
        worker, meter, _ = counted(plan, model, task, transport, log)
        log.count(states(worker))
        with log, meter:
            worker.executor.run(0, enough(plan))
        found = meter.memory()
        assert found is not None
        return log.peak, found[1]

    for row, told, (peak, memory) in zip(
        plan.memory, predicted(plan), run_ranks(RANKS, work), strict=True
    ):
        assert memory.peak.size == peak == row.peak_bytes
        same(memory, told)


@pytest.mark.parametrize("kind", ["plain", "step"])
def test_counting_changes_nothing(kind: str) -> None:
    """Losses and weights are those of a run that samples nothing, to the bit."""
    plan = planned("ResNet", "flush", kind)
    model, task = made("ResNet")
    expected = pipelines.train(
        plan, lowering.lower(plan), untie(model, task.tied), task, 3, seed=0
    )
    model, task = made("ResNet")
    model = untie(model, task.tied)

    def work(transport: Transport) -> tuple[dict[int, float], dict[str, Tensor]]:
        worker, meter, heard = counted(plan, model, task, transport)
        with meter:
            worker.executor.run(0, 3)
        assert meter.memory() is not None
        return heard.losses, pipelines.weights_of(worker)

    told = run_ranks(RANKS, work)
    losses = {number: loss for heard, _ in told for number, loss in heard.items()}
    assert [losses[number] for number in sorted(losses)] == expected.losses
    weights = {name: value for _, held in told for name, value in held.items()}
    assert weights.keys() == expected.weights.keys()
    for name, value in expected.weights.items():
        assert torch.equal(weights[name], value), name


class _Breaks(nn.Module):
    """Fails at its third micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, value: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 3:
            raise ValueError("the third one")
        return value * 2


def test_a_failure_ends_the_counting() -> None:
    """Nothing is counted behind a run that failed, and nothing is said of its step."""
    model, task = pipelines.split_by_hand([nn.Linear(6, 6), _Breaks(), nn.Linear(6, 3)], "sgd")
    plan = pipelines.plan_of([2], [0, 0], "flush", 4, layers=3)

    def work(transport: Transport) -> tuple[bool, bool, int]:
        pattern, log = pipelines.pattern_of(plan, 2), StorageLog()
        worker, meter, _ = counted(plan, model, task, transport, log, pattern)
        meter = SampledSteps(log, "flush")
        meter.watch(worker)
        with pytest.raises(RankError, match="the third one"), meter:
            worker.executor.run(0, 2)
        before = log.live
        kept = torch.zeros(1000)
        assert kept.nbytes == 4000
        return meter.samples, log.idle, max(0, log.live - before)

    assert run_ranks(1, work) == [(False, True, 0)]


@pytest.mark.parametrize("counts", [False, True])
def test_a_session_samples_where_it_shall(counts: bool) -> None:
    """Counting the whole run and sampling steps go together; without either nobody looks."""
    options = SessionOptions(timeout_ns=10**9, counts_bytes=counts)
    log = StorageLog()
    assert sampling.sampled(log, "flush", options) is None
    assert not log.idle
    assert sampling.sampled(None, "flush", replace(options, samples_bytes=True)) is None
    assert sampling.sampled(log, "flush", replace(options, samples_bytes=True)) is not None
    assert log.idle is not counts
