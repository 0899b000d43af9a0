"""Variables of the periodic scheduling model: where items sit, when their ops start.

Items are runs of layers, indivisible here; each may sit on some GPUs, among which the model
chooses.
A start is `time = position + period * shift`: the end lies in [period, 2 * period], the shift
is an integer. F of the first item starts at position `period`, with shift 0.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

from ortools.sat.python import cp_model
from ortools.sat.python.cp_model_helper import Literal as BooleanLiteral

from pipeplan.ilp.costs import CostModel
from pipeplan.ilp.symmetry import gpu_classes
from pipeplan.plan import OpKind

Linear = cp_model.LinearExpr | int
Literal = BooleanLiteral | int
"""A Boolean variable or the constant 0 or 1."""

Task = tuple[OpKind, int, int]
"""(kind, item, copy). SEND_F of item n and SEND_B of item n cross the boundaries behind and
before it."""


@dataclass(frozen=True)
class Instance:
    """What is to be scheduled.

    Attributes:
        costs: Durations and bytes.
        items: (first layer, last layer) in chain order.
        places: GPUs that each item may sit on; None leaves the allocation free, but for pins.
        k: Micro-batches per period.
        tick: Nanoseconds of one time unit; durations are rounded down.
        unit: Bytes of one memory unit; bytes are rounded down.
        most: No item may keep more micro-batches (R6); None for no limit.
    """

    costs: CostModel
    items: tuple[tuple[int, int], ...]
    places: tuple[tuple[int, ...], ...] | None = None
    k: int = 1
    tick: int = 1
    unit: int = 1
    most: int | None = None

    @cached_property
    def gpus(self) -> tuple[int, ...]:
        """GPUs to choose from; of equal ones, where all are free, no more than layers can use."""
        if self.places is not None:
            return tuple(range(self.costs.gpus))
        classes = gpu_classes(self.costs)
        return tuple(sorted(gpu for one in classes for gpu in one[: self.costs.layers]))

    @property
    def copies(self) -> range:
        """Copies of every op in a period."""
        return range(self.k)

    def allowed(self, item: int) -> tuple[int, ...]:
        """GPUs that an item may sit on: none if its layers are pinned to several."""
        first, last = self.items[item]
        pinned = set(self.costs.pinned_gpus[first : last + 1]) - {None}
        places = self.gpus if self.places is None else self.places[item]
        return tuple(gpu for gpu in places if pinned <= {gpu})

    def home(self, item: int) -> int | None:
        """The one GPU that an item may sit on, if there is just one."""
        places = self.allowed(item)
        return places[0] if len(places) == 1 else None

    def ticks(self, kind: OpKind, item: int, gpu: int, *, begins: bool) -> int:
        """Duration of F or B of an item on a GPU in ticks, rounded down.

        Only an item that `begins` a stage pays the stage's overhead.
        """
        first, last = self.items[item]
        time = self.costs.forward_ns if kind is OpKind.F else self.costs.backward_ns
        overhead = 0 if begins else self.costs.cluster.action_overhead_ns
        return (time(first, last, gpu) - overhead) // self.tick

    def send_ticks(self, kind: OpKind, item: int, source: int, target: int) -> int:
        """Duration of a send of an item in ticks."""
        first, last = self.items[item]
        if kind is OpKind.SEND_F:
            return self.costs.send_forward_ns(last, source, target) // self.tick
        return self.costs.send_backward_ns(first - 1, source, target) // self.tick


@dataclass
class Variables:
    """The variables of one model at one period."""

    instance: Instance
    period: int
    model: cp_model.CpModel = field(default_factory=cp_model.CpModel)

    def __post_init__(self) -> None:
        """Create allocation, times and orders."""
        self._same: dict[tuple[int, int], Literal] = {}
        self._both: dict[tuple[int, ...], Literal] = {}
        self.on = self._allocation()
        self.position: dict[Task, cp_model.IntVar] = {}
        self.shift: dict[Task, cp_model.IntVar] = {}
        self.before: dict[tuple[Task, Task], Literal] = {}
        self._lengths: dict[Task, Linear] = {}
        self.trips: dict[tuple[OpKind, int], Linear] = {}
        """Lengths of sends, by kind and item, that are known."""
        self.max_shift = 8 * len(self.instance.items)
        """Twice as many shifts as ops: each lasts at most a period and waits less than another."""

    def _allocation(self) -> list[list[Literal]]:
        """on[n][p]: item n sits on GPU p. Equal GPUs are taken in order if all are free."""
        instance, model = self.instance, self.model
        on = [self._row(n) for n in range(len(instance.items))]
        if instance.places is None:
            for members in gpu_classes(instance.costs):
                for one, other in pairwise(members):
                    for n in range(len(on)):
                        model.add(on[n][other] <= sum(on[m][one] for m in range(n)))
        return on

    def _row(self, item: int) -> list[Literal]:
        instance, home = self.instance, self.instance.home(item)
        every = range(instance.costs.gpus)
        if home is not None:
            return [int(gpu == home) for gpu in every]
        allowed = instance.allowed(item)
        literals = {gpu: self.model.new_bool_var(f"on_{item}_{gpu}") for gpu in allowed}
        self.model.add_exactly_one(literals.values())
        return [literals.get(gpu, 0) for gpu in every]

    def same(self, one: int, other: int) -> Literal:
        """Whether two items share a GPU."""
        if one == other:
            return 1
        key = (min(one, other), max(one, other))
        if key not in self._same:
            self._same[key] = self._new_same(*key)
        return self._same[key]

    def _new_same(self, one: int, other: int) -> Literal:
        here, there = self.instance.home(one), self.instance.home(other)
        if here is not None and there is not None:
            return int(here == there)
        literal = self.model.new_bool_var(f"same_{one}_{other}")
        for gpu in self.instance.gpus:
            first, second = self.on[one][gpu], self.on[other][gpu]
            self.model.add(first + second <= 1 + literal)
            self.model.add(first - second + literal <= 1)
            self.model.add(second - first + literal <= 1)
        return literal

    def both(self, *literals: Literal) -> Literal:
        """The conjunction as one literal."""
        if any(isinstance(each, int) and not each for each in literals):
            return 0
        free = [each for each in literals if not isinstance(each, int)]
        if not free:
            return 1
        if len(free) == 1:
            return free[0]
        key = tuple(sorted(each.index for each in free))
        if key not in self._both:
            literal = self.model.new_bool_var(f"both_{key}")
            self.model.add_bool_and(free).only_enforce_if(literal)
            self.model.add_bool_or([each.negated() for each in free] + [literal])
            self._both[key] = literal
        return self._both[key]

    def cut(self, boundary: int) -> Literal:
        """Whether items `boundary` and `boundary` + 1 sit on different GPUs."""
        together = self.same(boundary, boundary + 1)
        return 1 - together if isinstance(together, int) else together.negated()

    def add_task(self, task: Task) -> None:
        """Position and shift of one op."""
        name = f"{task[1]}{task[0]}{task[2]}"
        self.position[task] = self.model.new_int_var(0, 2 * self.period, f"s_{name}")
        self.shift[task] = self.model.new_int_var(0, self.max_shift, f"k_{name}")

    def time(self, task: Task) -> Linear:
        """Absolute start of micro-batch `copy`."""
        return self.position[task] + self.period * self.shift[task]

    def length(self, task: Task) -> Linear:
        """Ticks of a compute op on the GPU it sits on."""
        if task not in self._lengths:
            self._lengths[task] = self._new_length(task)
        return self._lengths[task]

    def _new_length(self, task: Task) -> Linear:
        home = self.instance.home(task[1])
        if home is not None:
            return self.length_on(task, home)
        lengths = {gpu: self.length_on(task, gpu) for gpu in self.instance.gpus}
        if len({str(length) for length in lengths.values()}) == 1:
            return next(iter(lengths.values()))
        length = self.model.new_int_var(0, self.period, f"d_{task}")
        for gpu, each in lengths.items():
            self.require(length == each, self.on[task[1]][gpu])
        return length

    def length_on(self, task: Task, gpu: int) -> Linear:
        """Ticks of a compute op if it sits on `gpu`: more where its item begins a stage."""
        kind, item, _ = task
        low, high = (
            self.instance.ticks(kind, item, gpu, begins=begins) for begins in (False, True)
        )
        cut = 1 if item == 0 else self.cut(item - 1)
        return low + (high - low) * cut if high > low else low

    def require(self, relation: cp_model.BoundedLinearExpression | bool, *where: Literal) -> None:
        """Add a relation that holds where all literals do: never if one is the constant 0."""
        if any(isinstance(each, int) and not each for each in where):
            return
        constraint = self.model.add(relation)
        free = [each for each in where if not isinstance(each, int)]
        if free:
            constraint.only_enforce_if(free)
