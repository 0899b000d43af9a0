"""A run's report: times from timed runs, bytes from instrumented ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pipeplan.cli import main
from pipeplan.report.run import comparisons, read


def write_run(folder: Path, *, instrumented: bool, **measured: Any) -> Path:
    """The folder of a run of two ranks whose plan promises 100 ns and 10 and 20 bytes."""
    folder.mkdir()
    content = {
        "format": "pipeplan-run/1",
        "semantics": "flush",
        "steps": 3,
        "instrumented": instrumented,
        "seed": 0,
        "predicted": {"period_ns": 100, "step_ns": 1000, "peak_bytes": [10, 20]},
        "measured": {
            "period_ns": 110.0,
            "step_ns": 900,
            "median_period_ns": 120.0,
            "peak_bytes": [10, 19] if instrumented else [None, None],
            "first_loss": 5.0,
            "last_loss": 4.0,
            **measured,
        },
    }
    (folder / "run.json").write_text(json.dumps(content))
    return folder


def test_times_come_from_timed_runs_and_bytes_from_instrumented_ones(tmp_path: Path) -> None:
    """Counting bytes slows a run, so its times are not reported; a timed run counts no bytes."""
    timed = read(write_run(tmp_path / "timed", instrumented=False))
    counted = read(write_run(tmp_path / "counted", instrumented=True))
    rows = comparisons([timed, counted])
    assert [(row.name, row.predicted, row.measured, row.unit) for row in rows] == [
        ("flush: period, best window", 100, 110, "ns"),
        ("flush: step, best", 1000, 900, "ns"),
        ("flush: peak of rank 0", 10, 10, "bytes"),
        ("flush: peak of rank 1", 20, 19, "bytes"),
    ]


def test_estimated_predictions_are_called_so(tmp_path: Path) -> None:
    """A plan made of estimated times does not pass for one made of measured ones."""
    folder = write_run(tmp_path / "timed", instrumented=False)
    content = json.loads((folder / "run.json").read_text())
    content["predicted"]["times"] = "estimated"
    (folder / "run.json").write_text(json.dumps(content))
    names = [row.name for row in comparisons([read(folder)])]
    assert names == [
        "flush: period, best window, predicted by an estimate",
        "flush: step, best, predicted by an estimate",
    ]


def test_report_prints_one_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The verb prints predicted, measured and signed error, as text and as JSON."""
    folder = str(write_run(tmp_path / "timed", instrumented=False))
    assert main(["report", folder]) == 0
    assert "+10.00%" in capsys.readouterr().out
    assert main(["report", folder, "--json"]) == 0
    errors = [row["error"] for row in json.loads(capsys.readouterr().out)]
    assert errors == pytest.approx([0.1, -0.1])


def test_a_run_too_short_to_measure_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing measured is an answer of its own, not an empty table."""
    folder = write_run(tmp_path / "short", instrumented=False, period_ns=None, step_ns=None)
    assert main(["report", str(folder)]) == 2
    assert "more steps" in capsys.readouterr().err


def test_a_folder_without_a_run_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A missing or broken run.json is one line that names it."""
    assert main(["report", str(tmp_path)]) == 2
    assert "run.json" in capsys.readouterr().err
    (tmp_path / "run.json").write_text('{"format": "pipeplan-run/2"}')
    assert main(["report", str(tmp_path)]) == 2
    assert "run.json" in capsys.readouterr().err
