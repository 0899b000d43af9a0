"""What it would take to add up the gradients of a shared parameter in the order of a plain loop.

    python -m benchmarks.tied_bits [NAME ..]

estimates models whose embedding and head share their weights, plans each on GPUs with a share of
the memory that its plan without a limit takes (5 s of counted work a plan, both layers on one
GPU), and writes benchmarks/results/tied_bits.json and docs/results/tied-bits.md.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.markdown import table
from benchmarks.store import measure_rows
from pipeplan import cluster, planner
from pipeplan.chain import Chain
from pipeplan.cluster import Cluster
from pipeplan.errors import InfeasibleError, TimeLimitError
from pipeplan.plan import Plan, Semantics

RESULT = Path(__file__).parent / "results" / "tied_bits.json"
TASKS = {
    "GPT-2 medium": "pipeplan.tasks:gpt2(size='medium',tied=True)",
    "T5 base": "pipeplan.tasks:t5(size='base',tied=True)",
}
GPUS = (4, 8)
SEMANTICS: tuple[Semantics, ...] = ("flush", "2bw")
SHARE = 0.8
"""Of the largest peak of the plan without a limit."""
LIMIT_S = 5.0


def measure(task: str, gpus: int, semantics: Semantics) -> dict[str, Any]:
    """A plan as plans are now, and one with the bytes that the plain loop's order takes."""
    from pipeplan.capture import estimate  # only here: it needs torch
    from pipeplan.devices import find_device

    chain = estimate(task, find_device("a100"))
    layers = _sharing(chain)
    free = _plan(chain, cluster.uniform(gpus, 2**42, bandwidth_bytes_per_s=12 * 10**9), semantics)
    budget = int(SHARE * max(row.peak_bytes for row in free.memory))
    machine = cluster.uniform(gpus, budget, bandwidth_bytes_per_s=12 * 10**9)
    plan = _plan(chain, machine, semantics)
    size = min(chain.layers[layer].gradient_bytes for layer in layers)
    waiting = _waiting(plan, layers)
    # One sum in place of one per layer, and a gradient for each micro-batch that waits.
    more = size * (1 + waiting - len(layers))
    first = machine.gpus[0].model_copy(update={"memory_bytes": budget - more})
    scarce = machine.model_copy(update={"gpus": (first, *machine.gpus[1:])})
    try:
        slower: float | None = float(_plan(chain, scarce, semantics).period_per_microbatch)
    except (InfeasibleError, TimeLimitError):
        slower = None
    return {
        "gradient_bytes": size,
        "waiting": waiting,
        "more_bytes": more,
        "budget_bytes": budget,
        "period_ns": float(plan.period_per_microbatch),
        "period_with_them_ns": slower,
    }


def _sharing(chain: Chain) -> list[int]:
    """The layers that share a parameter."""
    users = Counter(name for layer in chain.layers for name in layer.parameters)
    (name,) = (each for each, count in users.items() if count > 1)
    return [index for index, layer in enumerate(chain.layers) if name in layer.parameters]


def _plan(chain: Chain, machine: Cluster, semantics: Semantics) -> Plan:
    config = planner.Config(
        semantics=semantics,
        microbatches=4 * len(machine.gpus),
        time_limit_s=LIMIT_S,
        workers=1,
        deterministic=True,
        pins=dict.fromkeys(_sharing(chain), 0),
    )
    return planner.solve(chain, machine, config)


def _waiting(plan: Plan, layers: list[int]) -> int:
    """Of how many micro-batches at most the last layer's gradient waits for the first layer's."""
    last, first = (_stage(plan, layer) for layer in (layers[-1], layers[0]))
    period = plan.period_ns
    times = {
        (op.stage, op.copy_): (op.shift * period + op.start_ns, op.duration_ns)
        for op in plan.ops
        if op.kind is plan.stages[op.stage].backward
    }
    stays = [(times[last, copy][0], sum(times[first, copy])) for copy in range(plan.k)]
    return max(
        sum((instant - begin) // period - (instant - end) // period for begin, end in stays)
        for instant, _ in stays
    )


def _stage(plan: Plan, layer: int) -> int:
    return next(each.id for each in plan.stages if each.first <= layer <= each.last)


ROWS: dict[str, Callable[[], dict[str, Any]]] = {
    f"{name}, {gpus} GPUs, {semantics}": lambda task=task, gpus=gpus, semantics=semantics: measure(
        task, gpus, semantics
    )
    for name, task in TASKS.items()
    for gpus in GPUS
    for semantics in SEMANTICS
}


def page(found: dict[str, Any]) -> Iterator[str]:
    """The result page."""
    yield "# Shared parameters with the bits of a plain loop"
    yield (
        "Where several layers share a parameter, a run adds up the gradient of each layer over the"
        " micro-batches of a step, and then those of the layers. A plain loop adds up gradients"
        " of all layers of one micro-batch first: `sum + (last + first)`. Both are right but for"
        " rounding, and floating-point sums tell them apart. To add in the loop's order, the"
        " gradient of the last layer must wait for that of the first one, micro-batch by"
        " micro-batch: in a pipeline many micro-batches are between the two."
    )
    yield (
        "The command `python -m benchmarks.tied_bits` plans models whose embedding and head share"
        f" their weights, with {SHARE:.0%} of the memory that the plan without a limit takes,"
        f" {LIMIT_S:.0f} s of counted work a plan, both layers on GPU 0 (estimated times of an"
        " A100, 12 GB/s). It counts of how many micro-batches the gradient waits, and plans"
        " again with the bytes that this takes beyond the sum of each layer, which it replaces."
        " A plan with them is one without them, too: the shorter period of both counts."
    )
    head = (
        "plan",
        "gradient, MiB",
        "waiting",
        "more, MiB",
        "of the budget",
        "period, ms",
        "with them, ms",
        "longer by",
    )
    yield table(head, (_cells(name, row) for name, row in found.items()))
    yield (
        "Runs keep the sum of each layer. It costs one gradient for each further layer, whatever"
        " the plan is, needs one message a step where copies are synchronized instead of one a"
        " micro-batch, and has the same bits under every plan. The loop's order would do so, too,"
        " for the bytes of the table. It needs a term of memory that lives from one backward to"
        " another, in the rules, the ledgers of verifier and simulator and every search: that is"
        " not built. `profile` says which layers share parameters, and that bits differ from a"
        " plain loop's; a run equals training layer by layer in one process bit for bit."
    )


def _cells(name: str, row: dict[str, Any]) -> tuple[str, ...]:
    before, behind = row["period_ns"], row["period_with_them_ns"]
    before = before if behind is None else min(before, behind)
    return (
        name,
        f"{row['gradient_bytes'] / 2**20:.0f}",
        str(row["waiting"]),
        f"{row['more_bytes'] / 2**20:.0f}",
        f"{row['more_bytes'] / row['budget_bytes']:.1%}",
        f"{before / 1e6:.2f}",
        "no plan" if behind is None else f"{behind / 1e6:.2f}",
        "" if behind is None else f"{behind / before - 1:.1%}",
    )


def main() -> None:
    """Measure what is missing, write the file and the pages."""
    from benchmarks import pages  # only here: it imports this module

    measure_rows(__doc__, RESULT, ROWS)
    pages.main()


if __name__ == "__main__":
    main()
