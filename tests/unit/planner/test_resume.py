"""Planning from a plan made before."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from pipeplan import planner, verifier
from pipeplan.chain import Chain
from pipeplan.cli import main
from pipeplan.cluster import Cluster, uniform
from pipeplan.errors import InputError, InvalidPlanError
from pipeplan.ilp.costs import CostModel
from pipeplan.ilp.schedule import to_ops
from pipeplan.ilp.warm_start import schedule_of
from pipeplan.plan import Plan
from tests import handmade

SIZES = (3, 2, 2, 1)
CHAIN = handmade.chain([(1, 1), (2, 2), (2, 2), (1, 1)], [{"saved_bytes": n} for n in SIZES])


def solve(cluster: Cluster, chain: Chain = CHAIN, **options: Any) -> Plan:
    """Within seconds, one thread."""
    return planner.solve(
        chain, cluster, planner.Config(**{"time_limit_s": 20, "workers": 1} | options)
    )


def hopeless(cluster: Cluster, **options: Any) -> Plan:
    """A search that finds next to nothing by itself: contiguous plans only, k = 1."""
    return solve(cluster, method="contiguous", k=1, **options)


def test_times_survive_the_round_trip() -> None:
    """A plan's schedule gives the plan's ops again, shifts of any size included."""
    plan = solve(uniform(3, 12, bandwidth_bytes_per_s=10**9, latency_ns=1), k=2, time_limit_s=1)
    costs = CostModel(plan.chain, plan.cluster, plan.semantics, plan.memory_model)
    assert to_ops(costs, schedule_of(plan)) == plan.ops


def test_schedule_and_proofs_are_kept() -> None:
    """The same problem in no time: the period is the resumed one's and stays proven."""
    cluster = uniform(2, 9)
    first = solve(cluster)
    assert first.solver.status == "optimal"
    again = solve(cluster, resume=first, time_limit_s=1e-9)
    assert again.ops == first.ops
    assert again.solver.status == "optimal"
    assert again.solver.bounds == first.solver.bounds


def test_proofs_do_not_travel() -> None:
    """With more memory the schedule competes, but what was proven for less is gone."""
    first = solve(uniform(2, 7), k=1)
    assert first.solver.bounds.k1 == (first.period_ns, 1)
    roomy = solve(uniform(2, 1000), k=1, resume=first)
    assert roomy.period_ns < first.period_ns
    flush = {"semantics": "flush", "time_limit_s": 0.5, "deterministic": True}
    for other in (flush, {"memory_model": "paper"}, {"microbatches": 64}):
        assert verifier.verify(solve(uniform(2, 9), resume=first, **other)) == ()


def test_proofs_of_steps_are_of_one_step() -> None:
    """What bounds a step of few micro-batches, fill and drain included, bounds no other plan."""
    chain, cluster = handmade.chain([(1000, 2000)] * 8), uniform(4, 10**6)
    limits = {"semantics": "flush", "time_limit_s": 1, "deterministic": True}
    short = solve(cluster, chain, microbatches=4, **limits)
    for other in ({"microbatches": 32}, {"microbatches": 4, "k": 1}):
        alone = solve(cluster, chain, **limits | other)
        resumed = solve(cluster, chain, resume=short, **limits | other)
        least = short.solver.bounds.any
        assert least is not None
        assert Fraction(*least) > alone.period_per_microbatch
        assert resumed.period_per_microbatch <= alone.period_per_microbatch
        assert resumed.solver.bounds.any == alone.solver.bounds.any


def test_limited_proofs_hold_for_fewer_microbatches_only() -> None:
    """A proof under (R6) with m micro-batches is used for m, and not without a limit."""
    chain, cluster = handmade.chain([(1, 1)] * 4), uniform(4, 10)
    first = solve(cluster, chain, microbatches=1, k=1)
    assert (first.period_ns, first.solver.most_microbatches) == (4, 1)
    assert solve(cluster, chain, resume=first, k=1).period_ns == 2
    same = solve(cluster, chain, resume=first, k=1, microbatches=1, time_limit_s=1e-9)
    assert (same.period_ns, same.solver.bounds) == (4, first.solver.bounds)


def test_less_memory_drops_the_schedule_and_says_so() -> None:
    """What does not fit does not count; the note says why and the plan is a new one."""
    first = solve(uniform(2, 1000), k=1)
    need = max(row.peak_bytes for row in first.memory)
    plan = hopeless(uniform(2, need - 1), resume=first)
    assert any("needs more memory" in note for note in plan.solver.notes)
    assert max(row.peak_bytes for row in plan.memory) < need


def test_other_links_keep_the_orders() -> None:
    """Slower links make the times anew; the plan keeps every rule and its stages compete."""
    first = solve(uniform(2, 9))
    slower = uniform(2, 9, latency_ns=2, duplex="half")
    plan = hopeless(slower, resume=first.model_copy())
    assert verifier.verify(plan) == ()


