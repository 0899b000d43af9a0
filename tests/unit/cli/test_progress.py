"""What a search says of itself in a log."""

from __future__ import annotations

from fractions import Fraction

import pytest

from pipeplan.cli import progress

SEEN = [
    (0.0, None, "bounds"),
    (0.1, 9, "annealing"),
    (0.2, 9, "balancing"),
    (0.3, 8, "annealing"),
    (0.4, 8, "balancing"),
    (1.4, 8, "annealing"),
    (1.5, 8, "balancing"),
    (3.0, 8, "annealing"),
    (6.6, 8, "balancing"),
    (6.7, 8, "done"),
]


def test_a_log_says_news_once(capsys: pytest.CaptureFixture[str]) -> None:
    """New phases at once, better plans once a second, the rest where it was silent for long."""
    with progress.search() as tell:
        for elapsed, best, phase in SEEN:
            tell(elapsed, None if best is None else Fraction(best), Fraction(7), None, phase)
    lines = capsys.readouterr().err.splitlines()
    said = [(float(line.split()[0]), line.split()[2].rstrip(":")) for line in lines]
    assert said == [
        (0.0, "bounds"),
        (0.1, "annealing"),
        (0.2, "balancing"),
        (1.4, "annealing"),
        (6.6, "balancing"),
        (6.7, "done"),
    ]
    assert "best none yet" in lines[0]
    assert "best 8 ns per micro-batch" in lines[3]
