"""Eager 1F1B as plans, and the exhaustive search over them."""

from __future__ import annotations

import os
from dataclasses import replace
from fractions import Fraction
from itertools import product
from pathlib import Path

import pytest

from pipeplan import lowering, simulator, verifier
from pipeplan.baselines.eager import Policy, cycle_of, eager_plan
from pipeplan.baselines.exhaustive import PartitionCloud, PartitionPoint, partitions
from pipeplan.baselines.splits import to_stages
from pipeplan.baselines.timed import Setting, busiest
from pipeplan.baselines.twobw import equal_blocks
from pipeplan.chain import Chain
from pipeplan.cluster import uniform
from pipeplan.errors import InputError
from pipeplan.plan import Plan
from pipeplan.self_timed import Order, staircase
from pipeplan.simulator.tape import Ops
from tests import grids
from tests.baselines import AMPLE, chain, random_chain, setting

PROFILES = os.environ.get("PIPEPLAN_PROFILES")
GBYTES = 10**9
ORDERS: tuple[Order, ...] = ("alternate", "backward", "strict")


def executed(of: Setting, ends: tuple[int, ...], policy: Policy) -> Plan:
    """The eager plan; it must exist."""
    plan = eager_plan(of.outline(to_stages(ends), "2bw", "test"), policy)
    assert plan is not None
    return plan


def test_figure_4_of_the_source_is_what_eager_execution_does() -> None:
    """F = B = 3, 2, 2, 2 with 4, 2, 2, 1 copies: two micro-batches every 12; 1F1B takes 8 each."""
    of = setting(chain([(3, 3), (2, 2), (2, 2), (2, 2)]), 4)
    plan = executed(of, (1, 2, 3, 4), Policy((4, 2, 2, 1)))
    assert plan.period_per_microbatch == 6
    assert verifier.audit(plan).in_flight <= (4, 2, 2, 1)


def test_one_micro_batch_at_a_time_takes_its_whole_way() -> None:
    """With a cap of one the period is all computes and transfers: 2 + 3 + 4 + 5 + 2 * 7."""
    of = setting(chain([(2, 3), (4, 5)], sizes=[7, 0]), 2, bandwidth=GBYTES)
    plan = executed(of, (1, 2), Policy((1, 1)))
    assert (plan.k, plan.period_ns) == (1, 28)
    # The backward behind the last forward is done at once, so stage 1 never holds two.
    assert verifier.audit(plan).in_flight == (1, 1)


@grids.each_value(seed=range(10), order=ORDERS)
def test_an_eager_cycle_is_a_plan_that_every_voice_accepts(seed: int, order: Order) -> None:
    """No rule is broken, the replay agrees, caps are kept, no resource is overbooked."""
    of = setting(random_chain(seed, 6), 3, bandwidth=2 * GBYTES)
    for ends, caps in product(((1, 3, 6), (2, 5, 6)), ((2, 2, 2), (3, 2, 1), (5, 4, 3))):
        if order == "strict" and caps == (2, 2, 2):
            continue
        plan = executed(of, ends, Policy(caps, order))
        assert verifier.verify(plan) == ()
        simulator.check(plan, lowering.lower(plan))
        counts = verifier.audit(plan).in_flight
        assert all(count <= cap for count, cap in zip(counts, caps, strict=True))
        assert plan.period_per_microbatch >= busiest(plan, Ops.of(plan))


@pytest.mark.parametrize("seed", range(6))
def test_counts_in_flight_of_a_cycle_are_the_verifiers(seed: int) -> None:
    """What the exhaustive search prunes by is what the audit finds."""
    of = setting(random_chain(seed, 6), 3, bandwidth=2 * GBYTES)
    outline = of.outline(to_stages((2, 4, 6)), "2bw", "test")
    ops = Ops.of(outline)
    for caps in ((2, 2, 2), (4, 3, 2), (6, 6, 6)):
        cycle = cycle_of(outline, ops, Policy(caps))
        assert cycle is not None
        plan = executed(of, (2, 4, 6), Policy(caps))
        assert tuple(cycle.in_flight(ops)) == verifier.audit(plan).in_flight


def test_a_forward_without_length_counts_before_the_update() -> None:
    """(R6): it starts where a backward ends, so a step of two micro-batches is raised to three."""
    of = replace(setting(chain([(0, 1), (1, 2)]), 2), microbatches=2)
    plan = executed(of, (1, 2), Policy((3, 1)))
    assert (verifier.audit(plan).in_flight[0], plan.microbatches) == (3, 3)
    assert verifier.verify(plan) == ()


def test_two_stages_on_one_gpu_are_refused() -> None:
    """Eager 1F1B knows one stage per GPU."""
    of = setting(chain([(1, 1)] * 2), 2)
    outline = of.outline(to_stages((1, 2), [0, 0]), "2bw", "test")
    with pytest.raises(InputError, match="one stage per GPU"):
        eager_plan(outline, Policy((1, 1)))


