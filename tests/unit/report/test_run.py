"""A run's report: times from timed runs, bytes from instrumented ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pipeplan.cli import main
from pipeplan.errors import InputError
from pipeplan.report.run import comparisons, read


def write_run(
    folder: Path, *, instrumented: bool, promised: dict[str, Any] | None = None, **measured: Any
) -> Path:
    """The folder of a run of two ranks whose plan promises 100 ns and 10 and 20 bytes."""
    folder.mkdir()
    content = {
        "format": "pipeplan-run/1",
        "semantics": "flush",
        "steps": 3,
        "instrumented": instrumented,
        "seed": 0,
        "predicted": {"period_ns": 100, "step_ns": 1000, "peak_bytes": [10, 20]}
        | (promised or {}),
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
        ("flush: period, best four in a row", 100, 110, "ns"),
        ("flush: step, best", 1000, 900, "ns"),
        ("flush: peak of rank 0", 10, 10, "bytes"),
        ("flush: peak of rank 1", 20, 19, "bytes"),
    ]


def test_what_allocators_took_stands_beside_the_plan(tmp_path: Path) -> None:
    """Of runs on GPUs, timed ones too; runs of before and on processors tell nothing of it."""
    sizes = {"allocated_bytes": [11, 21], "reserved_bytes": [16, None]}
    on_gpus = read(write_run(tmp_path / "gpus", instrumented=False, **sizes))
    nothing = {"allocated_bytes": [None, None], "reserved_bytes": [None, None]}
    on_cpu = read(write_run(tmp_path / "cpu", instrumented=False, **nothing))
    rows = [row for row in comparisons([on_gpus, on_cpu]) if row.unit == "bytes"]
    assert [(row.name, row.predicted, row.measured) for row in rows] == [
        ("flush: allocated on rank 0", 10, 11),
        ("flush: reserved on rank 0", 10, 16),
        ("flush: allocated on rank 1", 20, 21),
    ]
    with pytest.raises(InputError, match=r"measured\.reserved_bytes: got 1 numbers, need 2"):
        read(write_run(tmp_path / "torn", instrumented=False, reserved_bytes=[1]))


def test_estimated_predictions_are_called_so(tmp_path: Path) -> None:
    """A plan made of estimated times does not pass for one made of measured ones."""
    folder = write_run(tmp_path / "timed", instrumented=False)
    content = json.loads((folder / "run.json").read_text())
    content["predicted"]["times"] = "estimated"
    (folder / "run.json").write_text(json.dumps(content))
    names = [row.name for row in comparisons([read(folder)])]
    assert names == [
        "flush: period, best four in a row, predicted by an estimate",
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
    promised = {"period_ns": 0, "step_ns": 1000, "peak_bytes": [10, 20]}
    free = str(write_run(tmp_path / "free", instrumented=False, promised=promised))
    assert main(["report", free]) == 0
    assert main(["report", free, "--json"]) == 0
    text = capsys.readouterr().out
    assert '"error": null' in text
    assert "Infinity" not in text


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
    assert main(["report", str(tmp_path / "run.json")]) == 2
    assert "shown by pipeplan show" in capsys.readouterr().err
    assert main(["report", str(tmp_path)]) == 2
    assert "run.json" in capsys.readouterr().err


LESS = {
    "host_bytes": [0, 26],
    "stages": [
        {
            "gpu": 0,
            "layers": [0, 2],
            "recompute": [[0, 0], [2, 2]],
            "again_ns": 7,
            "programs": [],
            "programs_ns": 0,
        }
        | {
            "offload": [],
            "offload_input": False,
            "offload_bytes": 0,
            "offloaded": [0, 2],
            "states_bytes": 0,
        },
        {
            "gpu": 1,
            "layers": [3, 4],
            "recompute": [],
            "again_ns": 0,
            "programs": [],
            "programs_ns": 0,
        }
        | {
            "offload": [[3, 4]],
            "offload_input": False,
            "offload_bytes": 13,
            "offloaded": [1, 2],
            "states_bytes": 0,
        },
    ],
}
"""What run.json says of two stages that keep less than everything."""


def rows(out: str) -> list[list[str]]:
    """The cells of each row of a printed table of stages."""
    lines = [line.split("│")[1:-1] for line in out.splitlines()]
    return [[cell.strip() for cell in line] for line in lines if len(line) == 8]


def test_stages_that_keep_less_stand_beside_the_bytes_of_their_rank(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is computed again or offloaded, predicted peak, measured peak, bytes on the host."""
    timed = str(write_run(tmp_path / "timed", instrumented=False, promised=LESS))
    counted = str(write_run(tmp_path / "counted", instrumented=True, promised=LESS))
    first = ["0", "0", "0-2", "0, 2: 7 ns", "-", "10 B"]
    second = ["1", "1", "3-4", "-", "3-4: 13 B of 1 in 2 micro-batches", "20 B"]
    for runs, measured in (([timed], ("-", "-")), ([timed, counted], ("10 B", "19 B"))):
        assert main(["report", *runs]) == 0
        need = [[*first, measured[0], "0 B"], [*second, measured[1], "26 B"]]
        assert rows(capsys.readouterr().out) == need
    plain = str(write_run(tmp_path / "plain", instrumented=True))
    assert main(["report", plain]) == 0
    assert "recomputed" not in capsys.readouterr().out


def test_peaks_come_with_their_stages_as_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A machine reads which stages a rank's peak is of."""
    counted = str(write_run(tmp_path / "counted", instrumented=True, promised=LESS))
    assert main(["report", counted, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [row["stages"] for row in told] == [[LESS["stages"][0]], [LESS["stages"][1]]]


@pytest.mark.parametrize(
    ("promised", "word"),
    [
        ({"peak_bytes": [10]}, "measured.peak_bytes"),
        ({"host_bytes": [1]}, "predicted.host_bytes"),
        ({"stages": [{"gpu": 2, "layers": [0, 0]}]}, "predicted.stages[0].gpu"),
    ],
)
def test_numbers_of_other_ranks_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], promised: dict[str, Any], word: str
) -> None:
    """A run.json whose lists do not fit together is bad input, not a traceback."""
    folder = write_run(tmp_path / "run", instrumented=True, promised=promised)
    assert main(["report", str(folder)]) == 2
    assert word in capsys.readouterr().err


@pytest.mark.parametrize(
    ("host", "told"),
    [
        ({"cores": 2, "ranks": 4, "device": "cpu"}, True),
        ({"cores": 4, "ranks": 4, "device": "cpu"}, False),
        ({"cores": 2, "ranks": 4, "device": "cuda"}, False),
        ({"cores": 2}, False),
    ],
)
def test_times_of_ranks_that_shared_cores_are_called_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], host: dict[str, Any], told: bool
) -> None:
    """Below the table, where ranks on the processor outnumber its cores."""
    folder = write_run(tmp_path / "timed", instrumented=False)
    content = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps(content | {"host": host}))
    assert main(["report", str(folder)]) == 0
    assert ("4 ranks shared 2 cores" in capsys.readouterr().out) is told
