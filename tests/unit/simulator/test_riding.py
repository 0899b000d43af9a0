"""A tensor that several layers keep is one storage in the terms of a replay: (M9)."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

import pytest

from pipeplan import lowering, simulator
from pipeplan.chain import Chain, RidingTensor
from pipeplan.plan import LayerRanges, Plan, Remat, Stage
from pipeplan.simulator import costs
from pipeplan.simulator.recompute import condensed
from pipeplan.simulator.riding import Once, stages_once
from pipeplan.testing.plans import random_chain, random_plan, random_stages
from tests import handmade

Rider = tuple[int, int, int, frozenset[int]]
"""Bytes, the first and the last layer that take it, those that keep it."""


def with_riders(chain: Chain, riders: list[Rider]) -> Chain:
    """`chain` with more tensors in its boundaries, and outputs that only the next layer keeps."""
    layers = []
    for index, layer in enumerate(chain.layers):
        here = [rider for rider in riders if rider[1] <= index <= rider[2]]
        given = sum(size for size, first, last, _ in riders if first <= index + 1 <= last)
        passed = sum(size for size, _, last, _ in here if last > index)
        light = layer.forward_light_workspace_bytes
        fields: dict[str, Any] = {
            "output_bytes": layer.output_bytes + given,
            "output_gradient_bytes": layer.gradient_of_output_bytes,
            "saved_output_bytes": 0,
            "saved_passing_bytes": 0,
            "saved_input_bytes": layer.saved_input_bytes
            + sum(size for size, _, _, kept in here if index in kept),
            "forward_workspace_bytes": layer.forward_workspace_bytes - passed,
            "forward_light_workspace_bytes": None if light is None else light - passed,
            "options": (),
            "riding": tuple(
                RidingTensor(size_bytes=size, kept=index in kept, passed=last > index)
                for size, _, last, kept in here
            ),
        }
        layers.append(layer.model_copy(update=fields))
    return Chain.from_data(
        chain.model_copy(update={"layers": tuple(layers)}).model_dump(mode="json")
    )


def random_riders(rng: Random, count: int) -> list[Rider]:
    """Two that ride through some of `count` layers, if there are enough."""
    riders: list[Rider] = []
    for size in (1000, 70000) if count > 2 else ():
        first, last = sorted(rng.sample(range(1, count), 2))
        kept = frozenset(layer for layer in range(first, last + 1) if rng.random() < 0.6)
        riders.append((size, first, last, kept))
    return sorted(riders, key=lambda rider: rider[1])


def drawn(seed: int) -> tuple[Plan, list[Rider]]:
    """A random plan whose chain has two riding tensors."""
    rng = Random(seed)
    plan = random_plan(seed)
    count = len(plan.chain.layers)
    riders = random_riders(rng, count)
    stages = tuple(_recomputing(stage) for stage in plan.stages)
    fields = {"chain": with_riders(plan.chain, riders), "stages": stages}
    return plan.model_copy(update=fields), riders


def _recomputing(stage: Stage) -> Stage:
    """The stage with the runs that are computed again, and nothing else."""
    again = stage.remat.recompute if stage.remat else ()
    return stage.model_copy(update={"remat": Remat(recompute=again) if again else None})


def outermost(runs: LayerRanges) -> Iterator[tuple[int, int]]:
    """Those that lie in no other."""
    end = -1
    for first, last in runs:
        if first > end:
            yield first, last
            end = last


def keepers(plan: Plan, stage: int, rider: Rider) -> int:
    """How many layers and runs of a stage keep the tensor."""
    home, (_, first, last, kept) = plan.stages[stage], rider
    runs = list(outermost(home.remat.recompute if home.remat else ()))
    inside = {layer for a, b in runs for layer in range(a, b + 1)}
    alone = {each for each in kept if home.first <= each <= home.last} - inside
    return len(alone) + sum(first <= a <= last for a, _ in runs)


def once(plan: Plan) -> dict[int, Once]:
    """Of the stages of the plan."""
    return dict(stages_once(plan, condensed(plan)))


def test_kept_is_each_storage_once() -> None:
    """A rider counts in the first stage, of those in a row on a GPU, that keeps it; once there."""
    seen = 0
    for seed in range(150):
        plan, riders = drawn(seed)
        if plan.memory_model == "paper" or any(stage.split_backward for stage in plan.stages):
            continue
        found, held = once(plan), set[int]()
        for stage in plan.stages if found else ():
            if stage.id and plan.stages[stage.id - 1].gpu != stage.gpu:
                held = set()
            often = costs.live_stage_bytes(condensed(plan), stage.id)
            less = 0
            for number, rider in enumerate(riders):
                times = keepers(plan, stage.id, rider)
                less += rider[0] * (times - (times > 0 and number not in held))
                held |= {number} if times else set()
            size = found[stage.id].size
            assert size.kept == often.kept - less
            assert size.kept <= size.forward <= often.forward
            assert size.kept <= size.backward <= often.backward
            seen += less > 0
    assert seen > 20


def riding_plan(seed: int) -> Plan:
    """A random plan on two GPUs, one operation after the other, with two riding tensors."""
    rng = Random(seed)
    chain = random_chain(rng, rng.randint(3, 7))
    chain = with_riders(chain, random_riders(rng, len(chain.layers)))
    stages = [(s.first, s.last, s.gpu) for s in random_stages(rng, len(chain.layers), 2)]
    period = sum(layer.forward_ns + layer.backward_ns for layer in chain.layers)
    return handmade.packed(chain, stages, max(1, period))


def test_terms_are_no_more_than_the_ledger() -> None:
    """A replay of any plan with riding tensors is at most at the plan's own peak, often below."""
    below = 0
    for seed in range(60):
        plan = riding_plan(seed)
        simulation = simulator.simulate(plan, lowering.lower(plan))
        for gpu, row in enumerate(plan.memory):
            peak = simulation.terms(gpu).peak.size
            assert simulation.memory[gpu].peak_bytes == row.peak_bytes >= peak
            below += peak < row.peak_bytes
    assert below > 5


