"""The planning verbs end to end, without torch: import, plan, show, verify, simulate."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from pipeplan.calibrate import here
from pipeplan.chain import Chain, Layer
from pipeplan.cli import main
from pipeplan.cluster import Cluster, Host, uniform
from pipeplan.plan import Plan

LINKS = ["--bandwidth", "inf"]


@pytest.fixture
def chain_file(tmp_path: Path) -> Path:
    """Layers of total time 3, 6, 3 ms; states and saved bytes of 100 and 1000 each."""
    file = tmp_path / "chain.json"
    layers = tuple(
        Layer(
            name=f"layer{index}",
            forward_ns=unit * 10**6,
            backward_ns=2 * unit * 10**6,
            weight_bytes=100,
            gradient_bytes=100,
            output_bytes=10,
            saved_bytes=1000,
        )
        for index, unit in enumerate((1, 2, 1))
    )
    file.write_text(Chain(name="three", input_bytes=10, layers=layers).to_json())
    return file


def plan(chain: Path, out: Path, *more: str) -> int:
    """`pipeplan plan` with the flags that every test needs."""
    return main(["plan", str(chain), "-o", str(out), "--time-limit", "20s", *more])


def test_planning_gives_a_verified_plan_and_says_so(
    chain_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The plan is saved, shown with bound and gap, verified, replayed; progress is on stderr."""
    out = tmp_path / "plan.json"
    assert plan(chain_file, out, "--gpus", "2", "--memory", "1MB", *LINKS) == 0
    shown, progress = capsys.readouterr()
    for words in ("one period", "bound", "gap", "contiguous", "slack", "verified", "replayed"):
        assert words in shown
    assert "best" in progress
    assert "micro-batches of" not in progress  # is said where there are several sizes
    assert f"next: pipeplan simulate {out}" in progress
    made = Plan.read(out)
    assert [gpu.memory_bytes for gpu in made.cluster.gpus] == [10**6, 10**6]
    assert made.chain == Chain.read(chain_file)
    assert main(["verify", str(out)]) == 0
    assert main(["simulate", str(out)]) == 0
    spaced = out.rename(tmp_path / "my plan.json")
    assert main(["verify", str(spaced)]) == 0
    assert f"next: pipeplan simulate '{spaced}'" in capsys.readouterr().err


def test_flags_reach_the_plan(chain_file: Path, tmp_path: Path) -> None:
    """Semantics, micro-batches, links, memory model, k and seed are what was asked for."""
    out = tmp_path / "plan.json"
    flags = ["--gpus", "2", "--memory", "1MB", "--bandwidth", "1kB/s", "--latency", "10us"]
    flags += ["--duplex", "half", "--semantics", "flush", "--microbatches", "6", "--k", "1"]
    flags += ["--memory-model", "paper", "--method", "contiguous", "--seed", "3"]
    assert plan(chain_file, out, *flags, "--workers", "1", "--deterministic") == 0
    made = Plan.read(out)
    assert (made.semantics, made.microbatches, made.k) == ("flush", 6, 1)
    assert made.memory_model == "paper"
    links = made.cluster.links
    assert (links.duplex, links.latency_ns, links.bandwidth_bytes_per_s) == ("half", 10_000, 1000)
    assert (made.solver.seed, made.solver.method) == (3, "contiguous")


