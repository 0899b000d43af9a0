"""What the planner's benchmark measures of one instance; each part is plain data for the file."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from benchmarks.planner_cases import TINY, group_of
from pipeplan import lowering, simulator, verifier
from pipeplan.baselines.timed import Setting
from pipeplan.cluster import Cluster
from pipeplan.compare.field import Field
from pipeplan.errors import DeadlockError, InfeasibleError, InvalidPlanError, TimeLimitError
from pipeplan.plan import Plan, Rational
from pipeplan.planner import Config, solve
from pipeplan.testing.instances import UNLIMITED, Case, chain_of, machines

Part = dict[str, Any]

TIE = Fraction(1, 10**9)
"""Periods are stored as decimals: what differs by less is equal."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds for each part.

    search_s: of our search; None takes what the instance's target allows.
    pipedream_s: of PipeDream's exhaustive search; None leaves it out.
    rival_s: of the same for a point that is faster than our plan; None leaves it out.
    ilp_s: of the literal ILP; None takes what ours has.
    ilp_layers: longest chain that the literal ILP is tried on.
    gap: where our search stops.
    """

    search_s: float | None
    pipedream_s: float | None
    rival_s: float | None
    ilp_s: float | None
    ilp_layers: int
    gap: float

    def of(self, case: Case) -> float:
        """Seconds for our search."""
        return group_of(case).time_limit_s if self.search_s is None else self.search_s

    def gap_of(self, case: Case) -> float:
        """Small ones are to be solved."""
        return 0.0 if group_of(case) is TINY else self.gap


Asked = tuple[str, Part, Callable[[], Part]]
"""Name of a part; what is asked; what measures it: asked otherwise, it is measured again."""


def parts(case: Case, limits: Limits, row: Mapping[str, Part]) -> Iterator[Asked]:
    """One after the other; `row` holds the ones before."""
    ours = {"time_limit_s": limits.of(case), "gap": limits.gap_of(case)}
    yield "facts", {}, lambda: facts(case)
    yield "contiguous", {}, lambda: contiguous(case)
    yield "planner", ours, lambda: planned(case, limits)
    if limits.pipedream_s is not None:
        seconds = limits.pipedream_s
        yield "pipedream", {"search_s": seconds}, lambda: pipedream(case, seconds)
    than = row["planner"].get("period_ns")
    if limits.rival_s is not None and than is not None and not is_shortest(row["planner"]):
        longest = limits.rival_s
        asked = {"than_ns": than, "search_s": longest}
        yield "rival", asked, lambda: rival(case, than, longest)
    if len(chain_of(case.name).layers) <= limits.ilp_layers:
        most = limits.of(case) if limits.ilp_s is None else limits.ilp_s
        yield "ilp", {"time_limit_s": most}, lambda: literal(case, most)


def is_shortest(planner: Part) -> bool:
    """Whether it is proven that no plan at all is shorter."""
    return planner.get("gap") == 0 and planner["gap_bound"] == "any"


def facts(case: Case) -> Part:
    """Sizes, and the trivial bound: all work over all GPUs."""
    layers = chain_of(case.name).layers
    load = sum(layer.forward_ns + layer.backward_ns for layer in layers)
    return {
        "name": case.name,
        "gpus": case.gpus,
        "fraction": case.fraction,
        "memory_model": case.memory_model,
        "memory_bytes": case.cluster.gpus[0].memory_bytes,
        "layers": len(layers),
        "group": group_of(case).name,
        "load_ns": load / case.gpus,
    }


def planned(case: Case, limits: Limits) -> Part:
    """Our best plan and what is proven beside it."""
    config = Config(
        memory_model=case.memory_model,
        time_limit_s=limits.of(case),
        gap=limits.gap_of(case),
    )
    return _solved(case, config)


def contiguous(case: Case) -> Part:
    """The optimum of contiguous 1F1B plans, proven in milliseconds."""
    return _solved(case, Config(memory_model=case.memory_model, method="contiguous", k=1))


def literal(case: Case, seconds: float) -> Part:
    """The paper's ILP at the same memory, bytes counted as it does (k = 1)."""
    config = Config(memory_model="paper", method="paper-ilp", time_limit_s=seconds)
    return _solved(case, config)