RIDER: Rider = (100, 1, 3, frozenset({1, 3}))
LAYERS = [{"output_bytes": 10, "saved_input_bytes": 0}] + 3 * [
    {"output_bytes": 10, "saved_input_bytes": 10, "saved_bytes": 5}
]


def four(stages: list[tuple[int, int, int]], **remat: Any) -> dict[int, Once]:
    """Four layers, of which the second and the last keep 100 bytes that ride from 1 to 3."""
    chain = with_riders(handmade.chain([(1, 2)] * 4, LAYERS), [RIDER])
    plan = handmade.packed(chain, stages, 12)
    changed = [
        stage.model_copy(update={"remat": remat.get(f"stage{stage.id}")}) for stage in plan.stages
    ]
    return once(plan.model_copy(update={"stages": tuple(changed)}))


@pytest.mark.parametrize(
    ("stages", "kept", "outputs"),
    [
        ([(0, 3, 0)], [145], [0]),
        ([(0, 2, 0), (3, 3, 0)], [130, 15], [10, 0]),
        ([(0, 1, 0), (2, 2, 0), (3, 3, 0)], [115, 15, 15], [10, 10, 0]),
        ([(0, 1, 0), (2, 2, 1), (3, 3, 0)], [115, 15, 115], [10, 110, 0]),
    ],
)
def test_by_hand(stages: list[tuple[int, int, int]], kept: list[int], outputs: list[int]) -> None:
    """In one stage; in stages of one GPU; where another GPU comes between, it is there anew."""
    found = four(stages)
    assert [found[stage].size.kept for stage in range(len(stages))] == kept
    assert [found[stage].output for stage in range(len(stages))] == outputs


def test_nothing_is_handed_over_where_all_of_it_is_kept() -> None:
    """What is kept of an output may be a larger storage, the rider's share of the output in it."""
    layers = [dict(row) for row in LAYERS]
    chain = with_riders(handmade.chain([(1, 2)] * 4, layers), [RIDER])
    of = list(chain.layers)
    all_kept = {"saved_output_bytes": of[1].output_bytes, "forward_workspace_bytes": 200}
    of[1] = of[1].model_copy(update=all_kept)
    chain = chain.model_copy(update={"layers": tuple(of)})
    plan = handmade.packed(chain, [(0, 1, 0), (2, 3, 0)], 12)
    assert once(plan)[0].output == 0
    simulation = simulator.simulate(plan, lowering.lower(plan))
    assert simulation.terms(0).peak.size <= plan.memory[0].peak_bytes


