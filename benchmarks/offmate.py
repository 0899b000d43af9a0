"""Llama2-7B beyond the memory of a consumer GPU: OffMate's table 4.2, Figures 4.6 to 4.9.

    python -m benchmarks.offmate [--only PART ..]

plans steps of training, judges each, writes benchmarks/results/offmate.json and
docs/results/offmate.md. Nothing is measured on a GPU.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import offmate_batches
from benchmarks.markdown import bullets, table
from benchmarks.offmate_models import RTX_3060, Llama
from benchmarks.offmate_order import PUBLISHED, SHARES, percent, replays, shared
from pipeplan.device_program import InstructionKind
from pipeplan.errors import InfeasibleError, TimeLimitError
from pipeplan.remat.programs import judge
from pipeplan.remat.schedules.host_link import HostLink
from pipeplan.remat.states.problem import DeviceAndHost
from pipeplan.remat.states.solve import StatePlan, plan_states

RESULT = Path(__file__).parent / "results" / "offmate.json"
SECONDS = 120.0
"""Of the solver, for each of its runs."""
DEPTHS = (8, 16, 24)
LANES = {
    "device": (InstructionKind.RUN,),
    "to the host": (InstructionKind.OFFLOAD, InstructionKind.COPY),
    "to the device": (InstructionKind.PREFETCH,),
    "host": (InstructionKind.HOST,),
}
Row = dict[str, Any]


def _planned(llama: Llama, machine: DeviceAndHost, offload: bool = True) -> Row:
    """One plan's figures; times in seconds, sizes in 10^9 bytes."""
    problem = llama.problem(machine, offload)
    start = time.process_time()
    try:
        plan = plan_states(problem, SECONDS)
    except (InfeasibleError, TimeLimitError):
        return {"plan": None}
    options = [
        block.options[option].name
        for block, option in zip(plan.problem.blocks, plan.relaxation.options, strict=True)
    ]
    return {
        "plan": plan.outcome.makespan_ns / 1e9,
        "parts": plan.relaxation.step_ns / 1e9,
        "bound": plan.relaxation.bound_ns / 1e9,
        "without_limits": problem.compute_ns / 1e9,
        "device": plan.outcome.peak_bytes / 1e9,
        "host": plan.host_bytes / 1e9,
        "options": {name: options.count(name) for name in dict.fromkeys(options)},
        "host_updates": _updated_on_host(plan) / 1e9,
        "lanes": _lanes(plan),
        "replayed": {str(share): _replayed(plan, share) / 1e9 for share in SHARES},
        "cpu_s": time.process_time() - start,
    }


def _replayed(plan: StatePlan, share: float) -> int:
    """The step's ns where copies get a share of the bandwidth that was planned for."""
    machine = plan.problem.machine
    link = HostLink(int(machine.bandwidth * share), duplex=machine.duplex)
    outcome = judge(plan.step.graph, plan.program, None, link, plan.placement)
    assert not outcome.violations
    return outcome.makespan_ns


def _updated_on_host(plan: StatePlan) -> int:
    return sum(group.trained_bytes for group in plan.problem.groups if group.on_host)


def _lanes(plan: StatePlan) -> dict[str, list[float]]:
    """By lane: the share of the forward, and of the backward, in which it works."""
    turn = next(
        step.end_ns
        for step in plan.outcome.steps
        if step.instruction.kind is InstructionKind.END_F
    )
    spans = ((0, turn), (turn, plan.outcome.makespan_ns))
    return {
        name: [
            sum(
                max(0, min(step.end_ns, end) - max(step.start_ns, begin))
                for step in plan.outcome.steps
                if step.instruction.kind in kinds
            )
            / (end - begin)
            for begin, end in spans
        ]
        for name, kinds in LANES.items()
    }


def _ablation(machine: DeviceAndHost = RTX_3060) -> dict[str, Row]:
    return {
        "all": _planned(Llama(), machine),
        "no update on the host": _planned(Llama(), replace(machine, host_update=None)),
        "no activation offloaded": _planned(Llama(), machine, offload=False),
    }


def _one_way() -> dict[str, Row]:
    """The same where both directions together have the bandwidth."""
    return _ablation(replace(RTX_3060, duplex=False))


def _depths() -> dict[str, Row]:
    return {str(layers): _planned(Llama(layers=layers), RTX_3060) for layers in DEPTHS}


