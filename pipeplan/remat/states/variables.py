"""The variables of O-ILP, (4.1) to (4.4) of X. Zhao's thesis.

Steps count from 0; times and sizes are multiples of the longest run and of the largest item.
Parts are fractions of a group in [0, r], where 1 / r is the batch as a multiple of the problem's
(section 4.5.3). r = 1 where the batch is given.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from typing import Any

from pipeplan.remat.graph.milp.linear import add, at_most, equal, new_model
from pipeplan.remat.states.problem import ParameterGroup, StateProblem

_SECOND = 10**9


class GroupParts:
    """The variables (4.2) to (4.4) of one group: a list over steps each, and sums since g_w.

    Attributes:
        order: steps from g_w on, around the end.
        window: those behind g_w and before f_w: where the host may update.
        stored: Sto.
        offloaded: Ofl.
        fetched: Prf.
        states_stored: StoO.
        states_offloaded: OflO.
        states_fetched: PrfO.
        updated: Opt by step of the window. (4.4) prints f_w < t < g_w, (4.4') f_w < t <= g_w; the
            sums from g_w to f_w say that the other way round is meant.
        x: X_w, the part that the host updates.
    """

    def __init__(self, program: OIlpVariables, group: ParameterGroup) -> None:
        problem, model = program.problem, program.model
        count = problem.steps
        self.group = group
        self.size = group.bytes / program.unit_bytes
        self.trained = group.trained_bytes / program.unit_bytes
        self.states = problem.states_per_value * self.trained
        last, first = problem.last_gradient(group), problem.first_use(group)
        self.order = [(last + n) % count for n in range(count)]
        self.window = self.order[1 : self.order.index(first)]
        self.uses = {t for t in range(count) if problem.block_of(t) in group.blocks}

        def parts(name: str) -> list[Any]:
            return [program.part(f"{name} {group.name} {t}") for t in range(count)]

        self.stored, self.offloaded, self.fetched = parts("Sto"), parts("Ofl"), parts("Prf")
        self.states_stored, self.states_offloaded = parts("StoO"), parts("OflO")
        self.states_fetched = parts("PrfO")
        on_host = problem.machine.host_update is not None and group.on_host is not False
        may = on_host and self.trained > 0
        self.updated = {t: program.part(f"Opt {group.name} {t}") for t in self.window if may}
        self.x = program.part(f"X {group.name}")
        add(model, equal(self.x, sum(self.updated.values())))
        if group.on_host:
            add(model, equal(self.x, program.r))
        self.left = program.running_sum(f"left {group.name}", self.order, self.offloaded)
        self.states_left = program.running_sum(
            f"states left {group.name}", self.order, self.states_offloaded
        )
        self.back = program.running_sum(f"back {group.name}", self.window, self.fetched)
        self.done = program.running_sum(f"done {group.name}", self.window, self.updated)


class OIlpVariables:
    """The model, without its constraints.

    Attributes:
        problem: what is planned.
        unit_ns: what a time of 1 is.
        unit_bytes: what a size of 1 is.
        r: 1 over the batch as a multiple of the problem's.
        chosen: Comp by block and option.
        time: Time of each step.
        parts: variables of each group.
    """

    def __init__(
        self, problem: StateProblem, batches: tuple[float, float] | None, relaxed: bool
    ) -> None:
        """As `OIlp`."""
        self.problem = problem
        self.model = new_model()
        options = [option for block in problem.blocks for option in block.options]
        times = [max(each.forward_ns, each.backward_ns) for each in options]
        sizes = [max(each.kept_bytes, each.offloaded_bytes) for each in options]
        self.unit_ns = max(1, *times)
        self.unit_bytes = max([1, *sizes, *(group.bytes for group in problem.groups)])
        self.r: Any = 1
        self._most = 1.0
        self._batch_is_free = batches is not None
        if batches is not None:
            self._most = 1 / batches[0]
            self.r = self.model.new_num_var(1 / batches[1], self._most, "r")
        self.time = [self.model.new_num_var(0, inf, f"Time {t}") for t in range(problem.steps)]
        self.chosen = [
            [self._choice(f"Comp {b} {o}", relaxed) for o in range(len(block.options))]
            for b, block in enumerate(problem.blocks)
        ]
        self.parts = [GroupParts(self, group) for group in problem.groups]

    def _choice(self, name: str, relaxed: bool) -> Any:
        return self.model.new_num_var(0, 1, name) if relaxed else self.model.new_bool_var(name)

    def part(self, name: str) -> Any:
        """A fraction of a group, at most r (4.3'), (4.4')."""
        found = self.model.new_num_var(0, self._most, name)
        if self._batch_is_free:
            add(self.model, at_most(found, self.r))
        return found

    def running_sum(
        self, name: str, order: Sequence[int], terms: Sequence[Any] | Mapping[int, Any]
    ) -> dict[int, Any]:
        """By step of `order` that has a term: the sum of terms up to and with it."""
        found: dict[int, Any] = {}
        before: Any = 0
        for t in order if isinstance(terms, Sequence) or terms else ():
            found[t] = self.model.new_num_var(0, inf, f"{name} {t}")
            add(self.model, equal(found[t], before + terms[t]))
            before = found[t]
        return found

    def time_of_bytes(self, rate: int) -> float:
        """Of a size of 1 at bytes per second."""
        return self.unit_bytes * _SECOND / rate / self.unit_ns
