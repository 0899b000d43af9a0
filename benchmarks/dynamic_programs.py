"""What contiguous plans with recomputation take: listing options, and one question of a period.

    python -m benchmarks.dynamic_programs [NAME ...]

Networks of 18 to 152 layers on 8 GPUs, alike or of eight speeds, with half of the memory that the
best contiguous 1F1B plan wants. Times are seconds of this process's processor, the shortest of
several, once numba has compiled what it compiles. What the file has is not measured again, unless
it is named.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.markdown import table
from benchmarks.store import measure_rows
from benchmarks.voices import timed
from pipeplan.cluster import Cluster
from pipeplan.ilp.contiguous.dynamic_program import ContiguousDP
from pipeplan.ilp.costs import CostModel
from pipeplan.ilp.recompute.dynamic_program import RecomputeDP
from pipeplan.ilp.recompute.options import list_options
from pipeplan.testing.instances import Case

RESULT = Path(__file__).parent / "results" / "dynamic_programs.json"
GPUS, SHARE = 8, 0.5
NETWORKS = ("resnet18", "resnet50", "gpt96", "densenet121", "resnet152")
KINDS = ("resnet18, unlike GPUs", "resnet50, unlike GPUs")
QUESTIONS = ("keeping", "recomputing", "offloading")


def machines(name: str) -> tuple[Case, Cluster]:
    """The instance, and its GPUs with a host."""
    case = Case(name.partition(",")[0], GPUS, SHARE)
    cluster = case.hosted
    if "unlike" in name:
        gpus = (
            gpu.model_copy(update={"speed": 1 + number / 10})
            for number, gpu in enumerate(cluster.gpus)
        )
        cluster = cluster.model_copy(update={"gpus": tuple(gpus)})
    return case, cluster


def measured(name: str) -> dict[str, Any]:
    """Seconds of each part."""
    case, cluster = machines(name)
    costs = CostModel(case.chain, cluster, "2bw", "exact")
    row: dict[str, Any] = {"layers": costs.layers}
    row["options_s"], options = timed(lambda: list_options(case.chain, offload=True))
    row["bound_s"], _ = timed(lambda: list_options(case.chain, relaxed=True, nested=True))
    programs = {
        "keeping": ContiguousDP(costs),
        "recomputing": RecomputeDP(costs, options=options),
        "offloading": RecomputeDP(costs, offload=True, options=options),
    }
    for what, program in programs.items():
        found = program.shortest(1)
        assert found is not None
        row[f"{what}_ns"] = found.period
        row[f"{what}_s"], _ = timed(partial(program.solve, found.period), repeat=20)
    return row


def page(found: dict[str, Any]) -> Iterator[str]:
    """Seconds by network."""
    yield "# Time of the contiguous dynamic programs"
    yield (
        f"The command `python -m benchmarks.dynamic_programs` asks for contiguous plans on {GPUS}"
        f" GPUs with {SHARE:.0%} of the memory that the best contiguous 1F1B plan wants; unlike"
        " GPUs have eight speeds. `options`: processor seconds for what stages may recompute, with"
        " what may leave; `bound`: for the relaxed options of bounds, in which runs may hold runs."
        " Then whether there is a plan of the shortest period: of stages that keep everything,"
        " that recompute, and that offload, too. Each plan takes some thirty such questions."
    )
    titles = ("network", "layers", "options", "bound", *QUESTIONS)
    yield table(titles, map(_cells, found.items()))


def _cells(each: tuple[str, dict[str, Any]]) -> tuple[str, ...]:
    name, row = each
    seconds = (f"{row[f'{what}_s']:.2f} s" for what in ("options", "bound"))
    asked = (f"{1000 * row[f'{what}_s']:.1f} ms" for what in QUESTIONS)
    return name, str(row["layers"]), *seconds, *asked


if __name__ == "__main__":
    measure_rows(__doc__, RESULT, {name: partial(measured, name) for name in NETWORKS + KINDS})
    sys.exit(0)
