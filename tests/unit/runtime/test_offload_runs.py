"""Whole runs of plans that offload: the bits of one process, the planned bytes, named errors."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from random import Random

import pytest
from torch import Tensor

from pipeplan import host_copy, lowering
from pipeplan.chain import Chain
from pipeplan.cluster import Cluster, Host
from pipeplan.errors import RankError
from pipeplan.host_copy import CopyEngine
from pipeplan.plan import OpKind, Plan, Semantics
from pipeplan.planner import Config, solve
from pipeplan.runtime.build import build
from pipeplan.runtime.data.feed import TaskFeed, Uses
from pipeplan.runtime.evaluation import evaluate
from pipeplan.runtime.parameters.tied_parameters import untie
from pipeplan.runtime.transport.base import Transport
from pipeplan.testing import plans, plans_offload, reference
from pipeplan.testing.in_process import run_ranks
from pipeplan.testing.plans import random_plan
from tests import grids, models, pipelines
from tests.captured import captured
from tests.unit.runtime import test_memory as test_runtime_memory
from tests.unit.runtime import test_recompute_runs
from tests.unit.runtime.test_exact import equal


def offloads(plan: Plan) -> int:
    """How many copies of stages it offloads."""
    return sum(op.kind is OpKind.OFFLOAD for op in plan.ops)


def drawn(seed: int, gpus: int, k: int, semantics: Semantics) -> Plan:
    """A random plan of eight layers that offloads, on every GPU a stage, of short steps."""
    while True:
        plan = random_plan(
            seed,
            layers=8,
            gpus=gpus,
            k=k,
            semantics=semantics,
            memory_model="exact",
            offload=True,
        )
        used = {stage.gpu for stage in plan.stages}
        if offloads(plan) and plan.microbatches <= 8 and len(used) == gpus:
            return pipelines.without_first_in_place(plan)
        seed += 1


@grids.each_value(
    family=list(models.FAMILIES), kind=[(1, 1, "2bw"), (2, 2, "flush"), (4, 1, "2bw")]
)
def test_family_trains_exactly(family: str, kind: tuple[int, int, Semantics]) -> None:
    """Losses, weights, running statistics equal one process; some plans compute again as well."""
    gpus, k, semantics = kind
    plan = drawn(100 * gpus + len(family), gpus, k, semantics)
    model, task = models.make(family)
    expected = reference.train(semantics, model, task, 3, plan.microbatches, seed=3)
    outcome = pipelines.train(plan, lowering.lower(plan), untie(model, task.tied), task, 3)
    assert outcome.losses == expected.losses
    assert equal(outcome.weights, expected.weights)


@grids.first(6, seed=range(0, 40, 4))
def test_the_toy_trains_exactly(seed: int) -> None:
    """So do an in-place layer, dropout, batch norm and a skip, on both duplexes."""
    plan = drawn(seed, 1 + seed // 8 % 3, 1 + seed // 4 % 2, "2bw" if seed % 8 else "flush")
    model, task = pipelines.toy("adamw")
    expected = reference.train(plan.semantics, *pipelines.toy("adamw"), 4, plan.microbatches, 3)
    outcome = pipelines.train(plan, lowering.lower(plan), model, task, 4)
    assert outcome.losses == expected.losses
    assert equal(outcome.weights, expected.weights)


def _copies_nothing(_: CopyEngine, parts: list[Tensor], *__: object) -> Future[None]:
    """In place of `CopyEngine.back`."""
    parts.clear()
    done: Future[None] = Future()
    done.set_result(None)
    return done


def test_what_comes_back_is_what_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison can fail: where nothing is copied back, weights differ."""
    plan = drawn(4, 2, 1, "flush")
    model, task = pipelines.toy()
    expected = reference.train("flush", model, task, 2, plan.microbatches, 3)
    monkeypatch.setattr(CopyEngine, "back", _copies_nothing)
    outcome = pipelines.train(plan, lowering.lower(plan), model, task, 2)
    assert not equal(outcome.weights, expected.weights)


