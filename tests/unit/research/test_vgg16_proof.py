"""Rounds: what they prove of all plans, and that no plan that exists is ruled out."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise
from random import Random

import pytest
from ortools.sat.python import cp_model

from pipeplan.chain import Chain, Layer
from pipeplan.cluster import uniform
from pipeplan.ilp import search
from pipeplan.ilp.bounds.load import closed_form_bound
from pipeplan.ilp.clock import DeterministicClock
from pipeplan.ilp.costs import CostModel
from pipeplan.ilp.cpsat.solve import configured, run
from pipeplan.ilp.incumbent import Incumbent
from pipeplan.ilp.schedule import Schedule
from pipeplan.plan import OpKind
from research.vgg16_proof.admission import Entrance, entrance
from research.vgg16_proof.cyclic_window import Loop
from research.vgg16_proof.prefix_tree import Beginnings, proves
from tests.searches import limits


def _chain(rows: list[tuple[int, int, int, int]]) -> Chain:
    """Layers of (forward ns, backward ns, saved bytes, output bytes)."""
    layers = tuple(
        Layer(name=str(i), forward_ns=f, backward_ns=b, saved_bytes=s, output_bytes=o)
        for i, (f, b, s, o) in enumerate(rows)
    )
    return Chain(name="rounds", layers=layers, input_bytes=8)


def _costs(chain: Chain, memory: int, gpus: int = 3) -> CostModel:
    cluster = uniform(gpus, memory, bandwidth_bytes_per_s=12 * 10**8, duplex="half")
    return CostModel(chain, cluster, "2bw", "paper")


def _searched(costs: CostModel, ks: tuple[int, ...] = (1, 2, 3)) -> Incumbent:
    """The best plan that a short search finds."""
    options = limits(
        ks=ks, time_limit_s=1, deterministic=True, workers=2, clock=DeterministicClock()
    )
    state = Incumbent(costs, options)
    search.run(state)
    return state


SCARCE = [(81, 154, 336, 41), (44, 101, 205, 20), (108, 183, 240, 1)]


def test_one_layer_lets_through_what_its_memory_keeps() -> None:
    """Where the run is one layer, c is how many of its bytes fit beside a backward's own."""
    chain = _chain([(10, 20, 100, 7), (10, 20, 1, 1)])
    for copies in (1, 2, 3):
        # c times 100 saved, 8 + 7 while the backward runs, two slots of 7 for the cut
        fits = 100 * copies + 15 + 14
        assert entrance(_costs(chain, fits), 0) == Entrance(30, copies)
        smaller = entrance(_costs(chain, fits - 1), 0)
        assert smaller is not None
        assert smaller.copies == copies - 1


def test_ops_without_length_have_no_entrance() -> None:
    """A forward of no length has its bytes at no instant, so nothing is claimed of its run."""
    assert entrance(_costs(_chain([(0, 20, 100, 7), (10, 20, 1, 1)]), 500), 0) is None


def _random_costs(random: Random) -> CostModel:
    """Five layers on three GPUs with room for one to three micro-batches of the first."""
    rows = [
        (
            random.randint(20, 90),
            random.randint(30, 150),
            random.randint(20, 100) * (6 - i),
            random.randint(1, 40),
        )
        for i in range(5)
    ]
    memory = (rows[0][2] + random.choice((0, rows[1][2]))) * random.randint(1, 3) + 160
    return _costs(_chain(rows), memory)


def _found() -> list[tuple[CostModel, Schedule]]:
    """The best plans found of random chains that are scarce of memory."""
    random, pairs = Random(11), []
    for _ in range(8):
        costs = _random_costs(random)
        state = _searched(costs)
        if state.best is not None:
            pairs.append((costs, state.best))
    return pairs


@pytest.fixture(scope="module")
def found() -> list[tuple[CostModel, Schedule]]:
    """Searched once for all tests here."""
    return _found()


def test_no_plan_that_exists_is_ruled_out(found: list[tuple[CostModel, Schedule]]) -> None:
    """At a plan's own period its allocation and all beginnings of it stay open."""
    assert len(found) > 5
    for costs, best in found:
        tree = Beginnings(Incumbent(costs, limits(workers=2)), best.per_microbatch, 0.0)
        home = _home(best)
        for length in range(1, costs.layers + 1):
            ended = next(tree.ruled(home[:length]))
            assert ended.reason == "open", (home, ended)


def test_every_plan_keeps_what_the_entrance_says(found: list[tuple[CostModel, Schedule]]) -> None:
    """Between the gradient of m and the output of n the first GPU works (n - m - c + 1) D."""
    met = 0
    for costs, best in found:
        first = next(i for i, (a, b) in enumerate(pairwise(best.stages)) if a.gpu != b.gpu)
        gate = entrance(costs, best.stages[first].last)
        assert gate is not None
        for n in range(2 * gate.copies * best.k):
            out = _start(best, (OpKind.SEND_F, first), n)
            for m in range(n + 1 - gate.copies):
                back = _start(best, (OpKind.B, first), m)
                met += 1
                assert out - back >= (n - m - gate.copies + 1) * gate.work_ns
    assert met > 30


