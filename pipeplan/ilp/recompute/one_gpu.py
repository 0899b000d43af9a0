"""One GPU that recomputes: what the per-device planner decides, counted as plans are.

Without offloading the chain is one stage, whose runs are those of persistent schedules
(`persistent`): the first that fits is the shortest. With it, sets that need more than the GPU has
are tried as well, and what does not fit leaves (`one_gpu`). Local search then changes the best of
them. Source: ours.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import inf
from operator import itemgetter
from typing import Final

from pipeplan.ilp import one_gpu, portfolio
from pipeplan.ilp.contiguous.dynamic_program import ContiguousPartition
from pipeplan.ilp.contiguous.partition_schedule import schedule_partition
from pipeplan.ilp.costs import CostModel
from pipeplan.ilp.incumbent import Incumbent
from pipeplan.ilp.offload.byte_options import own_input_bytes
from pipeplan.ilp.offload.copy_placement import transfer_ns
from pipeplan.ilp.recompute.contracted_chain import ContractedChain, contract
from pipeplan.ilp.recompute.contraction_cache import ContractionCache
from pipeplan.ilp.recompute.joint_incumbent import JointIncumbent
from pipeplan.ilp.recompute.moves import mutate, options_of
from pipeplan.ilp.recompute.options import StageOptions
from pipeplan.ilp.recompute.persistent import persistent_runs, work_s
from pipeplan.ilp.recompute.search_result import SearchResult
from pipeplan.ilp.runs import Run, Runs
from pipeplan.ilp.schedule import Schedule
from pipeplan.plan import Stage

NAME: Final = "one device"
MORE_ROOM: Final = 1.2
"""The largest budget of a persistent schedule, in those that the GPU has: sizes are rounded up."""
COUNT_S: Final = 1e-3
"""What counting the bytes of a set of runs counts for, where work is counted."""
LAYER_S: Final = 2.5e-3
"""What deciding what leaves counts for, for each layer, where work is counted."""
CHANGE_S: Final = 3e-4
"""What a changed set counts for that is not worth a look."""
BEST: Final = 6
"""Sets that are changed, and at the end have more than a look."""
FEWEST_LOOKS: Final = 12
"""Sets that have a look even where time is short."""
IN_VAIN: Final = 500
"""Changes in a row without one that is worth a look, after which the search ends."""
MOST: Final = 64
"""Persistent schedules, evenly spread over all budgets, that are considered there."""


def run(joint: JointIncumbent, offered: StageOptions) -> None:
    """The best plan of one stage, or of several where layers may leave.

    Args:
        joint: hears of it.
        offered: sets of runs that are listed anyway.
    """
    whole = joint.state
    whole.set_phase(NAME)
    room = whole.costs.budgets[0] - whole.costs.segment(0, whole.costs.layers - 1).states
    if room <= 0:
        return
    whole.options.clock.charge(work_s(whole.costs.chain))
    _stay(joint, persistent_runs(whole.costs.chain, int(MORE_ROOM * room)))
    if one_gpu.applies(whole) and whole.uses(one_gpu.NAME):
        _leave(joint, offered)


def _stay(joint: JointIncumbent, sets: Iterator[Runs]) -> None:
    """The first that fits."""
    whole = joint.state
    for runs in sets:
        whole.options.clock.charge(COUNT_S)
        contracted = contract(whole.costs.chain, runs)
        costs = contracted.of(whole.costs)
        schedule = in_one_stage(costs)
        if joint.period is not None and schedule.per_microbatch >= joint.period:
            return
        inner = Incumbent(costs, whole.options, joint.on_report)
        if inner.offer(schedule):
            joint.take(SearchResult(inner, contracted))
            return


def in_one_stage(costs: CostModel) -> Schedule:
    """F, then B, of the whole chain."""
    last = costs.layers - 1
    work = _busy(costs)
    stages = (Stage(id=0, layers=(0, last), gpu=0),)
    return schedule_partition(costs, ContiguousPartition(max(1, work), stages, (work,)))


def _leave(joint: JointIncumbent, offered: StageOptions) -> None:
    """What the GPU recomputes; what then does not fit leaves: a look at many, then the best."""
    whole = joint.state
    looks = _Looks(joint)
    over = whole.options.clock.limit(portfolio.ONE_GPU * whole.remaining, CHANGE_S)
    for each in _sets(whole.costs, offered):
        if over() and looks.best and len(looks.seen) >= FEWEST_LOOKS:
            break
        looks.at(each)
    looks.search(portfolio.ONE_GPU * whole.remaining)
    for _, each in looks.best:
        _left(joint, each, quick=False)


@dataclass
class _Looks:
    """The sets that had a look, and the best of them by the period that it found."""

    joint: JointIncumbent
    best: list[tuple[float, ContractedChain]] = field(default_factory=list)
    seen: set[frozenset[Run]] = field(default_factory=set)

    def at(self, contracted: ContractedChain) -> None:
        """A look at one more."""
        self.seen.add(contracted.runs)
        period = _left(self.joint, contracted, quick=True)
        if period < inf:
            insort(self.best, (period, contracted), key=itemgetter(0))
            del self.best[BEST:]

    def search(self, seconds: float) -> None:
        """Local search: random changes of the best sets, the best of them most often.

        A change has a look if `_promise` is less than what the best set takes.
        """
        whole = self.joint.state
        random, chain = whole.random(NAME), ContractionCache(whole.costs)
        layers = (0, whole.costs.layers - 1)
        options, vain = options_of(whole.costs.chain, layers), 0
        over = whole.options.clock.limit(seconds, CHANGE_S)
        while self.best and vain < IN_VAIN and not (over() or self.joint.interrupted):
            _, known = self.best[int(random.random() ** 2 * len(self.best))]
            runs = mutate(random, sorted(known.runs), layers, (), options)
            contracted, costs = chain.of(runs)
            vain += 1
            if contracted.runs not in self.seen and _promise(costs) < self.best[0][0]:
                self.at(contracted)
                vain = 0


def _promise(costs: CostModel) -> int:
    """An estimate: its work, or the transfers of what one stage would lack if they take longer."""
    return max(_busy(costs), _away(costs))


def _left(joint: JointIncumbent, contracted: ContractedChain, *, quick: bool) -> float:
    """The period of a set of runs; infinite where none is found, or none can be the best."""
    whole, costs = joint.state, contracted.of(joint.state.costs)
    known = joint.period is not None
    if joint.interrupted or (known and whole.remaining <= 0):
        return inf
    better = joint.period is None or _busy(costs) < joint.period
    if not better or _least(costs) > costs.budgets[0]:
        return inf
    whole.options.clock.charge(
        one_gpu.LOOK_S * costs.layers**2 if quick else LAYER_S * costs.layers
    )
    inner = Incumbent(costs, whole.options, joint.on_report)
    if not one_gpu.offer(inner, quick=quick) or inner.best is None:
        return inf
    joint.take(SearchResult(inner, contracted))
    return float(inner.best.per_microbatch)


def _sets(costs: CostModel, offered: StageOptions) -> list[ContractedChain]:
    """Of persistent schedules of all budgets, and of the options of one stage.

    Those come first whose work and transfers of what does not fit, both ways, promise most.
    """
    chain, last = costs.chain, costs.layers - 1
    every = list(persistent_runs(chain, _peak(costs)))
    spread = every[:: 1 + len(every) // MOST]
    listed = (offered.runs(0, last, n) for n in range(offered.counts[0, last]))
    chains = [contract(chain, runs) for runs in dict.fromkeys([*spread, *listed])]
    return sorted(chains, key=lambda each: _promise(each.of(costs)))


def _busy(costs: CostModel) -> int:
    return costs.load_ns(0, costs.layers - 1, 0)


def _peak(costs: CostModel) -> int:
    """Beside the states, in one stage."""
    size = costs.segment(0, costs.layers - 1)
    return max(size.running, size.saved + size.backward)


def _least(costs: CostModel) -> int:
    """Bytes that a layer at work needs at least, if all leaves that may."""
    stays = costs.segment(0, costs.layers - 1).states
    least = stays
    for layer, each in enumerate(costs.chain.layers):
        size = costs.segment(layer, layer, layer > 0)
        least = max(least, stays + max(size.running, size.saved + size.backward))
        leaves = 0 if layer in costs.recomputed else each.saved_bytes
        stays += size.saved - leaves - own_input_bytes(costs, layer, covered=layer > 0)
    return least


def _away(costs: CostModel) -> int:
    """Ns to the host and back of what one stage lacks."""
    states = costs.segment(0, costs.layers - 1).states
    return 2 * transfer_ns(costs, max(0, states + _peak(costs) - costs.budgets[0]))