def search(of: Setting, than: Fraction | None = None) -> PartitionCloud:
    """The finished exhaustive search."""
    cloud = PartitionCloud(of, than)
    for ends in partitions(of):
        cloud.explore(ends)
    cloud.finish()
    return cloud


@grids.first(5, seed=range(8))
def test_only_faster_points_are_looked_for(seed: int) -> None:
    """In one memory, what is faster than a period is found as without it, and nothing else."""
    ample = Setting(random_chain(seed, 6), uniform(3, AMPLE, bandwidth_bytes_per_s=2 * GBYTES))
    every = search(ample)
    memory = sorted(point.peak for point in every.points)[len(every.points) // 2]
    scarce = ample.on(uniform(3, memory, bandwidth_bytes_per_s=2 * GBYTES))
    best = every.best((memory,) * 3)
    assert best is not None
    assert search(scarce, best.period_ns).best((memory,) * 3) is None
    found = search(scarce, best.period_ns + 1)
    assert found.best((memory,) * 3) is not None
    assert all(point.period_ns < best.period_ns + 1 for point in found.points)
    assert min(point.period_ns for point in found.points) == best.period_ns


@grids.each_value(seed=range(5), model=["exact", "paper"])
def test_what_the_search_leaves_out_is_never_better(seed: int, model: str) -> None:
    """At every memory its best point is as fast as that of executing everything."""
    small = random_chain(seed, 6)
    cluster = uniform(3, AMPLE, bandwidth_bytes_per_s=2 * GBYTES, duplex="half")
    of = Setting(small, cluster, "paper" if model == "paper" else "exact")
    cloud = search(of)
    everything: list[tuple[int, Fraction]] = []
    for ends in partitions(of):
        stages = len(ends)
        for noam in range(1, 3 * stages + 1):
            for caps in {(noam,) * stages, staircase(stages, noam)}:
                for order in ("alternate", "backward"):
                    plan = executed(of, ends, Policy(caps, order))
                    peak = max(row.peak_bytes for row in plan.memory)
                    everything.append((peak, plan.period_per_microbatch))
    for memory in sorted({peak for peak, _ in everything}):
        best = cloud.best((memory,) * 3)
        assert best is not None
        fastest = min(period for peak, period in everything if peak <= memory)
        assert best.period_ns <= fastest, memory
    assert cloud.best((min(everything)[0] - 1,) * 3) is None


def test_points_are_plans_and_fit_the_cluster() -> None:
    """A point made a plan again has its bytes and its period; none needs more than there is."""
    memory = 60
    of = setting(random_chain(3, 6), 3, bandwidth=GBYTES, memory=memory)
    points: list[PartitionPoint] = search(of).points
    assert points
    for point in points[::5]:
        plan = point.plan(of, "test")
        assert verifier.verify(plan) == ()
        assert tuple(row.peak_bytes for row in plan.memory) == point.peak_bytes
        assert plan.period_per_microbatch == point.period_ns
        assert point.peak <= memory


def test_partitions_that_part_tied_layers_are_left_out() -> None:
    """First and last layer share a parameter: only one stage can be trained."""
    untied = chain([(1, 1)] * 4)
    layers = [
        layer.model_copy(update={"parameters": ("shared",)}) if index in (0, 3) else layer
        for index, layer in enumerate(untied.layers)
    ]
    tied = setting(untied.model_copy(update={"layers": tuple(layers)}), 3)
    assert partitions(tied) == [(4,)]
    assert len(partitions(setting(untied, 3))) > 1


def test_equal_blocks_of_every_depth() -> None:
    """Six equal layers on three GPUs: depths 3, 2, 1 take 4, 6, 12 each without communication."""
    plans = list(equal_blocks(setting(chain([(1, 1)] * 6), 3)))
    assert [len(plan.stages) for plan in plans] == [3, 2, 1]
    assert [plan.period_per_microbatch for plan in plans] == [4, 6, 12]
    assert [verifier.audit(plan).in_flight for plan in plans] == [(3, 2, 1), (2, 1), (1,)]


@pytest.mark.skipif(PROFILES is None, reason="PIPEPLAN_PROFILES does not name a folder")
def test_the_search_on_vgg16_is_as_strong_as_known() -> None:
    """407.827, 281.261, 247.008 and 235.590 ms at the memories of the known points, or better."""
    text = (Path(PROFILES or "") / "vgg16-b128.chain.json").read_text()
    cluster = uniform(4, 19704780544, bandwidth_bytes_per_s=12 * GBYTES, duplex="half")
    cloud = search(Setting(Chain.from_json(text), cluster, "paper"))
    for memory, known in (
        (9608566528, 407_827_000),
        (12973971200, 281_261_400),
        (16339375872, 247_008_000),
        (19704780544, 235_590_000),
    ):
        best = cloud.best((memory,) * 4)
        assert best is not None
        assert best.period_ns <= known