@pytest.mark.parametrize("semantics", ["flush", "2bw"])
def test_runs_on_end_and_evaluation(semantics: Semantics, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two runs equal one; an evaluation between them offloads nothing; no copy outlives a run."""
    plan = drawn(7, 2, 2, semantics)
    pattern, (model, task) = lowering.lower(plan), pipelines.toy()
    m = plan.microbatches
    halves = [reference.train(semantics, *pipelines.toy(), n, m, 3, evaluate=4) for n in (2, 4)]
    copies: list[weakref.ref[Tensor]] = []
    make = CopyEngine._buffer

    def buffer(way: CopyEngine, part: Tensor) -> Tensor:
        made = make(way, part)
        copies.append(weakref.ref(made))
        return made

    monkeypatch.setattr(CopyEngine, "_buffer", buffer)

    def work(transport: Transport) -> tuple[list[float], dict[str, Tensor]]:
        uses = [Uses.of(plan, model, transport.rank, trains=trains) for trains in (True, False)]
        feed, shown = (TaskFeed(task, model, each) for each in uses)
        worker = build(plan, pattern, model, task, feed, transport, pipelines.Listener(), seed=3)
        worker.executor.run(0, 2)
        before = len(copies)
        found = evaluate(pattern, worker.stages, worker.endpoints, shown, transport, 4)
        assert len(copies) == before
        worker.executor.run(2, 2)
        return [found[number] for number in sorted(found)], pipelines.weights_of(worker)

    told = run_ranks(2, work)
    gc.collect()
    assert copies
    assert all(copy() is None for copy in copies)
    assert [losses for losses, _ in told if losses] == [halves[0].evaluated]
    weights = {name: value for _, part in told for name, value in part.items()}
    assert equal(weights, halves[1].weights)


@pytest.mark.parametrize(("way", "action"), [("to", "FREE_O"), ("from", "B")])
def test_a_copy_that_fails_is_named(
    way: str, action: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank, action, stage and micro-batch where it was waited for, and what the worker said."""
    plan = drawn(4, 2, 1, "flush")
    copy, on_host = host_copy._copy, []

    def spoilt(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        leaves = not any(source is copy for source in sources for copy in on_host)
        if leaves == (way == "to"):
            raise MemoryError("nothing left")
        on_host.extend(targets)
        copy(targets, sources)

    monkeypatch.setattr(host_copy, "_copy", spoilt)
    with pytest.raises(
        RankError,
        match=rf"rank \d: action \d{action}0 \(stage \d, micro-batch 0[^)]*\) failed:"
        rf" RuntimeError: copy of \d+ bytes {way} the host: nothing left",
    ):
        pipelines.train(plan, lowering.lower(plan), *pipelines.toy(), 1)


LONG = 13
"""Micro-batches per step, so that each GPU holds as many as the steady state does."""
SHAPES = [(2, 1, 2), (4, 1, 3), (2, 2, 7)]
"""GPUs, k, seed."""


def hosted(
    name: str, shape: tuple[int, int, int], semantics: Semantics, *, again: bool
) -> tuple[Plan, bool]:
    """A random plan of a profiled task with a host, and whether a GPU has a lower peak by it.

    With `again` it also computes runs again.
    """
    gpus, k, seed = shape
    chain, rng = test_runtime_memory.profiled(name), Random(seed)
    made = (
        partial(test_runtime_memory.planned_again, rng) if again else test_runtime_memory.planned
    )
    plain = made(chain, gpus, semantics, k, seed, microbatches=LONG)
    largest = max(layer.saved_bytes + layer.saved_output_bytes for layer in chain.layers)
    bandwidth = largest * 10**9 // 2
    plan, lower = plain, False
    for _ in range(40):
        found = plans_offload.offloading(rng, plain, (bandwidth,))
        if offloads(found) and not lower:
            plan = plans.settle(found)
            pairs = zip(plan.memory, plain.memory, strict=True)
            lower = any(row.peak_bytes < before.peak_bytes for row, before in pairs)
    return plan, lower


@grids.each_value(name=list(test_runtime_memory.TASKS), semantics=["flush", "2bw"], shape=SHAPES)
def test_peak_is_as_planned(name: str, semantics: Semantics, shape: tuple[int, int, int]) -> None:
    """Every rank's measured peak equals `peak_bytes`, to the byte; a GPU's is lower so."""
    plan, is_lower = hosted(name, shape, semantics, again=False)
    assert is_lower
    peaks = test_runtime_memory.measured_of(plan, test_runtime_memory.TASKS[name])
    assert peaks == [row.peak_bytes for row in plan.memory]


@pytest.mark.parametrize("semantics", ["flush", "2bw"])
def test_peak_with_recomputed_runs(semantics: Semantics) -> None:
    """Beside runs computed again peaks are at most as planned, within 3 % (V3)."""
    plan, _ = hosted("transformer", (4, 1, 3), semantics, again=True)
    assert any(stage.remat and stage.remat.recompute for stage in plan.stages)
    peaks = test_runtime_memory.measured_of(plan, test_runtime_memory.TASKS["transformer"])
    for peak, row in zip(peaks, plan.memory, strict=True):
        assert 0.97 * row.peak_bytes <= peak <= row.peak_bytes


@pytest.mark.parametrize(
    ("name", "gpus", "share", "semantics"),
    [
        pytest.param("gpt2", 4, 0.5, "2bw", marks=pytest.mark.long),
        ("resnet", 4, 0.7, "flush"),
        ("t5", 4, 0.6, "2bw"),
        ("gpt2", 1, 0.42, "2bw"),
        ("resnet", 1, 0.9, "flush"),
    ],
)
def test_planned_under_scarce_memory(
    name: str, gpus: int, share: float, semantics: Semantics
) -> None:
    """Plans that fit only with offloading: bits of one process, peaks as predicted.

    To the byte; T5's encoder output, the input of several layers, is counted more than once. Of
    four GPUs each has one stage, one GPU alone has several. There saved inputs leave, too, where
    memory is scarcest.
    """
    chain = test_recompute_runs.profiled(name)
    config = contiguous(semantics, 1)
    scarce = machines_with_host(chain, config, gpus, share, 2 * 10**12)
    method = "contiguous" if gpus > 1 else "auto"
    plan = solve(chain, scarce, replace(config, offload="auto", method=method))
    assert offloads(plan)
    enters = any(stage.remat and stage.remat.offload_input for stage in plan.stages)
    assert enters == ((name, gpus) == ("gpt2", 1))
    check_run(plan, name, exact=name != "t5")


@grids.first(1, semantics=["flush", "2bw"])
def test_four_ranks_that_compute_again_and_offload(semantics: Semantics) -> None:
    """Where stages do both: bits of one process, peaks to the byte."""
    chain = test_recompute_runs.profiled("gpt2")
    config = contiguous(semantics, 0.3)
    scarce = machines_with_host(chain, config, 4, 0.5, 10**12)
    plan = solve(chain, scarce, replace(config, recompute="auto", offload="auto"))
    both = [s for s in plan.stages if s.remat and s.remat.recompute and s.remat.offload]
    assert len(both) >= 2
    check_run(plan, "gpt2", exact=True)


def contiguous(semantics: Semantics, seconds: float) -> Config:
    """A stage a GPU, within so much work."""
    return Config(
        semantics=semantics,
        microbatches=test_recompute_runs.MICROBATCHES,
        method="contiguous",
        k=1,
        time_limit_s=seconds,
        deterministic=True,
        workers=1,
    )


def machines_with_host(
    chain: Chain, config: Config, gpus: int, share: float, bandwidth: int
) -> Cluster:
    """GPUs that have a share of what the plan without a limit takes, and a host beside them."""
    ample = test_recompute_runs.machines(2**40, gpus)
    most = max(row.peak_bytes for row in solve(chain, ample, config).memory)
    host = Host(memory_bytes=2**40, bandwidth_bytes_per_s=bandwidth)
    scarce = test_recompute_runs.machines(int(share * most), gpus)
    return scarce.model_copy(update={"host": host})


def check_run(plan: Plan, name: str, *, exact: bool) -> None:
    """Losses and weights equal those of one process; peaks are as planned, or up to 2 % below."""
    model, task = captured(test_recompute_runs.TASKS[name])
    steps = test_recompute_runs.STEPS
    expected = reference.train(plan.semantics, model, task, steps, plan.microbatches, 3)
    told = test_recompute_runs.ran(plan, model, task)
    for row, (peak, _, _) in zip(plan.memory, told, strict=True):
        assert row.peak_bytes <= row.budget_bytes
        assert (1 if exact else 0.98) * row.peak_bytes <= peak <= row.peak_bytes
    losses = {number: loss for _, heard, _ in told for number, loss in heard.items()}
    assert [losses[number] for number in sorted(losses)] == expected.losses
    assert equal({k: v for _, _, held in told for k, v in held.items()}, expected.weights)