def test_a_tensor_that_is_kept_for_a_while_counts_no_more_than_once() -> None:
    """Autograd keeps it, so it is in the saved input; what the layer needs most comes later."""
    rows = [
        {"output_bytes": 1, "forward_workspace_bytes": 2},
        {"output_bytes": 2, "saved_input_bytes": 1},
    ]
    chain = handmade.chain([(1, 2)] * 2, rows, input_bytes=2)
    kept, gone = RidingTensor(size_bytes=1, kept=True, passed=True), RidingTensor(size_bytes=1)
    first, second = chain.layers
    layers = (
        first.model_copy(update={"riding": (kept,), "saved_input_bytes": 1}),
        second.model_copy(update={"riding": (gone,)}),
    )
    plan = handmade.packed(chain.model_copy(update={"layers": layers}), [(0, 0, 0), (1, 1, 0)], 6)
    simulation = simulator.simulate(plan, lowering.lower(plan))
    assert simulation.terms(0).peak.size <= plan.memory[0].peak_bytes
    found, often = once(plan)[1].size, costs.live_stage_bytes(condensed(plan), 1)
    assert (found.forward, found.backward) <= (often.forward, often.backward)


def test_a_run_keeps_its_input_once() -> None:
    """Of two runs in a row the second keeps of its input what the first does not."""
    found = four([(0, 3, 0)], stage0=Remat(recompute=((1, 1), (2, 2))))
    assert found[0].size.kept == 110 + 10 + 15


@pytest.mark.parametrize(("light", "forward"), [(None, 1245), (1000, 1150)])
def test_an_input_is_there_through_a_first_forward(light: int | None, forward: int) -> None:
    """Layer 3, run again, takes a tensor of 100 bytes that layer 1 keeps, as long as it runs.

    Before it are si 110 + r 5 of layer 1, 10 + 5 of layer 2; it needs x 10 + lw 1000 + y 10. Where
    fw 990 + r 5 stand for lw nobody knows whether the tensor, which it does not keep, is there.
    """
    rows = [*LAYERS[:3], {**LAYERS[3], "forward_workspace_bytes": 990}]
    chain = with_riders(handmade.chain([(1, 2)] * 4, rows), [(100, 1, 3, frozenset({1}))])
    last = chain.layers[3].model_copy(update={"forward_light_workspace_bytes": light})
    chain = chain.model_copy(update={"layers": (*chain.layers[:3], last)})
    plan = handmade.packed(chain, [(0, 3, 0)], 12)
    again = plan.stages[0].model_copy(update={"remat": Remat(recompute=((3, 3),))})
    assert once(plan.model_copy(update={"stages": (again,)}))[0].size.forward == forward


def test_what_may_leave_counts_in_itself() -> None:
    """A saved input that goes to the host is there anew when it comes back."""
    stages = [(0, 0, 1), (1, 2, 0), (3, 3, 0)]
    assert [four(stages)[stage].size.kept for stage in (1, 2)] == [130, 15]
    away = Remat(offload=(), offload_input=True)
    found = four(stages, stage1=away)
    assert [found[stage].size.kept for stage in (1, 2)] == [130, 115]
    assert found[1].output == 110


def test_a_runs_input_that_may_leave_counts_in_itself() -> None:
    """Layer 2, computed again, keeps all 110 bytes that enter it, though stage 0 has 100 of them.

    What comes behind it finds stage 0's.
    """
    stages = [(0, 1, 0), (2, 2, 0), (3, 3, 0)]
    again = Remat(recompute=((2, 2),))
    assert [four(stages, stage1=again)[stage].size.kept for stage in (1, 2)] == [10, 15]
    away = Remat(recompute=((2, 2),), offload_input=True)
    assert [four(stages, stage1=away)[stage].size.kept for stage in (1, 2)] == [110, 15]
    alone = [(0, 1, 1), (2, 2, 0), (3, 3, 0)]
    assert [four(alone, stage1=again)[stage].size.kept for stage in (1, 2)] == [110, 15]
    assert [four(alone, stage1=away)[stage].size.kept for stage in (1, 2)] == [110, 115]
