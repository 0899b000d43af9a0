"""What-if sweeps: more never slower, bounds that agree, a folder of verified plans."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from pipeplan import planner, verifier
from pipeplan.cli import main
from pipeplan.cli.common import count, ranges, size
from pipeplan.cli.sweep import sweep_table
from pipeplan.cluster import Cluster, Gpu, Links, Pair, differ_in_memory_alone, uniform
from pipeplan.errors import InputError
from pipeplan.plan import Plan
from pipeplan.sweep import Point, sweep
from tests import handmade

SIZES = (3, 2, 4, 1, 2)
CHAIN = handmade.chain(
    [(n, 2 * n) for n in SIZES], [{"saved_bytes": n, "output_bytes": 1} for n in SIZES]
)
GPUS, MEMORIES = (1, 2, 3), (5, 9, 14, 30)


def points(memories: Sequence[int] = MEMORIES, **options: Any) -> tuple[Point, ...]:
    """All of them, a fifth of a second each."""
    config = planner.Config(**{"time_limit_s": 0.2, "workers": 1} | options)
    clusters = [uniform(gpus, memory) for gpus, memory in product(GPUS, memories)]
    return sweep(CHAIN, reversed(clusters), config)


@pytest.mark.parametrize("options", [{}, {"k": 1}, {"method": "contiguous"}])
def test_more_is_never_slower(options: dict[str, Any]) -> None:
    """Periods fall and bounds fall with memory and GPUs; every plan is valid at its point."""
    found = points(**options)
    assert [(point.gpus, point.memory_bytes) for point in found] == list(product(GPUS, MEMORIES))
    for one, other in product(found, found):
        if one.gpus <= other.gpus and one.memory_bytes <= other.memory_bytes and one.plan:
            assert other.plan is not None
            assert other.plan.period_per_microbatch <= one.plan.period_per_microbatch
            assert bound(other.plan) <= bound(one.plan)
    for point in found:
        if point.plan is None:
            assert "no plan exists" in point.reason or "no contiguous plan" in point.reason
        else:
            assert verifier.verify(point.plan) == ()
            assert point.plan.cluster == point.cluster
    assert found[0].plan is None
    assert found[-1].plan is not None


def bound(plan: Plan) -> Fraction:
    """For every plan."""
    assert plan.solver.bounds.any is not None
    return Fraction(*plan.solver.bounds.any)


def test_flush_compares_steps_of_one_size() -> None:
    """Every point has the micro-batches of the largest number of GPUs; steps never grow."""
    found = [point.plan for point in points((9, 30), semantics="flush") if point.plan]
    assert {plan.microbatches for plan in found} == {12}
    largest = [plan.step_ns for plan in found if len(plan.cluster.gpus) == 3]
    assert len(largest) == 2
    assert largest == sorted(largest, reverse=True)


def test_a_plan_to_resume_from_competes_wherever_it_fits() -> None:
    """It is the best at its own memory, though a plan for less memory is there already."""
    best = planner.solve(CHAIN, uniform(2, 100), planner.Config(time_limit_s=5, workers=1))
    hurry = planner.Config(time_limit_s=1e-9, workers=1, resume=best)
    less, same = sweep(CHAIN, [uniform(2, 14), uniform(2, 100)], hurry)
    assert less.plan is not None
    assert same.plan is not None
    assert best.period_per_microbatch < less.plan.period_per_microbatch
    assert same.plan.period_per_microbatch <= best.period_per_microbatch


@pytest.mark.parametrize(
    "other",
    [
        uniform(2, 30, bandwidth_bytes_per_s=10**9),
        uniform(2, 30, action_overhead_ns=1),
        Cluster(gpus=tuple(Gpu(name=f"gpu{i}", memory_bytes=30, speed=0.5) for i in range(2))),
    ],
)
def test_machines_that_differ_are_refused(other: Cluster) -> None:
    """A bound for fast links or GPUs is none for slow ones."""
    with pytest.raises(InputError, match="sweep: got clusters of 2 and 3 GPUs that differ"):
        sweep(CHAIN, [uniform(3, 30), other], planner.Config(time_limit_s=0.1))


def test_links_that_only_the_larger_has_may_differ() -> None:
    """They are no part of the smaller one."""
    far = Pair(source=0, target=2, latency_ns=7)
    large = uniform(3, 30)
    large = large.model_copy(update={"links": Links(pairs=(far,))})
    assert differ_in_memory_alone(large, uniform(2, 9))
    assert not differ_in_memory_alone(large, uniform(3, 30))


def test_an_interrupt_keeps_what_is_there() -> None:
    """Ctrl-C in the third point gives the points so far."""
    clusters = [uniform(2, memory) for memory in (9, 14, 30)]

    def interrupt(*row: Any) -> None:
        if row[4].startswith("3 of 3") and "interrupted" not in row[4]:
            raise KeyboardInterrupt

    config = planner.Config(time_limit_s=0.2, workers=1)
    found = sweep(CHAIN, clusters, config, interrupt)
    assert 2 <= len(found) <= 3
    assert all(point.plan for point in found)


def test_points_without_a_pinned_gpu_have_no_plan() -> None:
    """They say so and the others are planned; a pin that no point can keep is refused."""
    clusters = [uniform(gpus, 30) for gpus in (1, 2, 3)]
    config = planner.Config(time_limit_s=0.2, workers=1, pins={0: 1})
    one, *others = sweep(CHAIN, clusters, config)
    assert (one.plan, one.infeasible) == (None, True)
    assert "pin 0=1: got GPU 1, need 0..0" in one.reason
    for point in others:
        assert point.plan is not None
        assert point.plan.stages[0].gpu == 1
    for pins in ({0: 3}, {"nothing": 1}):
        with pytest.raises(InputError, match="pin "):
            sweep(CHAIN, clusters, replace(config, pins=pins))


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("2,4,8", [2, 4, 8]),
        ("2..8", [2, 4, 8]),
        ("1..6", [1, 2, 4, 6]),
        ("4..6", [4, 5, 6]),
        ("3, 2..8,3", [3, 2, 4, 8]),
        ("5..5", [5]),
    ],
)
def test_ranges_of_numbers(text: str, values: list[int]) -> None:
    """Lists as they are; ranges double, or take five steps, and end where they say."""
    assert ranges(count())(text) == values


def test_ranges_of_sizes() -> None:
    """Units on both ends; 8 to 12 GiB in five equal steps."""
    gib = 2**30
    assert ranges(size)("8GiB..32GiB") == [8 * gib, 16 * gib, 32 * gib]
    assert ranges(size)("8GiB..12GiB") == [8 * gib, 9 * gib, 10 * gib, 11 * gib, 12 * gib]


@pytest.mark.parametrize("text", ["8..2", "0..4", "..4", "2..", "a..b", "1..2..3"])
def test_what_is_no_range_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Reversed, empty or endless ranges are usage errors that name the flag."""
    flags = ["--gpus", text, "--memory", "1", "--bandwidth", "inf", "-o", "x"]
    with pytest.raises(SystemExit, match="2"):
        main(["plan", "chain.json", *flags])
    assert "--gpus" in capsys.readouterr().err


