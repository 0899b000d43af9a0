"""The result pages of docs/results, from what the benchmarks have kept.

    python -m benchmarks.pages

measures nothing: it writes each page from a file of benchmarks/results. A test compares the pages
with what this makes. Every benchmark calls it when its file has changed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from benchmarks import ablation as ablation_rows
from benchmarks import (
    compare_pages,
    dynamic_programs,
    hierarchies,
    hierarchy_figures,
    host_states,
    layer_options,
    measured_curves,
    offmate,
    on_gpu_pages,
    one_device,
    operator_graph_pages,
    operator_grids,
    option_times,
    paper_figure_pages,
    peers,
    planner_summary,
    resnet_bytes,
    runtime_pages,
    side_by_side,
    step_times,
    tied_bits,
    zoo,
)
from benchmarks import joint as joint_rows
from benchmarks import operators as operator_rows
from benchmarks import steps as step_rows
from benchmarks.markdown import bullets, table
from benchmarks.remat_pages import remat, rematerialized

RESULTS = Path(__file__).parent / "results"
FOLDER = Path(__file__).parents[1] / "docs" / "results"
README = Path(__file__).parents[1] / "README.md"
BEGIN, END = "<!-- measured -->", "<!-- end of measured -->"
"""What stands around the table of README.md."""
STEPS, END_OF_STEPS = "<!-- measured steps -->", "<!-- end of measured steps -->"
"""What stands around its sentence on steps."""
PICTURED = ("resnet18", "resnet34", "resnet50")
"""Networks of compare.md that have a picture and a table of their own."""


def planner(found: dict[str, Any]) -> Iterator[str]:
    """Our plans beside the bounds and everyone else."""
    rows = [each for each in found.values() if "planner" in each]
    yield "# The planner's plans and bounds"
    yield (
        "The command `python -m benchmarks.planner` measures these rows; everything takes hours on"
        " two cores. The chains are synthetic. Memory `f` is a share of what the best contiguous"
        " 1F1B plan needs without a limit. The gap is to the bound for any plan of any k. Rows"
        " were"
        " measured under different loads: the column `machine` has the load average, and a busy"
        " machine finds worse plans than a quiet one."
    )
    yield "## Summary"
    yield bullets(planner_summary.summary(rows))
    key = planner_summary.group_name
    for name, members in groupby(sorted(rows, key=key), key):
        yield f"## {name[0].upper()}{name[1:]}"
        yield "Periods in ms per micro-batch."
        yield table(planner_summary.COLUMNS, map(planner_summary.cells, members))


def joint(found: dict[str, Any]) -> Iterator[str]:
    """Recomputation and offloading decided with the cuts."""
    rows = [each["row"] for each in found.values() if "row" in each]
    yield "# Recomputation and offloading decided with the cuts"
    yield (
        "The command `python -m benchmarks.joint` measures these rows, 6 s for each of `none`,"
        " `joint` and `offload`, each from the plan of the one before. `f` is the share of the"
        " peak"
        " without a limit. `offload` is `joint` with a host: 12 GB/s each way for each GPU, and"
        " memory enough. k, S, the gaps and the seconds are those of `joint`. `gap` is above the"
        " load bound; `contiguous` is above the bound for contiguous plans without a host, which"
        " plans with several stages on a GPU may go below. Other jobs ran on the two cores."
    )
    yield "![period against memory per GPU](../img/joint.png)"
    yield "## Summary"
    yield bullets(joint_rows.summary(rows))
    for name, members in groupby(rows, lambda each: each["name"]):
        yield f"## {name}"
        yield "Periods in ms per micro-batch."
        yield table(joint_rows.COLUMNS, map(joint_rows.cells, members))


def ablation(found: dict[str, Any]) -> Iterator[str]:
    """What each strategy and prover is worth."""
    work = next(row["everything"]["work_s"] for row in found.values())
    yield "# What each strategy and prover of the solver is worth"
    yield (
        f"The command `python -m benchmarks.ablation` plans {len(found)} synthetic instances of"
        f" {min(row['everything']['layers'] for row in found.values())} to"
        f" {max(row['everything']['layers'] for row in found.values())} layers, {work:g} s of"
        " deterministic work each: with every strategy, and without each in turn. `no finder` has"
        " contiguous plans and bounds, `only` has one finder more (`--only-one`)."
        " `longer` is the geometric mean of the period without the strategy over the period with"
        " all, less one; a negative number says that plans are shorter without it. `worst` is the"
        " row that loses most. `bound lower` is the same for the bound. `proofs lost` counts the"
        " rows whose plan is shown to be shortest, or that no plan exists, with every strategy"
        " alone. `computes more` is the mean of what the ops of a micro-batch take, recomputation"
        " included, of the rows that say it. `best plans` counts the rows whose best plan, with"
        " every strategy, the strategy found."
    )
    yield (
        "Rows called `step` plan whole steps under flush, by one strategy; without it there is a"
        " periodic plan that is cut off after the step. Rows called `k=1` have one micro-batch per"
        " period, as the papers' models, and networks in a few groups of layers (`in 5`). In rows"
        " called `tied` the first and the last layer share a weight, so that one GPU has both."
    )
    yield (
        "One row's period depends on random numbers by up to 20 %: only means, and strategies that"
        " lose on many rows, say something. On rows with recomputation, all strategies of the"
        " search without recomputation run on contracted chains. What each strategy earns:"
        " `annealing`, the enumerations of few layers and the step searches shorten the mean by"
        " half a percent and more; `balancing`, `kfkb`, `interleaved starts`, the packing bound,"
        " `joint`, `recompute balancing` and `recompute annealing` shorten single rows by 4 % and"
        " more, each of them two rows or more by over 1 %; `joint` and the enumerations prove"
        " plans of few layers and of one micro-batch per period; the counting bound, the window"
        " bound and the recompute bound raise bounds, the last two of plans with one stage per"
        " GPU; `trim` takes back what a plan recomputes for nothing, which leaves its period as it"
        " is."
    )
    yield "## Table"
    yield table(ablation_rows.COLUMNS, ablation_rows.measured(found))
    yield "## Strategies that have left"
    yield (
        "Measured with the search of the day, which no command measures again"
        f" ([rows](../../benchmarks/results/{ablation_rows.LEFT.name})). Annealing with"
        " recomputation had left with the first of them, when its steps were Python; machine code"
        " makes them ten times as many."
    )
    left = json.loads(ablation_rows.LEFT.read_text(encoding="utf-8"))
    yield table(ablation_rows.COLUMNS, ablation_rows.measured_before(left))
    yield "## Instances"
    yield "Periods and bounds in ms per micro-batch, with every strategy."
    for mode, members in groupby(sorted(found.items(), key=_mode), _mode):
        yield f"### Rows of {mode}"
        yield table(
            ("instance", "layers", "period", "bound", "gap", "found by"),
            [_instance(*each) for each in members],
        )


def _mode(item: tuple[str, Any]) -> str:
    """What the instance asks for, behind the model of memory."""
    mode = item[0].partition(" exact ")[2]
    return "every layer kept" if mode == "none" else f"`{mode}`"


def _instance(name: str, row: dict[str, Any]) -> tuple[str, ...]:
    each = row["everything"]
    if "period_ns" not in each:
        return name, str(each["layers"]), "no plan", "-", "-", "-"
    period, bound = each["period_ns"], each["bound_ns"]
    by = next(strategy for _, strategy, known in each["history"] if known == period)
    return (
        name,
        str(each["layers"]),
        f"{period / 1e6:.3f}",
        "-" if bound is None else f"{bound / 1e6:.3f}",
        "-" if bound is None else f"{period / bound - 1:.1%}",
        by,
    )


def joint_runs(found: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Training of plans that recompute, in planned time."""
    yield "# Runs of plans that recompute"
    yield (
        "The command `python -m benchmarks.joint_runs` trains each plan on four processes whose"
        " ops"
        " sleep until their planned time is over and whose messages take the time of their link."
        " `segments` counts the recomputed segments. `equal`: weights bit-equal to one process."
        " `over`: most measured bytes / budget. `period`: predicted / measured. Other processes"
        " shared the two cores."
    )
    head = ("task", "f", "semantics", "segments", "equal", "peak, predicted / measured", "over")
    cells = (
        (
            each["task"],
            str(each["f"]),
            each["semantics"],
            str(each["runs"]),
            "yes" if each["equal"] else "NO",
            f"{each['peak_least']:.4f} to {each['peak_most']:.4f}",
            f"{each['over']:.3f}",
            f"{each['period']:.3f}",
        )
        for each in found
    )
    yield table((*head, "period"), cells)