def test_cluster_file_replaces_the_machine_flags(
    chain_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--cluster` is enough; a machine flag beside it is refused, with its name."""
    machines = tmp_path / "cluster.json"
    machines.write_text(uniform(2, 10**6).to_json())
    out = tmp_path / "plan.json"
    for flag in (["--gpus", "2"], ["--memory", "1"], LINKS, ["--latency", "1us"]):
        assert plan(chain_file, out, "--cluster", str(machines), *flag) == 2
        assert flag[0] in capsys.readouterr().err
    assert plan(chain_file, out, "--cluster", str(machines)) == 0
    assert Plan.read(out).cluster == uniform(2, 10**6)


def test_the_host_flags_allow_offloading(
    chain_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They are the plan's host; what is missing or twice is named."""
    out, asked = tmp_path / "plan.json", ["--offload", "auto", "--gpus", "2", *LINKS]
    memory, rate = ["--host-memory", "1GiB"], ["--host-bandwidth", "1MB/s"]
    flags = [*asked, "--memory", "1MB", *memory, *rate, "--host-duplex", "half"]
    assert plan(chain_file, out, *flags) == 0
    host = Plan.read(out).cluster.host
    assert host == Host(memory_bytes=2**30, bandwidth_bytes_per_s=10**6, duplex="half")
    for more, words in (
        ([], "got auto for a cluster without a host"),
        (rate, "got --host-bandwidth alone, need --host-memory too"),
        ([*memory, "--host-bandwidth", "inf"], "got --host-bandwidth inf, need a rate"),
    ):
        capsys.readouterr()
        assert plan(chain_file, out, *asked, "--memory", "1MB", *more, "--force") == 2
        assert words in capsys.readouterr().err
    file = tmp_path / "cluster.json"
    file.write_text(uniform(2, 10**6).to_json())
    assert plan(chain_file, out, "--cluster", str(file), *rate, "--force") == 2
    assert "got --host-bandwidth beside --cluster" in capsys.readouterr().err


def test_missing_machine_flags_are_named(
    chain_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing about the machines is guessed: what is missing is asked for."""
    assert plan(chain_file, tmp_path / "plan.json", "--gpus", "2") == 2
    assert "need --memory, --bandwidth too" in capsys.readouterr().err


def test_infeasible_is_code_3_with_the_bytes(
    chain_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where no plan exists, the message says what is too big and by how many bytes."""
    out = tmp_path / "plan.json"
    assert plan(chain_file, out, "--gpus", "2", "--memory", "1200", *LINKS) == 3
    assert "1200" in capsys.readouterr().err
    assert not out.exists()


def test_an_existing_plan_is_kept(
    chain_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither a file nor a wrong folder is noticed only after the search."""
    out = tmp_path / "plan.json"
    out.write_text("mine")
    flags = ["--gpus", "2", "--memory", "1MB", *LINKS]
    assert plan(chain_file, out, *flags) == 2
    assert "--force" in capsys.readouterr().err
    assert out.read_text() == "mine"
    assert plan(chain_file, tmp_path / "no" / "plan.json", *flags) == 2
    assert plan(chain_file, out, *flags, "--force") == 0
    assert Plan.read(out).k >= 1


def test_json_is_one_document(
    chain_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With `--json`, stdout holds the figures and nothing else."""
    out = tmp_path / "plan.json"
    assert plan(chain_file, out, "--gpus", "2", "--memory", "1MB", *LINKS, "--json") == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["plan"] == str(out)
    assert figures["period_per_microbatch_ns"] >= figures["bound_ns"]
    assert len(figures["memory"]) == 2


def test_a_plan_goes_through_pipes(
    chain_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`-o -` writes the plan itself to stdout and nothing else."""
    flags = ["--gpus", "2", "--memory", "1MB", *LINKS]
    assert main(["plan", str(chain_file), "-o", "-", *flags]) == 0
    assert len(Plan.from_json(capsys.readouterr().out).cluster.gpus) == 2


@pytest.mark.parametrize("clock", ["plan", "eager"])
def test_simulate_writes_a_trace(
    chain_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], clock: str
) -> None:
    """The trace has every compute of every micro-batch once; the figures are the plan's."""
    out, trace = tmp_path / "plan.json", tmp_path / "trace.json"
    assert plan(chain_file, out, "--gpus", "2", "--memory", "1MB", *LINKS, "--k", "1") == 0
    capsys.readouterr()
    command = ["simulate", str(out), "--clock", clock, "--microbatches", "30", "--json"]
    assert main([*command, "--trace", str(trace)]) == 0
    figures = json.loads(capsys.readouterr().out)
    made = Plan.read(out)
    assert figures["microbatches"] == 30
    assert figures["period_ns"] <= made.period_ns
    assert figures["peak_bytes"] == [row.peak_bytes for row in made.memory]
    assert main([*command, "--trace", "-"]) == 0
    assert capsys.readouterr().out == trace.read_text()
    events = json.loads(trace.read_text())["traceEvents"]
    names = [each["name"] for each in events if each.get("cat") == "compute"]
    stages = range(len(made.stages))
    assert sorted(names) == sorted(
        f"PP:{s}{d}{m}" for s in stages for d in "FB" for m in range(30)
    )


def test_simulate_refuses_a_plan_that_claims_too_little(
    chain_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A peak lowered by one byte is found by the replay, and the code is 4."""
    out = tmp_path / "plan.json"
    assert plan(chain_file, out, "--gpus", "2", "--memory", "1MB", *LINKS) == 0
    data = json.loads(out.read_text())
    data["memory"][0]["peak_bytes"] -= 1
    out.write_text(json.dumps(data))
    capsys.readouterr()
    assert main(["simulate", str(out)]) == 4
    assert "GPU 0, peak_bytes" in capsys.readouterr().err
    out.write_text(json.dumps(data | {"memory": []}))
    assert main(["simulate", str(out)]) == 4
    assert "memory, plan: got 0, the replay has 2 rows" in capsys.readouterr().err


def test_import_csv_and_refuse_what_does_not_belong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A table of layers becomes a chain; a flag of the other format is refused."""
    table, out = tmp_path / "layers.csv", tmp_path / "chain.json"
    table.write_text("name,forward_ms,backward_ms,output_bytes\na,1,2,8\nb,1.5,3,8\n")
    command = ["import", str(table), "-o", str(out), "--input-bytes", "1KiB"]
    assert main([*command, "--format", "pipedream"]) == 2
    assert "--input-bytes" in capsys.readouterr().err
    assert main([*command, "--format", "csv", "--microbatch-size", "4"]) == 0
    chain = Chain.read(out)
    assert (chain.name, chain.input_bytes, chain.microbatch_size) == ("layers", 1024, 4)
    assert [layer.forward_ns for layer in chain.layers] == [10**6, 15 * 10**5]
    assert "2 layers" in capsys.readouterr().out


def test_planning_needs_no_torch(chain_file: Path, tmp_path: Path) -> None:
    """With torch made unimportable, plan, show, verify and simulate work."""
    out = tmp_path / "plan.json"
    code = f"""
import sys
class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "transformers"):
            raise ImportError(f"{{name}} is blocked")
sys.meta_path.insert(0, NoTorch())
from pipeplan.cli import main
chain, out = {str(chain_file)!r}, {str(out)!r}
machines = ["--gpus", "2", "--memory", "1MB", "--bandwidth", "inf"]
assert main(["plan", chain, *machines, "-o", out]) == 0
assert main(["show", out, "--svg", out + ".svg"]) == 0
assert main(["verify", out]) == 0
assert main(["simulate", out]) == 0
assert "torch" not in sys.modules
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_calibrate_saves_what_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ranks and memory reach the measurement; its cluster is saved and summed up in a line."""
    asked: list[tuple[int, int]] = []

    def measure_here(ranks: int, memory_bytes: int) -> Cluster:
        asked.append((ranks, memory_bytes))
        return uniform(ranks, memory_bytes, bandwidth_bytes_per_s=2 * 10**9, latency_ns=70_000)

    monkeypatch.setattr(here, "measure_here", measure_here)
    out = tmp_path / "cluster.json"
    assert main(["calibrate", "--ranks", "3", "--memory", "1KiB", "-o", str(out)]) == 0
    assert asked == [(3, 1024)]
    assert Cluster.read(out) == measure_here(3, 1024)
    shown = capsys.readouterr().out
    assert "3 GPUs of 1.00 KiB, latency 70 us, 2.00 GB/s" in shown


def test_simulating_less_than_a_period_says_so(
    chain_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where no steady period is reached a line says why peaks lie below the plan's."""
    file = tmp_path / "plan.json"
    assert plan(chain_file, file, "--gpus", "2", "--memory", "1MB", *LINKS) == 0
    assert "machines: 2 GPUs of 976.56 KiB, " in capsys.readouterr().err
    for words, told in ((["--microbatches", "1"], True), ([], False)):
        assert main(["simulate", str(file), *words]) == 0
        assert ("too few micro-batches" in capsys.readouterr().err) is told


def test_show_lists_the_layers_of_a_chain(
    chain_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Number, name, times and bytes of each layer, and their sums; a picture of it is refused."""
    assert main(["show", str(chain_file)]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = [[cell.strip() for cell in line.split("\u2502")[1:-1]] for line in lines]
    table = [row for row in rows if len(row) == 7]
    assert table[1] == ["1", "layer1", "2 ms", "4 ms", "200 B", "1000 B", "10 B"]
    assert table[-1] == ["", "sum", "4 ms", "8 ms", "600 B", "2.93 KiB", ""]
    assert main(["show", str(chain_file), "--svg", str(tmp_path / "chain.svg")]) == 2
    assert "is a chain, need a plan to draw" in capsys.readouterr().err
