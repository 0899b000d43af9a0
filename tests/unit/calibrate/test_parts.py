"""Calibration: the fit is conservative, the real executor is what is measured."""

from __future__ import annotations

import pytest

from pipeplan import lowering
from pipeplan.calibrate import links, overhead
from pipeplan.testing.in_process import run_ranks


def test_fit_finds_latency_and_the_slowest_rate() -> None:
    """Times of 50 us + n bytes at 1 GB/s, the largest at half of it, give 50 us and 0.5 GB/s."""
    times = [50_000, *(50_000 + size for size in links.LARGE_BYTES)]
    times[-1] = 50_000 + 2 * links.LARGE_BYTES[-1]
    link = links.fit((0, 1), times)
    assert (link.latency_ns, link.bandwidth_bytes_per_s) == (50_000, 500_000_000)


def test_equal_links_need_no_entries() -> None:
    """Pairs within a factor of 1.5 of the typical figures share the default link."""
    measured = [links.Link((0, 1), 100, 1000), links.Link((0, 2), 120, 900)]
    found = links.combine([*measured, links.Link((1, 2), 110, 1100)])
    assert (found.latency_ns, found.bandwidth_bytes_per_s, found.pairs) == (110, 1000, ())


def test_a_slow_link_gets_entries_both_ways() -> None:
    """A pair far from the others is described by itself, in both directions."""
    measured = [links.Link(ends, 100, 1000) for ends in ((0, 1), (0, 2))]
    found = links.combine([*measured, links.Link((1, 2), 100, 10)])
    assert found.between(0, 2) == (100, 1000)
    assert found.between(1, 2) == found.between(2, 1) == (100, 10)


def test_one_rank_has_no_links() -> None:
    """Alone there is nothing to measure: links cost nothing."""
    assert links.combine([]).bandwidth_bytes_per_s is None


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_the_measured_program_cannot_hang(ranks: int) -> None:
    """The hand-made 1F1B program has no circle of waits on a transport whose sends return."""
    lowering.check_deadlock(overhead.one_f_one_b_plan(ranks), blocking=False)
    lowering.check_deadlock(overhead.one_f_one_b_plan(ranks).unroll(7), blocking=False)


def test_every_rank_learns_the_same_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Links and overhead come out equal on all ranks, positive, one link per pair."""
    monkeypatch.setattr(links, "REPEATS", 3)
    monkeypatch.setattr(overhead, "STEPS", 1)
    results = run_ranks(
        3, lambda transport: (links.measure_links(transport), overhead.measure_overhead(transport))
    )
    assert all(result == results[0] for result in results)
    measured, cost_ns = results[0]
    assert [link.ends for link in measured] == [(0, 1), (0, 2), (1, 2)]
    assert all(link.latency_ns > 0 and link.bandwidth_bytes_per_s > 0 for link in measured)
    assert 0 < cost_ns < 10**9
