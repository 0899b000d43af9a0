"""Tables and pictures say what the plan says, in units people read."""

from __future__ import annotations

import io
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from matplotlib.figure import Figure
from rich.console import Console

from pipeplan.chain import Layer, LayerOption, OperatorProgram
from pipeplan.cluster import Cluster, Gpu, Links, Pair
from pipeplan.errors import InputError
from pipeplan.plan import Bounds, Plan, Remat, Semantics, Solver
from pipeplan.report import gantt, tables
from pipeplan.report.remat import remat_shares
from pipeplan.units import format_ns
from pipeplan.verifier import audit
from tests import handmade_offload
from tests.handmade_split import one_gpu
from tests.samples import two_stages

if TYPE_CHECKING:
    from rich.table import Table


def text(table: Table) -> str:
    """The table as it prints."""
    out = io.StringIO()
    Console(file=out, width=120).print(table)
    return out.getvalue()


def test_memory_table_has_every_term_and_the_slack() -> None:
    """Peak, budget and slack of each GPU stand in one row; a negative slack keeps its sign."""
    lines = text(tables.memory_table(two_stages())).splitlines()
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if "gpu" in line]
    assert rows == [
        ["gpu0", "0", "0 B", "16 B", "8 B", "0 B", "8 B", "32 B", "1000 B", "968 B"],
        ["gpu1", "1", "0 B", "16 B", "8 B", "0 B", "8 B", "32 B", "20 B", "-12 B"],
    ]


def test_headline_names_the_bound_and_what_it_holds_for() -> None:
    """The gap is printed with the bound it is measured against, and with the solver's status."""
    solver = Solver(
        bounds=Bounds(any=(6, 1), k1=(7, 1)),
        gap=1 / 7,
        gap_bound="k1",
        contiguous_period_ns=(10, 1),
    )
    shown = text(tables.headline(two_stages().model_copy(update={"solver": solver})))
    assert (
        "7 ns per micro-batch: no plan with k = 1 has a shorter one; gap 14.29% (feasible)"
        in shown
    )
    assert "10 ns per micro-batch (+25.0%)" in shown


def test_headline_says_what_is_recomputed() -> None:
    """Runs, their GPU and what they take stand in one line per stage; without runs, no line."""
    plan = two_stages()
    assert "recomputed" not in text(tables.headline(plan))
    second = plan.stages[1].model_copy(update={"remat": Remat(recompute=((1, 1),))})
    shown = text(tables.headline(plan.model_copy(update={"stages": (plan.stages[0], second)})))
    took = format_ns(plan.chain.layers[1].forward_ns)
    lines = [line for line in shown.splitlines() if "recomputed" in line]
    assert [line.split(maxsplit=1)[1].strip() for line in lines] == [f"gpu1, layers 1: {took}"]


def test_headline_says_which_layers_run_programs() -> None:
    """Neighbours are a run of layers; what they take longer stands beside them."""
    plan = two_stages()
    layer = plan.chain.layers[1]
    option = LayerOption(program=0, forward_ns=layer.forward_ns, backward_ns=layer.backward_ns + 3)
    program = OperatorProgram(graph_digest="", text="")
    layers = (plan.chain.layers[0], layer.model_copy(update={"options": (option,)}))
    chain = plan.chain.model_copy(update={"layers": layers, "programs": (program,)})
    second = plan.stages[1].model_copy(update={"remat": Remat(programs=((1, 0),))})
    plan = plan.model_copy(update={"chain": chain, "stages": (plan.stages[0], second)})
    shown = [" ".join(line.split()) for line in text(tables.headline(plan)).splitlines()]
    assert "device programs gpu1, layers 1: 3 ns" in shown
    assert remat_shares(plan)[1].recomputed == "programs of 1: 3 ns"


def test_headline_says_whose_backward_is_split() -> None:
    """One line with the layers, only for a plan that has I and W."""
    assert "split" not in text(tables.headline(two_stages()))
    shown = " ".join(text(tables.headline(one_gpu())).split())
    assert "split backward of layers 1-2: gradients of weights apart, later" in shown


def test_headline_says_what_is_offloaded() -> None:
    """Runs, bytes and how many micro-batches, stage by stage; then what the host has to hold."""
    for plan, lines in (
        (
            handmade_offload.two_copies([0]),
            [
                "offloaded gpu0, layers 0-1: 13 B of 1 in 2 micro-batches",
                "host memory 26 B of 9.77 KiB",
            ],
        ),
        (
            handmade_offload.two_gpus(),
            [
                "offloaded gpu0, layers 0-1: 11 B per micro-batch",
                "offloaded gpu1, layers 2-3: 10 B per micro-batch",
                "host memory 53 B of 53 B",
            ],
        ),
    ):
        shown = text(tables.headline(plan)).splitlines()
        assert [" ".join(line.split()) for line in shown if line[:4] in ("offl", "host")] == lines


