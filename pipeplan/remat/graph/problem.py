"""What is asked of a solver of operator graphs, and what it answers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pipeplan.device_program import DeviceProgram
from pipeplan.operator_graph import OperatorGraph
from pipeplan.remat.programs import ProgramOutcome


@dataclass(frozen=True, slots=True)
class Budget:
    """A pair of budgets, as RK-Checkmate has them (X. Zhao's thesis, 2.4).

    Attributes:
        peak_bytes: of the device, static bytes included.
        saved_bytes: held at the end of the forward, without static bytes, inputs and outputs
            (B5); None without limit.
    """

    peak_bytes: int
    saved_bytes: int | None = None


@dataclass(frozen=True)
class GraphProblem:
    """A graph, and how often its operations may run.

    Attributes:
        graph: what one device computes for one micro-batch.
        runs: how often a forward may run; a backward runs once.
        anywhere: whether forwards may run again before the end of the forward, too. It helps only
            where the forward needs more than the backward, and proofs take longer.
    """

    graph: OperatorGraph
    runs: int = 2
    anywhere: bool = False


@dataclass(frozen=True)
class Option:
    """A program and what the judge says of it.

    Attributes:
        method: what found it.
        program: what the device does.
        outcome: by `pipeplan.remat.programs.judge`.
    """

    method: str
    program: DeviceProgram
    outcome: ProgramOutcome

    def within(self, budget: Budget) -> bool:
        """Whether it keeps both budgets."""
        saved = budget.saved_bytes is None or self.outcome.saved_bytes <= budget.saved_bytes
        return saved and self.outcome.peak_bytes <= budget.peak_bytes

    def beats(self, other: Option) -> bool:
        """Whether it is as good in time, peaks and saved bytes."""
        mine, its = self.outcome, other.outcome
        return (
            mine.compute_ns <= its.compute_ns
            and mine.saved_bytes <= its.saved_bytes
            and mine.forward_peak_bytes <= its.forward_peak_bytes
            and mine.backward_peak_bytes <= its.backward_peak_bytes
        )


@dataclass(frozen=True)
class Answer:
    """What is known at one pair of budgets.

    Attributes:
        budget: what was asked.
        option: the fastest program found; None where none was.
        bound_ns: time that no order of the method's class is below, ns; None where there is none
            of that class.
        proven: whether the option is the best of the class, or there is none.
    """

    budget: Budget
    option: Option | None
    bound_ns: int | None
    proven: bool = False

    @property
    def gap(self) -> float | None:
        """(time - bound) / bound; None without an option."""
        if self.option is None or not self.bound_ns:
            return None
        return (self.option.outcome.compute_ns - self.bound_ns) / self.bound_ns


@dataclass(frozen=True)
class Pareto:
    """The answers to all budgets, in the order in which they were asked."""

    answers: tuple[Answer, ...]

    @property
    def options(self) -> tuple[Option, ...]:
        """What no other option beats, fastest first."""
        return front(each.option for each in self.answers if each.option is not None)


def front(options: Iterable[Option]) -> tuple[Option, ...]:
    """The options that no other one beats, fastest first."""
    left: list[Option] = []
    for each in sorted(options, key=_ranked):
        if not any(other.beats(each) for other in left):
            left.append(each)
    return tuple(left)


def _ranked(option: Option) -> tuple[int, int, int]:
    found = option.outcome
    return found.compute_ns, found.saved_bytes, found.peak_bytes