def test_a_plans_own_times_are_a_solution(found: list[tuple[CostModel, Schedule]]) -> None:
    """At its own period the times of a plan keep all that the model asks, from where f leads."""
    for costs, best in found:
        home = _home(best)
        first = next(layer for layer, gpu in enumerate(home) if gpu)
        gate = entrance(costs, first - 1)
        assert gate is not None
        begun = [_begun(costs, best, gate, first, n) for n in range(best.k + 3 * gate.copies)]
        lead = [
            sum(begun[n : n + gate.copies]) - n * gate.copies * best.per_microbatch
            for n in range(best.k)
        ]
        start = lead.index(max(lead))
        model = Loop.of(costs, home, gate).model(best.per_microbatch, 2 * gate.copies)
        own = {f"b{n}": begun[start + n] for n in range(3 * gate.copies)}
        for n in range(2 * gate.copies):
            for index, time in enumerate(_way(costs, best, first, start + n)):
                own[f"{index}_{n}"] = time
        for index, variable in enumerate(model.proto.variables):
            if variable.name in own:
                time = own.pop(variable.name) - begun[start]
                model.add(model.get_int_var_from_proto_index(index) == time)
        assert not own
        assert run(configured(limits(), 10.0), model) in (cp_model.OPTIMAL, cp_model.FEASIBLE)


def _begun(costs: CostModel, best: Schedule, gate: Entrance, first: int, n: int) -> int:
    """b(n): the latest of what the entrance says of all gradients that are back before n goes."""
    stage = next(stage.id for stage in best.stages if stage.first == first)
    send = costs.send_backward_ns(first - 1, 1, 0)
    return max(
        _start(best, (OpKind.SEND_B, stage), n - gate.copies - j) + send + j * gate.work_ns
        for j in range(30)
    )


def _way(costs: CostModel, best: Schedule, first: int, n: int) -> list[int]:
    """When each leg of micro-batch n begins, layer by layer; the rest has no length."""
    there: list[int] = []
    back: list[int] = []
    for stage in best.stages:
        if stage.first < first:
            continue
        if (OpKind.SEND_F, stage.id - 1) in best.times:
            there.append(_start(best, (OpKind.SEND_F, stage.id - 1), n))
            back.append(_start(best, (OpKind.SEND_B, stage.id), n))
        layers = costs.chain.layers[stage.first : stage.last + 1]
        now = _start(best, (OpKind.F, stage.id), n)
        for layer in layers:
            there.append(now)
            now += layer.forward_ns
        behind = _start(best, (OpKind.B, stage.id), n) + sum(x.backward_ns for x in layers)
        for layer in layers:
            behind -= layer.backward_ns
            back.append(behind)
    return [*there, now, *reversed(back)]


def _start(schedule: Schedule, op: tuple[OpKind, int], microbatch: int) -> int:
    turn, copy = divmod(microbatch, schedule.k)
    return schedule.times[op][copy] + turn * schedule.period


def _home(schedule: Schedule) -> tuple[int, ...]:
    """GPU of each layer, GPUs by the order in which the chain meets them."""
    met: dict[int, int] = {}
    return tuple(
        met.setdefault(stage.gpu, len(met))
        for stage in schedule.stages
        for _ in range(stage.first, stage.last + 1)
    )


def test_a_period_that_sums_allow_is_ruled_out() -> None:
    """Two micro-batches that meet on a GPU and a link prove more of every plan than sums do."""
    state = _searched(_costs(_chain(SCARCE), 960))
    assert state.best is not None
    best = state.best.per_microbatch
    period = best * Fraction(95, 100)
    assert closed_form_bound(state.costs) < period
    fresh = Incumbent(state.costs, limits(ks=(1, 2, 3), workers=2), best=state.best)
    assert proves(fresh, period, 20.0)
    assert not proves(fresh, best, 20.0)


def test_rounds_refute_what_sums_allow() -> None:
    """Two micro-batches meet at half way on the second GPU: they must wait, and rounds see it."""
    chain = _chain([(100, 100, 100, 0), (60, 60, 0, 0), (40, 40, 0, 0)])
    costs = _costs(chain, 216)
    gate = entrance(costs, 0)
    assert gate == Entrance(200, 2)
    loop = Loop.of(costs, (0, 1, 2), gate)
    assert loop.way_ns == 400
    solver = configured(limits(), 10.0)
    # half a round is 200: F_1 of one at 100..160 from then on meets B_1 of the other at 80 more
    assert run(solver, loop.model(Fraction(199), 4)) == cp_model.INFEASIBLE


def test_without_time_nothing_is_proven() -> None:
    """A tree that has no time left is open, so it proves nothing."""
    state = Incumbent(_costs(_chain(SCARCE), 960), limits())
    assert not proves(state, Fraction(500), 0.0)