def test_headline_names_the_layer_whose_input_is_offloaded() -> None:
    """Beside runs of layers, and alone."""
    plan = handmade_offload.entering()
    alone = plan.stages[1].model_copy(update={"remat": Remat(offload_input=True)})
    for each, line in (
        (plan, "offloaded gpu0, layers 1-2, input of layer 1: 20 B per micro-batch"),
        (
            plan.model_copy(update={"stages": (plan.stages[0], alone)}),
            "offloaded gpu0, input of layer 1: 7 B per micro-batch",
        ),
    ):
        assert line in " ".join(text(tables.headline(each)).split())


def test_memory_table_has_the_hosts_bytes_where_there_are_any() -> None:
    """One more column, only for a plan that offloads."""
    shown = text(tables.memory_table(handmade_offload.two_gpus()))
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in shown.splitlines()]
    assert [row[-1] for row in rows if row[:1] and row[0].startswith("gpu")] == ["33 B", "20 B"]
    assert "host" not in text(tables.memory_table(two_stages()))


def test_machines_line_names_the_host() -> None:
    """Its memory and rate stand behind the links; without a host there is no word of it."""
    line = tables.machines_line(handmade_offload.two_gpus().cluster)
    assert line.endswith("host of 53 B at 6.00 GB/s per GPU, full duplex")
    assert "host" not in tables.machines_line(two_stages().cluster)


def test_headline_says_that_times_are_estimates() -> None:
    """Estimated times are called so wherever a plan is shown; measured ones need no words."""
    plan = two_stages()
    chain = plan.chain.model_copy(update={"mode": "estimated", "source": "estimated for x"})
    shown = text(tables.headline(plan.model_copy(update={"chain": chain})))
    assert "estimates, nothing was measured: estimated for x" in shown
    assert "estimates" not in text(tables.headline(plan))


def test_headline_without_a_bound_says_so() -> None:
    """Nothing proven is said, not left out."""
    assert "none proven" in text(tables.headline(two_stages()))


def test_throughput_counts_whole_steps() -> None:
    """Eight micro-batches of one sample in a step of 64 ns are 1/8 sample per ns."""
    assert tables.samples_per_second(two_stages()) == pytest.approx(0.125e9)


def test_bound_is_the_one_the_gap_uses() -> None:
    """`gap_bound` chooses among the bounds."""
    solver = Solver(bounds=Bounds(any=(6, 1), k1=(15, 2)), gap=0.1, gap_bound="k1")
    assert tables.plan_bound(two_stages().model_copy(update={"solver": solver})) == Fraction(15, 2)


@pytest.mark.parametrize(
    ("predicted", "measured", "error"),
    [(100, 110, 0.1), (100, 90, -0.1), (0, 0, 0.0), (0, 5, None)],
)
def test_error_is_relative_to_the_prediction(
    predicted: float, measured: float, error: float | None
) -> None:
    """The error is signed and relative to what was predicted; there is none to nothing."""
    comparison = tables.PredictedMeasured("period", "ns", predicted, measured)
    assert comparison.error == pytest.approx(error)


def test_comparison_table_uses_each_rows_unit() -> None:
    """Times and sizes stand in one table, each in its unit."""
    rows = [
        tables.PredictedMeasured("period", "ns", 2e6, 3e6),
        tables.PredictedMeasured("peak of rank 0", "bytes", 2048, 2048),
    ]
    shown = text(tables.comparison_table(rows, "run"))
    assert "2 ms" in shown
    assert "+50.00%" in shown
    assert "2.00 KiB" in shown
    assert "+0.00%" in shown


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_picture_is_repeatable(tmp_path: Path, ending: str) -> None:
    """The same plan gives the same picture, byte for byte."""
    files = [tmp_path / f"{name}.{ending}" for name in ("one", "two")]
    for file in files:
        gantt.draw_gantt(two_stages(), file)
    assert files[0].read_bytes() == files[1].read_bytes()
    assert files[0].stat().st_size > 1000


def test_picture_shows_each_op_and_splits_the_wrapping_one() -> None:
    """Every op is one bar; the one that crosses the period's end is two, of two micro-batches."""
    axes = gantt.gantt_figure(two_stages()).axes[0]
    assert len(axes.patches) == 6 + 1
    assert sorted(text.get_text() for text in axes.texts) == [
        *("0B0", "0F1", "0F1", "1B0", "1B0", "1B1", "1F1")
    ]
    assert [tick.get_text() for tick in axes.get_yticklabels()] == ["gpu0", "gpu1", "0>1", "1>0"]


def test_picture_of_a_split_backward(tmp_path: Path) -> None:
    """Both halves are labelled, the title says what they are."""
    gantt.draw_gantt(one_gpu(), tmp_path / "plan.svg")
    drawn = (tmp_path / "plan.svg").read_text()
    assert all(f"<!-- {label} -->" in drawn for label in ("1I0", "1W0"))
    assert "one step" in drawn
    assert "W + of weights" in drawn


