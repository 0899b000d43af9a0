"""Runs of plans whose saved inputs leave for the host: the bits of one process, exact bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from random import Random
from typing import Any

import pytest

from pipeplan import lowering
from pipeplan.plan import OpKind, Plan, Semantics
from pipeplan.runtime.stages import activation_offload
from pipeplan.runtime.stages.saved_tensors import SavedStorage
from pipeplan.simulator import costs
from pipeplan.testing import plans, plans_offload, reference
from tests import pipelines
from tests.unit.runtime import test_memory as test_runtime_memory
from tests.unit.runtime import test_recompute_runs
from tests.unit.runtime.test_exact import equal
from tests.unit.runtime.test_offload_runs import check_run, drawn

LONG = 9
"""Micro-batches per step, so that each GPU holds as many as the steady state does."""


def staying(plan: Plan) -> Plan:
    """`plan` with its memory as if saved inputs stayed, the times of all ops left as they are."""
    stages = []
    for stage in plan.stages:
        remat = stage.remat and stage.remat.model_copy(update={"offload_input": False})
        stages.append(stage.model_copy(update={"remat": remat}))
    return plans.settle(plan.model_copy(update={"stages": tuple(stages)}))


def entering(name: str, gpus: int, semantics: Semantics, seed: int) -> Plan:
    """A random plan of a profiled task some of whose peaks are lower as saved inputs leave."""
    chain, rng = test_recompute_runs.profiled(name), Random(seed)
    largest = max(layer.saved_bytes + layer.saved_output_bytes for layer in chain.layers)
    while True:
        plain = test_runtime_memory.planned(
            chain, gpus, semantics, 1, rng.randrange(10**6), microbatches=LONG
        )
        found = plans_offload.offloading(rng, plain, (largest * 10**9,))
        leave = [stage for stage in found.stages if stage.remat and stage.remat.offload_input]
        if not leave or any(not stage.remat.offload for stage in leave if stage.remat):
            continue
        plan = plans.settle(found)
        pairs = zip(plan.memory, staying(plan).memory, strict=True)
        if any(row.peak_bytes < before.peak_bytes for row, before in pairs):
            return plan


@pytest.mark.parametrize(
    ("name", "gpus", "semantics", "seed"),
    [
        pytest.param("gpt2", 1, "2bw", 9, marks=pytest.mark.long),
        ("gpt2", 2, "flush", 12),
        ("resnet", 2, "2bw", 9),
        pytest.param("resnet", 1, "flush", 31, marks=pytest.mark.long),
    ],
)
def test_saved_inputs_leave(name: str, gpus: int, semantics: Semantics, seed: int) -> None:
    """Where the peak is lower by that: bits of one process, peaks to the byte.

    From these seeds one of the first draws is such a plan; others draw for a minute.
    """
    check_run(entering(name, gpus, semantics, seed), name, exact=True)


def leaving_checkpoints(plan: Plan) -> list[int]:
    """The stages that begin with a run that is computed again, and whose input leaves."""
    return [
        stage.id
        for stage in plan.stages
        if stage.remat and stage.remat.offload_input and stage.first in dict(stage.remat.recompute)
    ]


@pytest.mark.parametrize(
    ("name", "gpus", "semantics", "seed"),
    [("gpt2", 2, "2bw", 10), ("resnet", 1, "flush", 23), ("t5", 1, "2bw", 4)],
)
def test_checkpoints_leave(name: str, gpus: int, semantics: Semantics, seed: int) -> None:
    """Inputs of runs that are computed again, the model's among them: bits, bytes, lower peaks."""
    chain, rng = test_recompute_runs.profiled(name), Random(seed)
    largest = max(layer.saved_bytes + layer.saved_output_bytes for layer in chain.layers)
    while True:
        seed = rng.randrange(10**6)
        plain = test_runtime_memory.planned_again(
            rng, chain, gpus, semantics, 1, seed, microbatches=LONG
        )
        plan = plans.settle(plans_offload.offloading(rng, plain, (largest * 10**9,)))
        pairs = zip(plan.memory, plain.memory, strict=True)
        lower = any(row.peak_bytes < before.peak_bytes for row, before in pairs)
        first = plan.stages[0].remat
        if lower and leaving_checkpoints(plan) and first and first.offload_input:
            check_run(plan, name, exact=name != "t5")
            return


