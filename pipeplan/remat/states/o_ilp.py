"""O-ILP: which parts are on the device in which step (X. Zhao's thesis, section 4.5).

A method per family of constraints, named by its equation. Where the text as printed cannot be
meant, the corrected form is built, and its docstring says so. With r = 1, (4.3') to (4.20') are
those without a prime.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pipeplan.remat.graph.milp.linear import Constraint, Constraints, add, at_most, equal
from pipeplan.remat.states.activations import device_bytes, leaving_step, returning_step
from pipeplan.remat.states.problem import StateProblem
from pipeplan.remat.states.variables import OIlpVariables

FAMILIES = (
    "one_option",
    "parameters_are_there",
    "states_are_there",
    "parameters_are_somewhere",
    "states_are_somewhere",
    "parameters_come_back",
    "states_come_back",
    "updated_are_fetched",
    "gradients_leave_first",
    "updates_before_prefetches",
    "new_values_stay",
    "within_device",
    "within_host",
    "forward_time",
    "backward_time",
    "prefetch_time",
    "offload_time",
    "host_time",
)
"""(4.1), (4.5) to (4.23), in this order."""


class OIlp(OIlpVariables):
    """The program of one problem."""

    def __init__(
        self,
        problem: StateProblem,
        batches: tuple[float, float] | None = None,
        options: Sequence[int] | None = None,
        relaxed: bool = False,
        leave_out: str | None = None,
    ) -> None:
        """Builds the program.

        Args:
            problem: what is planned.
            batches: least and most batch as multiples of the problem's; None: the problem's.
            options: of each block, where they are chosen already.
            relaxed: whether options may be mixed, which gives a bound.
            leave_out: a family of constraints to do without.
        """
        super().__init__(problem, batches, relaxed)
        for b, option in enumerate(options or ()):
            add(self.model, equal(self.chosen[b][option], 1))
        for name in FAMILIES:
            if name != leave_out:
                family: Callable[[], Constraints] = getattr(self, name)
                for row in family():
                    add(self.model, row)
        self.model.minimize(sum(self.time))

    def one_option(self) -> Constraints:
        """(4.1): each block runs by one option."""
        for each in self.chosen:
            yield equal(sum(each), 1)

    def parameters_are_there(self) -> Constraints:
        """(4.5): a block needs all its parameters. (4.5') prints r - X_w, which is (4.6')'s."""
        for each in self.parts:
            for t in sorted(each.uses):
                yield at_most(self.r, each.stored[t])

    def states_are_there(self) -> Constraints:
        """(4.6): the device updates with the last backward. (4.6') prints r, which is (4.5')'s."""
        for each in self.parts:
            if each.trained:
                yield at_most(self.r - each.x, each.states_stored[each.order[0]])

    def parameters_are_somewhere(self) -> Constraints:
        """(4.7), with the sum up to the step before: what leaves in a step is there in it."""
        for each in self.parts:
            for before, t in zip(each.order, each.order[1:], strict=False):
                yield at_most(self.r, each.stored[t] + each.left[before])

    def states_are_somewhere(self) -> Constraints:
        """(4.8), with the sum up to the step before, too."""
        for each in self.parts:
            if each.trained:
                for before, t in zip(each.order, each.order[1:], strict=False):
                    there = each.states_stored[t] + each.states_left[before]
                    yield at_most(self.r - each.x, there)

    def parameters_come_back(self) -> Constraints:
        """(4.9): what is there next is there now, or is fetched now."""
        for each in self.parts:
            for t, stored in enumerate(each.stored):
                yield at_most(stored, each.stored[t - 1] + each.fetched[t - 1])

    def states_come_back(self) -> Constraints:
        """(4.10), the same of optimizer states."""
        for each in self.parts:
            for t, stored in enumerate(each.states_stored):
                yield at_most(stored, each.states_stored[t - 1] + each.states_fetched[t - 1])

    def updated_are_fetched(self) -> Constraints:
        """(4.11): what the host updates comes back before the next forward."""
        for each in self.parts:
            if each.updated:
                yield at_most(each.trained * each.x, each.size * each.back[each.window[-1]])

    def gradients_leave_first(self) -> Constraints:
        """(4.12), with the sum of Ofl up to the step before: parts of a step run side by side."""
        for each in self.parts:
            for t, done in each.done.items():
                before = each.order[each.order.index(t) - 1]
                yield at_most(each.trained * done, each.size * each.left[before])

    def updates_before_prefetches(self) -> Constraints:
        """(4.13): what waits for the host's update is not fetched.

        The print has Prf_t + Sto_t where this has all that came back since g_w. With (4.5), the
        print leaves no update for a step behind g_w; and gradients on the device, which Sto
        counts, would have to leave before any update.
        """
        for each in self.parts:
            done: Any = 0
            for t in each.window if each.updated else ():
                yield at_most(each.trained * (each.x - done), each.size * (self.r - each.back[t]))
                done = each.done[t]

    def new_values_stay(self) -> Constraints:
        """Of groups that the host updates whole: gradients that wait, and new values, take room.

        Not in the print, where parts of both may stand for each other in Sto.
        """
        for each in self.parts:
            if each.group.on_host and each.updated:
                for before, t in zip(each.window, each.window[1:], strict=False):
                    need = each.x - each.left[before] + each.back[before]
                    yield at_most(need, each.stored[t])

    def within_device(self) -> Constraints:
        """(4.14) to (4.17). S_t and A_t have what runs take beyond what they keep, too.

        So they have the gradients of parameters in the step that makes them, which the print
        counts nowhere.
        """
        limit = self.problem.machine.device_bytes / self.unit_bytes
        for t in range(self.problem.steps):
            always, by_option = device_bytes(self.problem, t)
            states = (
                each.size * (each.stored[t] + each.fetched[t])
                + each.states * (each.states_stored[t] + each.states_fetched[t])
                for each in self.parts
            )
            yield at_most(
                sum(states) + self._of_options(by_option) + always / self.unit_bytes,
                limit * self.r,
            )

    def _of_options(self, sizes: dict[tuple[int, int], int]) -> Any:
        """Bytes by block and option, of the chosen ones."""
        return sum(
            size / self.unit_bytes * self.chosen[block][option]
            for (block, option), size in sizes.items()
        )

    def within_host(self) -> Constraints:
        """(4.18)."""
        offloaded = {
            (b, o): option.offloaded_bytes
            for b, block in enumerate(self.problem.blocks)
            for o, option in enumerate(block.options)
        }
        k = self.problem.states_per_value
        used = self._of_options(offloaded)
        for each in self.parts:
            used = used + each.size * self.r + each.states * each.states_left[each.order[-1]]
            used = used + (k + 1) * each.trained * each.x
        yield at_most(used, self.problem.machine.host_bytes / self.unit_bytes * self.r)

    def _compute(self, t: int) -> Any:
        """The time of the forward or backward of a step."""
        b = self.problem.block_of(t)
        forward = t < len(self.problem.blocks)
        options = self.problem.blocks[b].options
        times = [each.forward_ns if forward else each.backward_ns for each in options]
        pairs = zip(times, self.chosen[b], strict=True)
        return sum(time / self.unit_ns * chosen for time, chosen in pairs)

    def forward_time(self) -> Constraints:
        """(4.19), the second of that number."""
        for t in range(len(self.problem.blocks)):
            yield at_most(self._compute(t), self.time[t])

    def backward_time(self) -> Constraints:
        """(4.20), with L_t of the first (4.19), where k is missing before |w|_g."""
        machine = self.problem.machine
        for t in range(len(self.problem.blocks), self.problem.steps):
            used = self._compute(t)
            for each in self.parts:
                if each.order[0] == t:
                    updated = each.trained * (self.r - each.x)
                    used = used + self.time_of_bytes(machine.device_update) * updated
                    used = used + self.time_of_bytes(machine.bandwidth) * (
                        each.size * each.offloaded[t] + each.states * each.states_offloaded[t]
                    )
            yield at_most(used, self.time[t])

    def prefetch_time(self) -> Constraints:
        """(4.21), with activations; the print has the time of their copies in T^o.

        Where the way has one direction at a time, this and (4.22) are one.
        """
        for t in range(self.problem.steps):
            moved = self._coming(t)
            if not self.problem.machine.duplex:
                moved = moved + self._leaving(t)
            yield self._way_time(moved, t)

    def offload_time(self) -> Constraints:
        """(4.22), with activations."""
        for t in range(self.problem.steps) if self.problem.machine.duplex else ():
            yield self._way_time(self._leaving(t), t)

    def _way_time(self, moved: Any, t: int) -> Constraint:
        return at_most(self.time_of_bytes(self.problem.machine.bandwidth) * moved, self.time[t])

    def _coming(self, t: int) -> Any:
        states = (
            each.size * each.fetched[t] + each.states * each.states_fetched[t]
            for each in self.parts
        )
        return sum(states) + self._activations(t, returning_step)

    def _leaving(self, t: int) -> Any:
        states = (
            each.size * each.offloaded[t] + each.states * each.states_offloaded[t]
            for each in self.parts
        )
        return sum(states) + self._activations(t, leaving_step)

    def _activations(self, t: int, when: Callable[[StateProblem, int], int]) -> Any:
        return self._of_options(
            {
                (b, o): option.offloaded_bytes
                for b, block in enumerate(self.problem.blocks)
                for o, option in enumerate(block.options)
                if when(self.problem, b) == t
            }
        )

    def host_time(self) -> Constraints:
        """(4.23)."""
        machine = self.problem.machine
        for t in range(self.problem.steps):
            used = machine.management_ns / self.unit_ns * self.r
            if machine.host_update is not None:
                used = used + self.time_of_bytes(machine.host_update) * sum(
                    each.trained * each.updated[t] for each in self.parts if t in each.updated
                )
            yield at_most(used, self.time[t])