def test_picture_in_an_unknown_format_is_refused(tmp_path: Path) -> None:
    """A wrong ending is an input error, not a traceback."""
    with pytest.raises(InputError, match=r"plan\.xyz"):
        gantt.draw_gantt(two_stages(), tmp_path / "plan.xyz")


def test_ctrl_c_leaves_the_picture_that_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new one appears when it is drawn."""
    file = tmp_path / "plan.svg"
    gantt.draw_gantt(two_stages(), file)
    before = file.read_bytes()

    def interrupted(figure: Figure, target: object, **_: object) -> None:
        if isinstance(target, str):
            Path(target).write_text("half")
        raise KeyboardInterrupt

    monkeypatch.setattr(Figure, "savefig", interrupted)
    with pytest.raises(KeyboardInterrupt):
        gantt.draw_gantt(two_stages(), file)
    assert file.read_bytes() == before


@pytest.mark.parametrize("semantics", ["2bw", "flush"])
def test_memory_curves_reach_the_peaks_of_the_model(semantics: Semantics) -> None:
    """The picture's largest value of each GPU is the peak that the verifier derives."""
    plan = two_stages(semantics=semantics)
    curves = gantt.memory_curves(plan)
    assert [max(held for _, held in curve) for curve in curves] == [
        row.peak_bytes for row in audit(plan).memory
    ]
    assert all(curve[0][0] == 0 and curve[-1][0] == plan.period_ns for curve in curves)


def test_a_plan_that_cannot_be_replayed_has_a_picture_without_memory() -> None:
    """A broken plan can still be looked at."""
    plan = two_stages()
    late = plan.ops[2].model_copy(update={"start_ns": 0})
    broken = plan.model_copy(update={"ops": (*plan.ops[:2], late, *plan.ops[3:])})
    assert gantt.memory_curves(broken) == []
    assert len(gantt.gantt_figure(broken).axes) == 1


def test_machines_line_shows_units_that_were_mistaken() -> None:
    """Bytes for GiB and bytes for GB catch the eye: each kind of GPU and the rate are shown."""
    slow = Gpu(name="b", memory_bytes=16 * 2**30, speed=0.5)
    gpus = (Gpu(name="a", memory_bytes=16), slow, slow)
    links = Links(bandwidth_bytes_per_s=12, pairs=(Pair(source=0, target=1),))
    line = tables.machines_line(Cluster(gpus=gpus, links=links))
    assert line == (
        "3 GPUs of 16 B or 16.00 GiB at speed 0.5, latency 0 ns, 12 B/s, 1 of the links differ,"
        " 0 ns overhead per action"
    )


def _named(names: list[tuple[str, ...]], tied: str = "colocate") -> Plan:
    """A plan on two GPUs for layers with these parameters."""
    plan = two_stages()
    layers = tuple(
        Layer(name=str(index), forward_ns=2, backward_ns=4, output_bytes=8, parameters=found)
        for index, found in enumerate(names)
    )
    chain = plan.chain.model_copy(update={"layers": layers, "tied": tied})
    return plan.model_copy(update={"chain": chain})


def test_headline_tells_what_keeps_layers_together() -> None:
    """Layers apart that share weights have one line each set; neighbours and copies have none."""
    plan = _named([("w", "v"), ("u",), ("w", "v", "x"), ("x",)])
    lines = [line for line in text(tables.headline(plan)).splitlines() if "share" in line]
    assert [line.split()[:6] for line in lines] == [["tied", "layers", "0,", "2", "share", "w,"]]
    assert "share" not in text(tables.headline(_named([("w",), ("u",), ("w",)], "synchronize")))


def test_headline_tells_of_pins_and_what_the_bound_is_about() -> None:
    """Pinned layers stand as runs beside their GPU, and the bound says that it keeps them."""
    solver = Solver(bounds=Bounds(any=(6, 1)), gap=1 / 3, pins=((0, 1), (1, 1), (3, 1), (2, 0)))
    plan = _named([(), (), (), ()]).model_copy(update={"solver": solver})
    shown = [" ".join(line.split()) for line in text(tables.headline(plan)).splitlines()]
    assert [line for line in shown if line.startswith("pinned")] == [
        "pinned layer 2 to gpu0",
        "pinned layers 0-1, 3 to gpu1",
    ]
    assert any("no plan with these pins has a shorter one" in line for line in shown)


def test_headline_tells_of_which_steps_the_bound_is() -> None:
    """A step of more micro-batches may keep more of them in flight."""
    solver = Solver(bounds=Bounds(any=(6, 1)), gap=1 / 3, most_microbatches=2)
    shown = " ".join(
        text(tables.headline(_named([()]).model_copy(update={"solver": solver}))).split()
    )
    assert "no plan with at most 2 micro-batches per step has a shorter one" in shown