def leaving_early(plan: Plan) -> list[int]:
    """The stage of each copy that begins before its forward has ended."""
    at = {
        (op.kind, op.stage, op.copy_): op.shift * plan.period_ns + op.start_ns for op in plan.ops
    }
    ends = {
        (op.stage, op.copy_): at[op.kind, op.stage, op.copy_] + op.duration_ns
        for op in plan.ops
        if op.kind is OpKind.F
    }
    pairs = ((stage, copy) for kind, stage, copy in at if kind is OpKind.OFFLOAD)
    return [pair[0] for pair in pairs if at[OpKind.OFFLOAD, *pair] < ends[pair]]


@pytest.fixture
def early_copies(monkeypatch: pytest.MonkeyPatch) -> Counter[bool]:
    """How often a run took copies that began with a forward, and how often it made new ones."""
    taken: Counter[bool] = Counter()
    usual = activation_offload.EarlyCopies.of

    def counted(self: activation_offload.EarlyCopies, kept: Sequence[SavedStorage]) -> Any:
        found = usual(self, kept)
        taken[found is not None] += 1
        return found

    monkeypatch.setattr(activation_offload.EarlyCopies, "of", counted)
    return taken


@pytest.mark.parametrize(("name", "gpus", "seed"), [("gpt2", 2, 5), ("resnet", 1, 23)])
def test_inputs_leave_with_their_forward(
    name: str, gpus: int, seed: int, early_copies: Counter[bool]
) -> None:
    """The copies that begin with it are those that come back: bits of one process, bytes exact."""
    chain, rng = test_recompute_runs.profiled(name), Random(seed)
    largest = max(layer.saved_bytes + layer.saved_output_bytes for layer in chain.layers)
    while True:
        plain = test_runtime_memory.planned(
            chain, gpus, "2bw", 1, rng.randrange(10**6), microbatches=LONG
        )
        plan = plans.settle(plans_offload.offloading(rng, plain, (largest * 10**9,)))
        pairs = zip(plan.memory, plain.memory, strict=True)
        if leaving_early(plan) and any(a.peak_bytes < b.peak_bytes for a, b in pairs):
            break
    check_run(plan, name, exact=True)
    assert early_copies[True]
    assert not early_copies[False]


def test_an_input_that_is_written_to_leaves_behind_its_forward(
    early_copies: Counter[bool],
) -> None:
    """Layer 1 of the toy works in place on it: the copy that began with the forward is no use."""
    plan = next(
        plan
        for plan in (drawn(seed, 2, 1, "flush") for seed in range(10**4))
        if any(plan.stages[stage].first == 1 for stage in leaving_early(plan))
    )
    model, task = pipelines.toy("adamw")
    expected = reference.train("flush", *pipelines.toy("adamw"), 4, plan.microbatches, 3)
    outcome = pipelines.train(plan, lowering.lower(plan), model, task, 4)
    assert outcome.losses == expected.losses
    assert equal(outcome.weights, expected.weights)
    assert early_copies[False]


@pytest.mark.parametrize(("gpus", "semantics"), [(1, "flush"), (2, "2bw")])
def test_what_the_stage_before_keeps_leaves_too(gpus: int, semantics: Semantics) -> None:
    """A ReLU's output is the next stage's input: one storage of two graphs leaves, and returns."""
    chain, rng = test_recompute_runs.profiled("resnet"), Random(gpus)
    largest = max(layer.saved_bytes + layer.saved_output_bytes for layer in chain.layers)
    plan, lent = test_runtime_memory.planned(chain, gpus, semantics, 1, 0), 0
    while not lent:
        plain = test_runtime_memory.planned(
            chain, gpus, semantics, 1, rng.randrange(10**6), microbatches=LONG
        )
        plan = plans_offload.offloading(rng, plain, (largest * 10**9,))
        lent = sum(costs.offloaded_output_bytes(plan, stage.id) for stage in plan.stages)
    check_run(plans.settle(plan), "resnet", exact=True)
