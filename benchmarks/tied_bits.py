"""What each way to hold a shared parameter costs: on one GPU, with copies, or passed on.

    python -m benchmarks.tied_bits [NAME ..]

estimates models whose embedding and head share their weights, plans each on GPUs with a share of
the memory that the plan of one GPU for both takes without a limit (10 s of counted work a plan),
and writes benchmarks/results/tied_bits.json and docs/results/tied-bits.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from benchmarks.markdown import table
from benchmarks.store import measure_rows
from pipeplan import cluster, planner
from pipeplan.chain import Chain
from pipeplan.cluster import Cluster
from pipeplan.errors import InfeasibleError, TimeLimitError
from pipeplan.plan import Plan, Semantics
from pipeplan.task import Tied, load

RESULT = Path(__file__).parent / "results" / "tied_bits.json"
TASKS = {
    "GPT-2 medium": "pipeplan.tasks:gpt2(size='medium',tied=True)",
    "T5 base": "pipeplan.tasks:t5(size='base',tied=True)",
}
GPUS = (4, 8)
SEMANTICS: tuple[Semantics, ...] = ("flush", "2bw")
SHARE = 0.8
"""Of the largest peak of the plan without a limit."""
LIMIT_S = 10.0


def measure(task: str, gpus: int, semantics: Semantics) -> dict[str, Any]:
    """Plans of all three ways in the same memory."""
    chains = {how: _estimated(task, how) for how in get_args(Tied)}
    ample = cluster.uniform(gpus, 2**42, bandwidth_bytes_per_s=12 * 10**9)
    free = _plan(chains["colocate"], ample, semantics)
    budget = int(SHARE * max(row.peak_bytes for row in free.memory))
    machine = cluster.uniform(gpus, budget, bandwidth_bytes_per_s=12 * 10**9)
    found: dict[str, Any] = {"budget_bytes": budget}
    for how, chain in chains.items():
        try:
            plan = _plan(chain, machine, semantics)
        except (InfeasibleError, TimeLimitError):
            found[how] = None
            continue
        found[how] = {
            "period_ns": float(plan.period_per_microbatch),
            "sent_bytes": _sent(plan),
        }
    return found


def _estimated(task: str, how: Tied) -> Chain:
    """The chain of `task` whose layers hold what they share in this way."""
    from pipeplan.capture.estimation.task_estimate import estimate_task  # only here: needs torch
    from pipeplan.devices import find_device

    return estimate_task(replace(load(task), tied=how), find_device("a100"))


def _plan(chain: Chain, machine: Cluster, semantics: Semantics) -> Plan:
    config = planner.Config(
        semantics=semantics,
        microbatches=4 * len(machine.gpus),
        time_limit_s=LIMIT_S,
        workers=1,
        deterministic=True,
    )
    return planner.solve(chain, machine, config)


def _sent(plan: Plan) -> int:
    """Bytes of a micro-batch between GPUs, forward."""
    layers = plan.chain.layers
    return sum(
        layers[one.last].output_bytes
        for one, two in zip(plan.stages, plan.stages[1:], strict=False)
        if one.gpu != two.gpu
    )


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
    yield "# What each way to hold a shared parameter costs"
    yield (
        "Where several layers share a parameter, a run adds up the gradient of each layer over the"
        " micro-batches of a step, and then those of the layers (`tied` of the task is `colocate`"
        " or `synchronize`). A plain loop adds up the gradients of all layers of one micro-batch"
        " first. Both are right but for rounding. With `transmit` the first of these layers has"
        " the parameter and passes a copy on with each micro-batch, as activations pass; the"
        " gradient comes back the same way. So a run adds up as the plain loop does, with its"
        " bits ([the zoo](zoo.md)), for the bytes of the copy at each boundary on the way."
    )
    yield (
        "The command `python -m benchmarks.tied_bits` plans models whose embedding and head share"
        f" their weights, with {SHARE:.0%} of the memory that the plan of `colocate` takes without"
        f" a limit, {LIMIT_S:.0f} s of counted work a plan (estimated times of an A100, 12 GB/s)."
        " Periods are those of a micro-batch; sent are the bytes of a micro-batch between GPUs,"
        " forward."
    )
    head = ("plan", "budget, GiB", *(f"`{how}`, ms" for how in get_args(Tied)), *_SENT)
    yield table(head, (_cells(name, row) for name, row in found.items()))


_SENT = ("sent with `colocate`, MiB", "sent with `transmit`, MiB")


def _cells(name: str, row: dict[str, Any]) -> tuple[str, ...]:
    plans = [row[how] for how in get_args(Tied)]
    sent = [row[how] for how in ("colocate", "transmit")]
    return (
        name,
        f"{row['budget_bytes'] / 2**30:.1f}",
        *("no plan" if plan is None else f"{plan['period_ns'] / 1e6:.2f}" for plan in plans),
        *("" if plan is None else f"{plan['sent_bytes'] / 2**20:.0f}" for plan in sent),
    )


def main() -> None:
    """Measure what is missing, write the file and the pages."""
    from benchmarks import pages  # only here: it imports this module

    measure_rows(__doc__, RESULT, ROWS)
    pages.main()


if __name__ == "__main__":
    main()
