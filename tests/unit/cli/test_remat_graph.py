"""`pipeplan remat` of a graph of operators, and `pipeplan profile --operators`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from pipeplan.cli import remat, remat_graph
from pipeplan.cli.entry import main
from pipeplan.device_program import DeviceProgram
from pipeplan.operator_graph import OperatorGraph
from pipeplan.remat.graph import METHODS, solve
from pipeplan.remat.programs import judge, keep_all
from pipeplan.testing.joint_graphs import Gpt, gpt_graph
from pipeplan.testing.random_graphs import random_graph
from tests.unit.remat.graph.test_joins import UNEQUAL


@pytest.fixture(name="graph")
def _graph() -> OperatorGraph:
    return gpt_graph(Gpt(2, width=64, tokens=32))


@pytest.fixture(name="file")
def _file(graph: OperatorGraph, tmp_path: Path) -> Path:
    file = tmp_path / "graph.json"
    file.write_text(graph.to_json())
    return file


@pytest.fixture(name="few")
def _few(tmp_path: Path) -> tuple[OperatorGraph, Path]:
    """A graph whose programs are all known at once, as a file."""
    graph, file = random_graph(2, 4, 3), tmp_path / "few.json"
    file.write_text(graph.to_json())
    return graph, file


def words(file: Path, budget: int, *more: str) -> list[str]:
    """A command."""
    return ["remat", str(file), "--budget", str(budget), "--time-limit", "1s", *more]


def kept(graph: OperatorGraph) -> int:
    """Bytes of keeping everything."""
    return judge(graph, keep_all(graph)).peak_bytes


def test_methods_are_those_of_the_solver() -> None:
    """Help is written without the solver."""
    assert set(remat_graph.METHODS) == set(METHODS)


def test_branches_that_meet(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They are planned by their own method, and the call in Python names it."""
    file = tmp_path / "towers.json"
    file.write_text(UNEQUAL.to_json())
    assert main(words(file, 50, "--method", "join")) == 0
    printed = capsys.readouterr()
    assert re.match(r"join: .*; bound \S+ \S+, gap \d+\.\d%; peak", printed.out)
    assert re.search(r" s  join: \d+\.\d\d% over every operation once", printed.err)
    assert "budget=50, method='join'" in printed.err


