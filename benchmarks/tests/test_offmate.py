"""Llama2-7B as OffMate's benchmark has it."""

from __future__ import annotations

import pytest

from benchmarks.offmate_models import ACTIVATIONS, WITHOUT_LIMITS, Llama


def test_sizes_are_those_of_the_published_model() -> None:
    """6,738,415,616 parameters; the thesis's activations and time of a step."""
    problem = Llama().problem()
    assert sum(group.bytes for group in problem.groups) == 4 * 6_738_415_616
    kept = sum(block.options[0].kept_bytes + block.output_bytes for block in problem.blocks)
    assert kept == pytest.approx(ACTIVATIONS, rel=1e-6)
    assert problem.compute_ns / 1e9 == pytest.approx(WITHOUT_LIMITS, rel=1e-4)
