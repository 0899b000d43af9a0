"""A few architectures in every run of the tests, all others of the table where `long` runs."""

from __future__ import annotations

import json

import pytest
import torch

from pipeplan.errors import InputError
from pipeplan.task import Task
from tests.zoo.__main__ import FILE, row_of
from tests.zoo.catalog import ARCHITECTURES
from tests.zoo.trial import tried

ROWS: dict[str, dict] = json.loads(FILE.read_text(encoding="utf-8"))
"""What became of each architecture when it was tried last."""
SMOKE = (
    "graph convolution, sparse adjacency as buffer",
    "mixture of experts with a balance loss",
    "texts that the model tokenizes",
    "custom Function in the forward",
    "tied words and alibi",
)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in SMOKE else pytest.mark.long) for name in ROWS],
)
def test_trains_as_the_table_says(name: str) -> None:
    """Equal to a plain loop in every bit, or but for rounding, or refused, as is written down."""
    found = row_of(ARCHITECTURES[name], here=True)
    for form in ("as it is", "changed", "transmitted"):
        got, row = found.get(form, {}), ROWS[name].get(form, {})
        assert got.get("verdict") == verdict_here(row, got), found


def verdict_here(row: dict, found: dict) -> str | None:
    """The table's, but where the kernels of this machine let a model's layers round alone.

    A model that runs as for an export computes what the plain loop leaves out (a mask that masks
    nothing), so other kernels may run: on some machines the layers of one process round.
    """
    notes = found.get("notes", [])
    is_exported = any(note.startswith("the model runs as for an export") for note in notes)
    rounds = any(note.startswith("in one process layer by layer") for note in notes)
    verdict: str | None = row.get("verdict")
    return "rounding" if verdict == "equal" and is_exported and rounds else verdict


def test_a_setting_of_one_trial_is_none_of_the_next() -> None:
    """A task that switches the checks of distributions off does so for itself."""
    kind = torch.distributions.Distribution
    before = kind._validate_args

    def switching() -> Task:
        kind.set_default_validate_args(False)
        raise InputError("enough")

    assert tried(switching).verdict == "refused"
    assert kind._validate_args == before


def test_rounding_of_this_machine_is_told_from_a_runs() -> None:
    """Only where the layers of one process round, too, may a row that is equal round."""
    exported = "the model runs as for an export: in training it reads values"
    alone = "in one process layer by layer: 1.4e-07"
    equal, refused = {"verdict": "equal"}, {"verdict": "refused"}
    assert verdict_here(equal, {"notes": [exported, alone]}) == "rounding"
    for notes in ([exported], [alone], []):
        assert verdict_here(equal, {"notes": notes}) == "equal"
    assert verdict_here(refused, {"notes": [exported, alone]}) == "refused"
    assert verdict_here({}, {}) is None


def test_none_differs_in_silence() -> None:
    """Every architecture has been tried; those of the smoke test are among them."""
    assert set(SMOKE) <= set(ROWS)
    assert set(ROWS) == set(ARCHITECTURES)
    verdicts = {name: row["as it is"]["verdict"] for name, row in ROWS.items()}
    assert not {"differs", "failed"} & set(verdicts.values()), verdicts