PARTS: dict[str, Callable[[], dict[str, Any]]] = {
    "ablation": _ablation,
    "one way": _one_way,
    "depths": _depths,
    "chosen batches": offmate_batches.chosen,
    "fixed batches": offmate_batches.fixed,
    "devices": offmate_batches.devices,
}


def page(found: dict[str, Any]) -> Iterator[str]:
    """The result page."""
    yield "# Llama2-7B on one GPU of 12 GB"
    yield (
        "The command `python -m benchmarks.offmate` makes this page: OffMate, X. Zhao's thesis,"
        " chapter 4, as [planned here](../reference/offmate.md). No GPU is measured. The judge"
        " replays each plan with lanes for the device, both ways to the host, and the host."
    )
    yield bullets(_given())
    yield "## Table 4.2"
    yield "Seconds of a step; percent are of the step without limits, which is given: 10.89 s."
    yield from _table_4_2(found["ablation"])
    yield "### What the order of the ablations depends on"
    yield from shared(found["ablation"], found["one way"])
    yield from replays(found["ablation"])
    yield from _figure_4_6(found["depths"] | {"32": found["ablation"]["all"]})
    yield from _figure_4_7(found["ablation"]["all"])
    yield from offmate_batches.figure_4_8(found["chosen batches"], found["fixed batches"])
    yield from offmate_batches.figure_4_9(found["devices"])


def _given() -> list[str]:
    return [
        "From the thesis: 40.8 GiB of activations at batch 4 x 512, a step of 10.89 s without"
        " limits (13.1 s are 120.3 %), 10.4 GB/s each way, updates of 16.6 GB/s on the device and"
        " 1.1 GB/s on the host, 50 ms of management for each forward and backward, 2 GB of the 12"
        " left free, 128 GB on the host (10^9 bytes here).",
        "From the published model: parameters of 32 layers, embedding and head, in 32 bits.",
        "Assumed: time in proportion to operations; what a layer takes beside what it keeps;"
        " which operators are dear enough to offload what they make (six products of each layer,"
        " 0.31 GB). The thesis says the rule (section 4.4) and not its outcome.",
    ]


def _table_4_2(found: dict[str, Row]) -> Iterator[str]:
    yield table(
        ("method", "plan, s", "percent", "thesis", "bound, s", "GPU, GiB", "host, 10^9 bytes",
         "updated on the host", "options of blocks", "CPU s"),
        (
            (
                name,
                f"{row['plan']:.2f}",
                percent(row),
                f"{PUBLISHED[name]} %",
                f"{row['bound']:.2f}",
                f"{row['device'] * 1e9 / 2**30:.2f}",
                f"{row['host']:.1f}",
                f"{row['host_updates']:.1f}",
                ", ".join(f"{count} {option}" for option, count in row["options"].items()),
                f"{row['cpu_s']:.0f}",
            )
            for name, row in found.items()
        ),
    )  # fmt: skip
    yield (
        "`plan` is the judge's time of whole tensors, `bound` O-ILP's for parts in steps. The"
        " thesis's times were measured. The whole method is the best, as there. The order of the"
        " two ablations is not the thesis's: recomputing every layer alone is 28 % more, while"
        " links that carry both ways at full speed hide most copies. Where they have less it is,"
        " as the next tables show."
    )


def _figure_4_6(found: dict[str, Row]) -> Iterator[str]:
    yield "## Figure 4.6: time over depth"
    yield table(
        ("layers", "without limits, s", "plan, s", "percent", "host, 10^9 bytes"),
        (
            (
                layers,
                f"{row['without_limits']:.2f}",
                f"{row['plan']:.2f}",
                percent(row),
                f"{row['host']:.1f}",
            )
            for layers, row in found.items()
        ),
    )


def _figure_4_7(row: Row) -> Iterator[str]:
    yield "## Figure 4.7: what works when"
    yield "Shares of the forward and of the backward in which each lane works."
    yield table(
        ("lane", "forward", "backward"),
        ((name, *(f"{share:.0%}" for share in shares)) for name, shares in row["lanes"].items()),
    )


def main() -> None:
    """Plan, write the file and the page."""
    from benchmarks import pages  # only here: it imports this module

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    found: dict[str, Any] = {}
    for name in parser.parse_args().only:
        part = PARTS[name]()
        found = json.loads(RESULT.read_text(encoding="utf-8")) if RESULT.exists() else {}
        found[name] = part
        RESULT.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        print(name, file=sys.stderr, flush=True)
    if PARTS.keys() <= found.keys():
        pages.main()


if __name__ == "__main__":
    main()
