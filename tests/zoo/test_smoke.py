"""A few architectures in every run of the tests, all others of the table where `long` runs."""

from __future__ import annotations

import json

import pytest

from tests.zoo.__main__ import FILE, row_of
from tests.zoo.catalog import ARCHITECTURES

ROWS: dict[str, dict] = json.loads(FILE.read_text(encoding="utf-8"))
"""What became of each architecture when it was tried last."""
SMOKE = (
    "graph convolution, sparse adjacency as buffer",
    "mixture of experts with a balance loss",
    "texts that the model tokenizes",
    "custom Function in the forward",
)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in SMOKE else pytest.mark.long) for name in ROWS],
)
def test_trains_as_the_table_says(name: str) -> None:
    """Equal to a plain loop in every bit, or but for rounding, or refused, as is written down."""
    found = row_of(ARCHITECTURES[name], here=True)
    for form in ("as it is", "changed"):
        assert found.get(form, {}).get("verdict") == ROWS[name].get(form, {}).get("verdict"), found


def test_none_differs_in_silence() -> None:
    """Every architecture has been tried; those of the smoke test are among them."""
    assert set(SMOKE) <= set(ROWS)
    assert set(ROWS) == set(ARCHITECTURES)
    verdicts = {name: row["as it is"]["verdict"] for name, row in ROWS.items()}
    assert not {"differs", "failed"} & set(verdicts.values()), verdicts