HALVES = {"backward_weight_ns": 10, "saved_for_weight_bytes": 1, "saved_bytes": 1}
SPLIT = handmade.chain([(10, 20)] * 6, [HALVES] * 6)
"""Layers whose backward may be two ops."""


@pytest.mark.parametrize(
    ("links", "options"),
    [
        (dict(bandwidth_bytes_per_s=10**9, latency_ns=1), dict(semantics="flush")),
        ({}, dict(semantics="2bw")),
        ({}, dict(semantics="2bw", recompute="auto")),
        ({}, dict(semantics="flush", memory_model="paper")),
    ],
)
def test_halves_of_backwards_are_joined_where_they_cannot_stay(
    links: dict[str, int], options: dict[str, Any]
) -> None:
    """A step plan competes in searches that have no halves, and where its times change."""
    first = solve(uniform(2, 64), SPLIT, semantics="flush", microbatches=8, time_limit_s=2)
    assert first.splits
    again = solve(uniform(2, 64, **links), SPLIT, resume=first, time_limit_s=1e-9, **options)
    verifier.check(again)
    assert again.solver.notes == ()
    assert again.semantics == options["semantics"]


def test_other_k_and_other_allocation_are_noted() -> None:
    """Neither `--k 1` nor `--method contiguous` takes over what they do not allow."""
    both = solve(uniform(2, 1000), k=2)
    plan = hopeless(uniform(2, 1000), resume=both)
    assert (plan.k, len(plan.solver.notes)) == (1, 1)
    chain = handmade.chain([(1, 1), (2, 2), (1, 1)])
    mixed = solve(uniform(2, 10), chain, k=1)
    assert len(mixed.stages) == 3
    plan = solve(uniform(2, 10), chain, method="contiguous", k=1, resume=mixed)
    assert (plan.period_ns, len(plan.solver.notes)) == (6, 1)
    assert solve(uniform(2, 10), chain, resume=mixed, time_limit_s=1e-9).period_ns == 4


def test_runs_on_shared_gpus_compete() -> None:
    """A plan that computes layers again on a GPU with several stages is the best of no time."""
    times = [(1, 2), (3, 1), (2, 2), (1, 1), (4, 4)]
    chain = handmade.chain(times, [{"saved_bytes": 4}] * 5)
    asked: dict[str, Any] = {"recompute": "auto", "k": 1}
    first = solve(uniform(2, 7), chain, **asked)
    hosts = [stage.gpu for stage in first.stages]
    assert len(hosts) > len(set(hosts))
    assert any(stage.remat for stage in first.stages)
    assert hopeless(uniform(2, 7), chain=chain, recompute="auto").period_ns > first.period_ns
    again = solve(uniform(2, 7), chain, resume=first, time_limit_s=1e-9, **asked)
    assert again.period_ns == first.period_ns


def test_what_cannot_be_resumed_is_refused() -> None:
    """Another chain, GPUs that are missing, a plan that breaks a rule."""
    first = solve(uniform(3, 20))
    with pytest.raises(InputError, match=r"got a plan for chain 'handmade' \(4 layers"):
        solve(uniform(3, 20), handmade.chain([(1, 1)] * 3), resume=first)
    assert max(stage.gpu for stage in first.stages) == 2
    with pytest.raises(InputError, match="uses GPU 2, need GPUs below 2"):
        solve(uniform(2, 20), resume=first)
    with pytest.raises(InvalidPlanError):
        solve(uniform(3, 20), resume=first.model_copy(update={"period_ns": 1}))


def test_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`--resume plan.json` plans on; a chain in its place is refused with its name."""
    chain, out, again = (tmp_path / name for name in ("chain.json", "plan.json", "again.json"))
    chain.write_text(CHAIN.to_json())
    flags = [str(chain), "--gpus", "2", "--memory", "9", "--bandwidth", "inf"]
    assert main(["plan", *flags, "-o", str(out)]) == 0
    assert main(["plan", *flags, "--resume", str(out), "-o", str(again)]) == 0
    assert Plan.read(again).ops == Plan.read(out).ops
    assert main(["plan", *flags, "--resume", str(chain), "-o", str(again), "--force"]) == 2
    assert "chain.json" in capsys.readouterr().err


def test_what_recomputes_and_splits_goes_on() -> None:
    """Stages of a step plan keep their two halves when their recomputed layers become one."""
    halves = {"backward_weight_ns": 10, "saved_for_weight_bytes": 1}
    chain = handmade.chain([(10, 20)] * 4, [{"saved_bytes": 6, "output_bytes": 1} | halves] * 4)
    options: dict[str, Any] = {
        "semantics": "flush", "microbatches": 4, "recompute": "auto", "time_limit_s": 0.2,
        "deterministic": True,
    }  # fmt: skip
    plan = solve(uniform(2, 12), chain, **options)
    assert plan.splits
    assert plan.recomputes
    assert solve(uniform(2, 12), chain, **options, resume=plan).period_ns <= plan.period_ns