def test_a_program_within_the_budget(
    graph: OperatorGraph,
    file: Path,
    few: tuple[OperatorGraph, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The judge says of the written program what the verb prints."""
    budget, program, picture = kept(graph) * 3 // 4, tmp_path / "p.txt", tmp_path / "p.svg"
    more = ["--json", "-o", str(program), "--picture", str(picture)]
    assert main(words(file, budget, *more)) == 0
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    outcome = judge(graph, DeviceProgram.from_text(program.read_text()), budget)
    assert outcome.violations == ()
    assert found["peak_bytes"] == outcome.peak_bytes <= budget
    assert found["makespan_ns"] == outcome.makespan_ns > found["compute_ns"]
    assert found["static_bytes"] == graph.static_bytes
    assert len(found["steps"]) == len(outcome.steps)
    assert "<svg" in picture.read_text()
    assert f"budget={budget}, method='operators'" in printed.err
    assert main(words(few[1], kept(few[0]))) == 0
    assert "over running every operation once" in capsys.readouterr().out


def test_a_curve_has_all_methods_side_by_side(
    few: tuple[OperatorGraph, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No method is faster than ours; a larger budget is never slower; the largest keeps all.

    Of a GPT: `unit/remat/graph/test_solve.py`.
    """
    graph, file = few
    picture = tmp_path / "curve.png"
    more = ["--curve", "4", "--curve-picture", str(picture), "--json"]
    assert main(words(file, kept(graph), *more)) == 0
    points: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["curve"]
    assert list(points[0]) == [
        "budget_bytes",
        "keep-all",
        "rotor",
        "rockmate",
        "auto",
        "least-memory",
    ]
    ours = [point["auto"] for point in points]
    assert ours == sorted(ours, reverse=True)
    assert points[-1]["keep-all"] == ours[-1] == graph.compute_ns
    assert points[0]["least-memory"] is not None
    for point in points:
        others = [point[name] for name in ("rotor", "rockmate", "least-memory")]
        assert all(other is None or point["auto"] <= other for other in others)
    assert picture.read_bytes()[:4] == b"\x89PNG"
    assert main(words(file, kept(graph), "--curve", "2")) == 0
    assert "least-memory" in capsys.readouterr().out


def test_ctrl_c_in_the_curve_keeps_the_plan_and_what_is_done(
    few: tuple[OperatorGraph, Path],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The plan is printed before the curve begins; as JSON both are one document."""
    graph, file = few
    before = "nothing"

    def pressed(problem: Any, budgets: Any, seconds: float, method: str) -> Any:
        nonlocal before
        if method == "rockmate":
            before = capsys.readouterr().out
            raise KeyboardInterrupt
        return solve(problem, budgets, seconds, method)

    monkeypatch.setattr("pipeplan.remat.graph.curve.solve", pressed)
    assert main(words(file, kept(graph), "--curve", "2")) == 0
    assert "over running every operation once" in before
    printed = capsys.readouterr()
    assert "rotor" in printed.out
    assert "interrupted: the curve lacks rockmate, auto, least-memory" in printed.err
    assert main(words(file, kept(graph), "--curve", "2", "--json")) == 0
    assert before == ""
    figures = json.loads(capsys.readouterr().out)
    assert list(figures["curve"][0]) == ["budget_bytes", "keep-all", "rotor"]


@pytest.mark.parametrize(
    ("more", "code", "said"),
    [
        (("--host-bandwidth", "12GB/s"), 2, "--host-bandwidth: got it with a graph of operators"),
        (("--slots", "20"), 2, "--slots: got it with a graph"),
        (
            ("--method", "pofo"),
            2,
            "--method: got pofo with a graph of operators, need one of auto",
        ),
        (("--curve-picture", "a.gif"), 2, "need a name that ends with"),
    ],
)
def test_what_means_nothing_for_a_graph_is_refused(
    more: tuple[str, ...], code: int, said: str, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the flag."""
    assert main(words(file, 10**6, *more)) == code
    assert said in capsys.readouterr().err


def test_a_budget_that_is_too_small_names_one_that_does(
    few: tuple[OperatorGraph, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """Which then has a program."""
    graph, file = few
    assert main(words(file, graph.static_bytes + 1)) in (3, 5)
    said = capsys.readouterr().err
    least = int(said.split("Give --budget ")[1].split(",")[0])
    assert main(words(file, least)) == 0


@pytest.mark.parametrize("method", ["auto", "checkmate"])
def test_a_broken_graph_is_told_as_such(
    method: str,
    few: tuple[OperatorGraph, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """By place, whatever the method: it was called a bug of pipeplan."""
    data = json.loads(few[1].read_text())
    changes: list[tuple[str, Any]] = [
        ("outputs", [len(data["storages"]) - 1]),
        ("operations", [data["operations"][0] | {"reads": [0, 1]}, *data["operations"][1:]]),
        ("operations", [data["operations"][0], *data["operations"]]),
    ]
    file = tmp_path / "broken.json"
    for field, value in changes:
        file.write_text(json.dumps(data | {field: value}))
        assert main(words(file, 1000, "--method", method)) == 2
        assert field in capsys.readouterr().err


def test_a_chain_knows_no_search_and_no_method_of_graphs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """By the flag."""
    example = str(Path(__file__).parents[3] / "examples" / "chain.json")
    assert main(["remat", example, "--budget", "8GiB", "--time-limit", "1s"]) == 2
    assert "--time-limit: got a chain" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["remat", example, "--budget", "8GiB", "--time-limit", "0s"])
    assert "--time-limit: time limit: got '0s', need more than 0" in capsys.readouterr().err
    assert main(["remat", example, "--budget", "8GiB", "--method", "rockmate"]) == 2
    assert f"need one of {', '.join(remat.METHODS)}" in capsys.readouterr().err


@pytest.mark.parametrize("mode", [(), ("--mode", "fake", "--device", "h100")])
def test_a_task_becomes_a_graph(
    mode: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With its loss, its optimizer's states, times; the next command is told."""
    file = tmp_path / "graph.json"
    task = "tests.short_networks:gpt2(size='tiny', batch=2, sequence=16)"
    assert main(["profile", task, "--operators", *mode, "--json", "-o", str(file)]) == 0
    printed = capsys.readouterr()
    graph = OperatorGraph.read(file)
    assert json.loads(printed.out)["operators"] == len(graph.operations)
    states = [each.bytes for each in graph.storages if each.kind == "optimizer state"]
    weights = sum(each.bytes for each in graph.storages if each.kind == "parameter")
    assert sum(states) >= 2 * weights
    assert graph.gradient_bytes == weights
    assert graph.compute_ns > 0
    assert len(graph.outputs) == 1
    assert f"pipeplan remat {file}" in printed.err


@pytest.mark.parametrize("flag", ["--warmup", "--companions", "--max-layers"])
def test_flags_of_layers_mean_nothing_for_operators(
    flag: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By name."""
    words = ["profile", "pipeplan.tasks:mlp", "--operators", flag, "1", "-o", str(tmp_path / "g")]
    assert main(words) == 2
    assert f"{flag}: got --operators" in capsys.readouterr().err