def compare(found: dict[str, Any]) -> Iterator[str]:
    """PipeDream and everyone else."""
    yield "# Against PipeDream and other schedules"
    yield (
        "The command `python -m benchmarks.compare` measures these points on synthetic chains"
        " (`pipeplan/testing/networks.py`), 12 GB/s, half duplex, exact memory, 2bw. Memory is a"
        " share of a range: 0 % is the least with which a contiguous 1F1B plan exists, 100 % what"
        " the best such plan needs when memory is no limit. Times are ms per micro-batch. In the"
        " pictures blue points are PipeDream's, red ones ours. Other jobs ran on the two cores, as"
        " the CPU times show; the planner's limit is wall time, so a free machine finds better"
        " plans."
    )
    yield compare_pages.page(found, PICTURED)


def proofs(found: dict[str, Any]) -> Iterator[str]:
    """VGG16 at two memories: which allocations are ruled out, and by what."""
    yield "# VGG16 with little memory: what is ruled out"
    yield (
        "The command `python -m research.vgg16_proof vgg16-b128.chain.json` rules out a period"
        " for all allocations of VGG16 (PipeDream's profile, batch 128) on 4 GPUs with half-duplex"
        " links of 12 GB/s. [The bounds](../explanation/bounds.md) say how."
    )
    for case in found["cases"]:
        yield f"## {case['memory_bytes']:,} bytes a GPU"
        yield (
            f"No period up to {case['period_ns'] / 1e6:.2f} ms: {case['sums']} prefixes are ruled"
            f" out by sums, {case['rounds']} by rounds, {case['open']} are open;"
            f" {case['seconds']:.0f} s."
        )
        head = ("allocation begins with", "ruled out by", "rounds", "seconds")
        rows = (
            (each["begins"], each["reason"], str(each["rounds"]), f"{each['seconds']:.2f}")
            for each in sorted(case["beginnings"], key=lambda each: -each["seconds"])[:20]
        )
        yield "The twenty that took longest:"
        yield table(head, rows)