def _solved(case: Case, config: Config) -> Part:
    """Plan, judge, and say how long it took; the machine's load tells how much to trust that."""
    chain, cluster = chain_of(case.name), case.cluster
    begin, work = time.monotonic(), time.process_time()
    first: list[float] = []

    def heard(
        elapsed: float, best: Fraction | None, _bound: Fraction, _gap: float | None, _phase: str
    ) -> None:
        if best is not None and not first:
            first.append(round(elapsed, 3))

    try:
        plan = solve(chain, cluster, config, heard)
    except (InfeasibleError, TimeLimitError) as error:
        outcome: Part = {"status": type(error).__name__, "reason": str(error)}
    else:
        outcome = _figures(plan)
    return outcome | {
        "first_plan_s": first[0] if first else None,
        "seconds": round(time.monotonic() - begin, 3),
        "cpu_seconds": round(time.process_time() - work, 3),
        "load_average": round(os.getloadavg()[0], 2),
    }


def _figures(plan: Plan) -> Part:
    solver = plan.solver
    bounds = solver.bounds
    return {
        "status": solver.status,
        "period_ns": float(plan.period_per_microbatch),
        "k": plan.k,
        "stages": len(plan.stages),
        "gap": solver.gap,
        "gap_bound": solver.gap_bound,
        "bound_any_ns": _number(bounds.any),
        "bound_k1_ns": _number(bounds.k1),
        "bound_contiguous_ns": _number(bounds.contiguous),
        "contiguous_any_k_ns": _number(solver.contiguous_period_ns),
        "verified": not verifier.verify(plan),
        "replayed": _replays(plan),
    }


def _number(value: Rational | None) -> float | None:
    return None if value is None else float(Fraction(*value))


def _replays(plan: Plan) -> bool:
    try:
        simulator.check(plan, lowering.lower(plan))
    except (InvalidPlanError, DeadlockError):
        return False
    return True


_FIELDS: dict[tuple[str, int, str], Field] = {}


def pipedream(case: Case, seconds: float) -> Part:
    """The best point of PipeDream's exhaustive search that fits; one search for all memories."""
    key = case.name, case.gpus, case.memory_model
    begin = time.monotonic()
    if key not in _FIELDS:
        setting = _setting(case, machines(case.gpus, UNLIMITED))
        field = Field(setting, setting.microbatches)
        field.search(seconds)
        _FIELDS[key] = field
    return _best_of(_FIELDS[key], case, begin)


def rival(case: Case, than_ns: float, seconds: float) -> Part:
    """Whether any point of PipeDream's exhaustive search is faster than our plan in its memory.

    What cannot be faster is not executed, so that the whole search ends where `pipedream` had to
    leave most partitions out.
    """
    setting = _setting(case, case.cluster)
    begin = time.monotonic()
    field = Field(setting, setting.microbatches, Fraction(than_ns) * (1 - TIE))
    field.search(seconds)
    return _best_of(field, case, begin)


def _best_of(field: Field, case: Case, begin: float) -> Part:
    """The best point in the memory of a case, and how much of the search it took."""
    point = field.cloud.best(tuple(gpu.memory_bytes for gpu in case.cluster.gpus))
    return {
        "period_ns": None if point is None else float(point.period_ns),
        "k": None if point is None else point.k,
        "points": len(field.cloud.points),
        "left_out": field.left_out,
        "seconds": round(time.monotonic() - begin, 3),
    }


def _setting(case: Case, cluster: Cluster) -> Setting:
    return Setting(chain_of(case.name), cluster, case.memory_model, max(8, 4 * case.gpus))
