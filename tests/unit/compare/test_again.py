"""What recomputation is worth, row by row: never more than deciding everything at once."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest

from pipeplan.chain import Chain
from pipeplan.cluster import Cluster, Host, uniform
from pipeplan.compare import Absent, Row, again, ours
from pipeplan.compare.again import AWAY, FULL, NONE, TWO_PHASE
from pipeplan.compare.ours import CONTIGUOUS, OURS, Found
from pipeplan.compare.rows import row_of
from pipeplan.errors import InputError
from pipeplan.plan import Plan
from pipeplan.planner import Config, Progress, solve
from pipeplan.testing.networks import build
from pipeplan.verifier import verify
from tests import handmade, handmade_offload
from tests.baselines import chain as short_chain

GIB = 2**30
CONFIG = Config(time_limit_s=1, workers=1, gap=0.02, recompute="auto", deterministic=True)


def machines(gpus: int, memory: int) -> Cluster:
    """Equal GPUs, 12 GB/s."""
    return uniform(gpus, memory, bandwidth_bytes_per_s=12 * 10**9)


def found(memory: int) -> Found:
    """All of our rows for ResNet-18 on two GPUs."""
    return ours.find_ours(build("resnet18", 8, 1000), machines(2, memory), CONFIG)


@pytest.mark.parametrize("memory", [8 * GIB // 5, 3 * GIB])
def test_rows_in_order_and_ours_is_never_worse(memory: int) -> None:
    """Ours, contiguous, none, full and two-phase; none of them beats ours, all plans are valid."""
    here = found(memory)
    rows = ours.our_rows(here, [here])
    assert [row.name for row in rows] == [OURS, CONTIGUOUS, NONE, FULL, TWO_PHASE]
    mine, others = rows[0], [row for row in rows[1:] if isinstance(row, Row)]
    assert isinstance(mine, Row)
    assert all(mine.period_ns <= row.period_ns for row in others)
    assert all(verify(row.plan) == () for row in (mine, *others))
    if memory < 2 * GIB:
        assert isinstance(rows[2], Absent)


def test_a_baseline_that_does_not_fit_is_absent_whatever_there_is_to_start_from() -> None:
    """Equal times put 16 bytes of weights on a GPU of 14; a plan with other cuts is no answer."""
    weights = [{"weight_bytes": size} for size in (4, 4, 1, 1)]
    chain, cluster = handmade.chain([(1, 1)] * 4, weights), uniform(2, 14)
    fits = solve(chain, cluster, Config(time_limit_s=1, workers=1, deterministic=True))
    asked = Config(time_limit_s=1, workers=1, recompute="auto", resume=fits)
    assert again.full(chain, cluster, asked) is None


def test_what_is_computed_again_is_work() -> None:
    """F 3 and B 4, of which 1 is layer 0's forward again, leave 3 of 10 ns; nothing else waits."""
    row = row_of("test", handmade_offload.recomputing_too())
    assert row.bubble.total == row.bubble.waiting == pytest.approx(0.3)


def test_an_update_of_what_is_computed_again_is_that_of_one_layer() -> None:
    """(T5): of a step of 7 ns the last one is the update; no GPU idles before it."""
    row = row_of("test", handmade.recomputed_whole())
    assert (row.period_ns, row.update_ns, row.bubble.total) == (6, 1, 0)


def test_a_row_with_offloading_is_the_last_and_never_worse() -> None:
    """It comes on top of all others, which do without a host; its plan is valid."""
    host = Host(memory_bytes=100 * GIB, bandwidth_bytes_per_s=12 * 10**9)
    cluster = machines(2, 3 * GIB).model_copy(update={"host": host})
    asked = replace(CONFIG, offload="auto", time_limit_s=0.5)
    here = ours.find_ours(build("resnet18", 8, 1000), cluster, asked)
    rows = ours.our_rows(here, [here])
    assert [row.name for row in rows] == [OURS, CONTIGUOUS, NONE, FULL, TWO_PHASE, AWAY]
    mine, away = rows[0], rows[-1]
    assert isinstance(mine, Row)
    assert isinstance(away, Row)
    assert verify(away.plan) == ()
    assert away.period_ns <= mine.period_ns
    others = [row.plan for row in rows[:-1] if isinstance(row, Row)]
    assert not any(op.kind.is_host for plan in others for op in plan.ops)


def test_each_search_starts_from_what_less_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours starts from the plan without recomputation, the one with a host from ours."""
    asked: dict[tuple[str, str, str], Plan | None] = {}
    plans: dict[tuple[str, str, str], Plan] = {}

    def recorded(chain: Chain, cluster: Cluster, config: Config, _: Progress) -> Plan:
        key = config.recompute, config.offload, config.method
        asked[key] = config.resume
        plans[key] = solve(chain, cluster, replace(config, time_limit_s=0.2))
        return plans[key]

    monkeypatch.setattr(ours, "solve", recorded)
    host = Host(memory_bytes=100 * GIB, bandwidth_bytes_per_s=12 * 10**9)
    cluster = machines(2, 4 * GIB).model_copy(update={"host": host})
    ours.find_ours(build("resnet18", 8, 1000), cluster, replace(CONFIG, offload="auto"))
    assert asked["off", "off", "auto"] is None
    assert asked["auto", "off", "auto"] is plans["off", "off", "auto"]
    assert asked["auto", "auto", "auto"] is plans["auto", "off", "auto"]


def test_full_recomputes_every_stage_as_a_whole() -> None:
    """Each GPU has one stage, and that stage is one run."""
    plan = again.full(build("resnet18", 8, 1000), machines(2, 6 * GIB), CONFIG)
    assert plan is not None
    assert [stage.gpu for stage in plan.stages] == [0, 1]
    assert all(stage.remat and stage.remat.recompute == (stage.layers,) for stage in plan.stages)


def test_two_phase_keeps_the_cuts_of_ample_memory() -> None:
    """Memory changes what is computed again, never where the chain is cut."""
    chain = build("resnet18", 8, 1000)
    plans = [again.two_phase(chain, machines(2, size * GIB), CONFIG) for size in (3, 60)]
    scarce, ample = (plan for plan in plans if plan is not None)
    assert [stage.layers for stage in scarce.stages] == [stage.layers for stage in ample.stages]
    assert any(stage.remat for stage in scarce.stages)
    assert not any(stage.remat for stage in ample.stages)
    assert Fraction(scarce.period_ns, scarce.k) > Fraction(ample.period_ns, ample.k)


def test_too_few_layers_are_refused() -> None:
    """More GPUs than layers cannot have a stage each."""
    with pytest.raises(InputError):
        again.full(short_chain([(1, 1)]), machines(2, GIB), CONFIG)