def voices(found: dict[str, Any]) -> Iterator[str]:
    """How long verifier, lowering and replay take."""
    yield "# Speed of verifier, lowering and simulator"
    yield (
        "The command `python -m benchmarks.voices` measures this. Times are CPU seconds, the"
        f" shortest of several, with Python {found['python']}."
    )
    head = list(found["rows"][0])
    yield table(head, ([str(value) for value in each.values()] for each in found["rows"]))


PAGES: dict[str, Callable[[Any], Iterator[str]]] = {
    "planner": planner,
    "joint": joint,
    "joint_runs": joint_runs,
    "ablation": ablation,
    "steps": step_rows.page,
    "step_times": step_times.page,
    "layer_options": layer_options.page,
    "option_times": option_times.page,
    "dynamic_programs": dynamic_programs.page,
    "on_gpu": on_gpu_pages.page,
    "one_device": one_device.page,
    "host_states": host_states.page,
    "peers": peers.page,
    "operators": operator_rows.page,
    "operator_graphs": operator_graph_pages.page,
    "hierarchies": hierarchies.page,
    "hierarchy_figures": hierarchy_figures.page,
    "operator_grids": operator_grids.page,
    "measured_curves": measured_curves.page,
    "compare": compare,
    "paper_figures": paper_figure_pages.page,
    "remat": remat,
    "rematerialized": rematerialized,
    "offmate": offmate.page,
    "resnet_bytes": resnet_bytes.page,
    "runtime": runtime_pages.runtime,
    "runtime_steps": runtime_pages.steps,
    "side_by_side": side_by_side.page,
    "tied_bits": tied_bits.page,
    "vgg16_proof": proofs,
    "voices": voices,
    "zoo": zoo.page,
}
"""By the name of the file of results, which is the page's, too."""


def page(name: str) -> str:
    """The text of one page."""
    found = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    title, *parts = PAGES[name](found)
    by = "<!-- Written by `python -m benchmarks.pages`. -->"
    source = (
        f"All numbers: [benchmarks/results/{name}.json](../../benchmarks/results/{name}.json)."
    )
    return "\n\n".join([title, by, *parts, source]) + "\n"


def path(name: str) -> Path:
    """Where a page lies."""
    return FOLDER / f"{name.replace('_', '-')}.md"


def readme() -> str:
    """README.md with its table and its sentence on steps anew."""
    found = json.loads((RESULTS / "planner.json").read_text(encoding="utf-8"))
    rows = planner_summary.means([each for each in found.values() if "planner" in each])
    head = (
        "memory",
        "instances",
        "ours / PipeDream",
        "at best",
        "ours / contiguous 1F1B",
        "at best",
    )
    beside, steps = (
        json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
        for name in ("peers", "steps")
    )
    told = f"{peers.in_short(beside)}\n{step_rows.in_short(steps)}"
    text = _between(README.read_text(encoding="utf-8"), BEGIN, END, table(head, rows))
    return _between(text, STEPS, END_OF_STEPS, told)


def _between(text: str, begin: str, end: str, inside: str) -> str:
    before, _, rest = text.partition(begin)
    return f"{before}{begin}\n{inside}\n{end}{rest.partition(end)[2]}"


def main() -> None:
    """Write all pages, and what README.md says of them."""
    for name in PAGES:
        path(name).write_text(page(name), encoding="utf-8")
    README.write_text(readme(), encoding="utf-8")


if __name__ == "__main__":
    main()
