"""The benchmark of optimizer states on the host."""

from __future__ import annotations

from typing import Any

from benchmarks import host_states


def _times(row: dict[str, Any], kind: str) -> list[float]:
    return [float("inf") if each is None else each["step_ns"] for each in row[kind]]


def test_the_host_makes_plans_where_there_are_none() -> None:
    """Below the states' average there is a plan with the host; with it no step is longer."""
    row = host_states.row("llama24", shares=(0.8, 2.0), limit_s=0.5)
    assert row["gpu"][0] is None
    assert row["host"][0] is not None
    assert row["host"][0]["hosted_bytes"] > 0
    alone, hosted = _times(row, "gpu"), _times(row, "host")
    assert all(one >= two for one, two in zip(alone, hosted, strict=True))
    text = "\n".join(host_states.page({"Llama": row}))
    assert "0.80 of it" in text