def test_a_folder_of_plans(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Plans, JSON, pictures; points without a plan say what is missing; full folders are kept."""
    chain, out = tmp_path / "chain.json", tmp_path / "out"
    chain.write_text(CHAIN.to_json())
    flags = ["plan", str(chain), "--gpus", "1,2", "--memory", "9,30", "--bandwidth", "inf"]
    flags += ["--time-limit", "100ms", "-o", str(out)]
    assert main(flags) == 0
    shown = capsys.readouterr().out
    assert "1 GPUs, 9 B: chain 'handmade': no plan exists" in shown
    assert "every plan is verified and replayed" in shown
    data = json.loads((out / "sweep.json").read_text())
    assert [(point["gpus"], point["memory_bytes"]) for point in data["points"]] == list(
        product((1, 2), (9, 30))
    )
    assert data["points"][0]["plan"] is None
    assert data["points"][-1]["plan"] == "plan-2gpus-30B.json"
    for point in data["points"][1:]:
        plan = Plan.read(out / point["plan"])
        assert plan.cluster == uniform(point["gpus"], point["memory_bytes"])
        assert float(plan.period_per_microbatch) == point["period_per_microbatch_ns"]
    assert (out / "sweep-2gpus.png").stat().st_size > 1000
    assert main(flags) == 2
    assert "is not empty" in capsys.readouterr().err
    flags[3] = "1"
    assert main([*flags, "--force", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["chain"] == "handmade"


def test_states_on_the_host_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Least memory falls by what may leave; more memory never takes a longer step."""
    chain, out = tmp_path / "chain.json", tmp_path / "out"
    sizes = [
        {"saved_bytes": 1, "output_bytes": 1, "weight_bytes": 4, "gradient_bytes": 4}
        | {"optimizer_bytes": 8}
        for _ in SIZES
    ]
    chain.write_text(handmade.chain([(n, 2 * n) for n in SIZES], sizes).to_json())
    flags = ["plan", str(chain), "--gpus", "2", "--memory", "44,48,60,200", "--bandwidth", "inf"]
    flags += ["--time-limit", "300ms", "--deterministic", "--workers", "1", "--json"]
    host = ["--host-bandwidth", "1GB/s", "--host-memory", "1kB", "--host-update", "1GB/s"]
    assert main([*flags, "-o", str(tmp_path / "alone")]) == 0
    alone = json.loads(capsys.readouterr().out)["points"]
    assert main([*flags, *host, "--offload", "states", "-o", str(out)]) == 0
    hosted = json.loads(capsys.readouterr().out)["points"]
    assert [point["plan"] is not None for point in alone] == [False, False, False, True]
    away = [sum(row.get("host_bytes", 0) for row in point["memory"]) for point in hosted]
    assert all(away[:-1])
    assert not away[-1]
    steps = [point["step_ns"] for point in hosted]
    assert steps == sorted(steps, reverse=True)
    table = sweep_table(tuple(_point(out, point) for point in hosted))
    assert table.columns[-1].header == "on host"
    assert (out / "sweep-2gpus.png").stat().st_size > 1000


def _point(folder: Path, data: dict[str, Any]) -> Point:
    plan = Plan.read(folder / data["plan"])
    return Point(plan.cluster, plan)


def test_nothing_fits_anywhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A sweep without a single plan ends as infeasible, with the reasons."""
    chain = tmp_path / "chain.json"
    chain.write_text(CHAIN.to_json())
    flags = ["plan", str(chain), "--gpus", "1,2", "--memory", "1", "--bandwidth", "inf"]
    assert main([*flags, "-o", str(tmp_path / "out")]) == 3
    assert capsys.readouterr().out.count("no plan exists") == 2


def test_an_interrupted_sweep_says_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ctrl-C keeps the points that are planned and tells how many others were asked for."""
    clusters = [uniform(1, memory) for memory in MEMORIES[:2]]
    found = sweep(CHAIN, clusters, planner.Config(time_limit_s=0.2, workers=1))
    monkeypatch.setattr("pipeplan.sweep.sweep", lambda *_: found)
    file = tmp_path / "chain.json"
    file.write_text(CHAIN.to_json())
    words = ["--gpus", "1,2,3", "--memory", "30", "--bandwidth", "inf"]
    main(["plan", str(file), *words, "-o", str(tmp_path / "out")])
    assert "interrupted: 1 more were asked for" in capsys.readouterr().err
