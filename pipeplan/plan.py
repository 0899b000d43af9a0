"""The plan: the periodic decision for one chain on one cluster. Data only.

Which rules a plan must keep is the verifier's business; this module only guarantees that the file
is well-formed and that indices point somewhere.
"""

from __future__ import annotations

from enum import StrEnum
from fractions import Fraction
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from pipeplan.chain import Chain
from pipeplan.cluster import Cluster
from pipeplan.document import Count, Document, Positive, Record
from pipeplan.units import MAX_INT

Semantics = Literal["2bw", "flush"]
MemoryModel = Literal["exact", "paper"]
Rational = tuple[Count, Positive]
"""[numerator, denominator]; need not be reduced."""

MAX_SHIFT = 1_000_000
"""Periods that a plan may put between its first and its last op: what unrolls it stays finite."""


class OpKind(StrEnum):
    """What a periodic op does.

    A backward B is one op, or two: I gives the gradients of activations, W those of weights.
    SEND_F carries a stage's output on, SEND_B its input's gradient; OFFLOAD takes what a stage
    keeps for its backward to the host, PREFETCH brings it back.
    """

    F = "F"
    B = "B"
    I = "I"  # noqa: E741  the literature's letter
    W = "W"
    SEND_F = "SEND_F"
    SEND_B = "SEND_B"
    OFFLOAD = "OFFLOAD"
    PREFETCH = "PREFETCH"

    @property
    def is_compute(self) -> bool:
        """Whether it runs on a GPU."""
        return self in (OpKind.F, OpKind.B, OpKind.I, OpKind.W)

    @property
    def is_send(self) -> bool:
        """Whether it runs on a link between two GPUs."""
        return self in (OpKind.SEND_F, OpKind.SEND_B)

    @property
    def is_host(self) -> bool:
        """Whether it runs on the way between a GPU and the host."""
        return self in (OpKind.OFFLOAD, OpKind.PREFETCH)


LayerRanges = tuple[tuple[Count, Count], ...]
"""Pairs in chain order: runs of layers [first, last], or [layer, option] in `Remat.programs`."""


def outermost(runs: LayerRanges) -> LayerRanges:
    """Those that lie in no other; each stands before those inside it."""
    found: list[tuple[int, int]] = []
    for run in runs:
        if not found or run[0] > found[-1][1]:
            found.append(run)
    return tuple(found)


def inside(runs: LayerRanges, outer: tuple[int, int]) -> LayerRanges:
    """Those that lie in `outer`, itself left out."""
    return tuple(run for run in runs if run != outer and outer[0] <= run[0] <= outer[1])


MOST_NESTED = 300
"""Recomputed runs that lie in each other at most: each may begin one layer behind the last."""


class Remat(Record):
    """What a stage does not keep on its GPU from forward to backward (docs/reference/model.md §4).

    recompute: of each of these runs of layers the forward keeps only the input, and the backward
        begins with running it again, (V1) to (V4). A run that lies in another one, and ends
        before it does, stands behind it: each time the outer one is computed again, the inner
        one keeps only its input.
    offload: what lies between the ends of these runs waits in the host's memory, (H1) to (H7).
    offload_input: whether what is saved of the stage's input, by its first layer or run, waits
        there as well, (H1).
    programs: [layer, option] of layers that run a device program, (V5).
    """

    recompute: LayerRanges = ()
    offload: Annotated[LayerRanges, Field(exclude_if=lambda runs: not runs)] = ()
    offload_input: bool = Field(default=False, exclude_if=lambda leaves: not leaves)
    programs: Annotated[LayerRanges, Field(exclude_if=lambda pairs: not pairs)] = ()

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.recompute and not self.offloads and not self.programs:
            need = "need a run in recompute or offload, offload_input, a pair in programs"
            raise ValueError(f"got nothing, {need}, or no remat")
        ends: list[int] = []
        for first, last in self.recompute:
            while ends and ends[-1] < first:
                ends.pop()
            ends.append(last)
            if len(ends) > MOST_NESTED:
                raise ValueError(f"got runs in runs, more than {MOST_NESTED} deep")
        return self

    @property
    def offloads(self) -> bool:
        """Whether anything of the stage waits in the host's memory."""
        return bool(self.offload) or self.offload_input


class Stage(Record):
    """Consecutive layers on one GPU, executed back to back. `layers` is [first, last], 0-based."""

    id: Count
    layers: tuple[Count, Count]
    gpu: Count
    remat: Remat | None = None
    split_backward: bool = Field(default=False, exclude_if=lambda split: not split)
    """Whether its backward is two ops, I and W, (S1) to (S5)."""
    states: Literal["gpu", "host"] = Field(default="gpu", exclude_if=lambda where: where == "gpu")
    """Where its optimizers' states are and its update runs, (U1) to (U7)."""

    @property
    def first(self) -> int:
        """First layer, 0-based."""
        return self.layers[0]

    @property
    def last(self) -> int:
        """Last layer, 0-based, inclusive."""
        return self.layers[1]

    @property
    def offloads(self) -> bool:
        """Whether micro-batches may have OFFLOAD and PREFETCH of the stage."""
        return self.remat is not None and self.remat.offloads

    @property
    def backward(self) -> OpKind:
        """The op that consumes the output's gradient and gives the input's: B, or I if split."""
        return OpKind.I if self.split_backward else OpKind.B


class Op(Record):
    """One periodic op: micro-batch m = copy + k*j starts at (j + shift) * period + start.

    `link` is (from, to) of a SEND; all others have the `gpu` they run on, or whose way to the host
    they take.
    """

    kind: OpKind
    stage: Count
    copy_: Annotated[int, Field(ge=0, le=MAX_INT, alias="copy")]
    gpu: Count | None = None
    link: tuple[Count, Count] | None = None
    start_ns: Count
    duration_ns: Count
    shift: Annotated[int, Field(ge=0, le=MAX_SHIFT)]

    @property
    def label(self) -> str:
        """`2F0`: stage, kind, copy."""
        return f"{self.stage}{self.kind}{self.copy_}"


class MemoryRow(Record):
    """Bytes of one GPU at the first instant of its largest total (docs/reference/model.md, M6)."""

    gpu: Count
    states_bytes: Count
    saved_bytes: Count
    working_bytes: Count
    direct_bytes: Count
    message_bytes: Count
    peak_bytes: Count
    budget_bytes: Count
    host_bytes: Annotated[int, Field(ge=0, le=MAX_INT, exclude_if=lambda size: not size)] = 0
    """The most that is in the host's memory at once (H7), (U4), whenever that is."""


class Bounds(Record):
    """Proven lower bounds on the period per micro-batch in ns; None where nothing was proven.

    `any` holds for every plan, `k1` for 1F1B plans (k = 1), `contiguous` for contiguous ones.
    """

    any: Rational | None = None
    k1: Rational | None = None
    contiguous: Rational | None = None


class Improvement(Record):
    """A better plan or a higher bound that the search found."""

    work_s: Annotated[float, Field(ge=0)]
    """Seconds of the time limit that were used; work where the search was deterministic."""
    strategy: str
    """The strategy or prover that ran."""
    period_ns: Rational | None = None
    """The best plan's, per micro-batch; None as long as there is none."""
    bound_ns: Rational | None = None
    """The bound that the gap uses, per micro-batch."""


class Solver(Record):
    """Who made the plan and what is proven about it."""

    status: Literal["optimal", "feasible"] = "feasible"
    bounds: Bounds = Bounds()
    gap: Annotated[float, Field(ge=0)] | None = None
    """(period per micro-batch - bound) / bound, with the bound for all the flags allow."""
    gap_bound: Literal["any", "k1", "contiguous"] = "any"
    most_microbatches: Positive | None = Field(default=None, exclude_if=lambda most: most is None)
    """The bounds hold for plans of at most so many micro-batches per step; None: of any number."""
    pins: tuple[tuple[Count, Count], ...] = Field(default=(), exclude_if=lambda pins: not pins)
    """(layer, GPU) of layers whose GPU was given; the bounds hold for plans with these pins."""
    seconds: Annotated[float, Field(ge=0)] = 0.0
    seed: Count = 0
    version: str = ""
    method: str = ""
    contiguous_period_ns: Rational | None = None
    """The best contiguous plan found beside this one, in ns per micro-batch."""
    notes: tuple[str, ...] = ()
    history: tuple[Improvement, ...] = Field(default=(), exclude_if=lambda steps: not steps)
    """Every better plan and every higher bound, in the order they were found."""


class Plan(Document):
    """Stages, their GPUs, and when each op of the period starts."""

    format: Literal["pipeplan-plan/1"] = "pipeplan-plan/1"
    chain: Chain
    chain_digest: str
    task_digest: str | None = None
    cluster: Cluster
    semantics: Semantics = "2bw"
    microbatches: Positive = 8
    """Micro-batches per optimizer step."""
    memory_model: MemoryModel = "exact"
    k: Annotated[int, Field(ge=1, le=1024)] = 1
    period_ns: Positive
    """Of k micro-batches."""
    step_ns: Count
    stages: Annotated[tuple[Stage, ...], Field(min_length=1)]
    ops: tuple[Op, ...]
    memory: tuple[MemoryRow, ...]
    solver: Solver = Solver()

    @property
    def period_per_microbatch(self) -> Fraction:
        """Nanoseconds of the period that one micro-batch takes."""
        return Fraction(self.period_ns, self.k)

    @property
    def recomputes(self) -> bool:
        """Whether a stage computes layers again in its backward."""
        return any(
            stage.remat is not None and (stage.remat.recompute or stage.remat.programs)
            for stage in self.stages
        )

    @property
    def splits(self) -> bool:
        """Whether a stage's backward is two ops."""
        return any(stage.split_backward for stage in self.stages)

    def hosted(self, gpu: int) -> tuple[Stage, ...]:
        """The stages on `gpu`, in chain order."""
        return tuple(stage for stage in self.stages if stage.gpu == gpu)

    @model_validator(mode="after")
    def _check(self) -> Self:
        """Indices must point somewhere; the verifier judges everything else."""
        for index, stage in enumerate(self.stages):
            _within(f"stages[{index}].gpu", stage.gpu, len(self.cluster.gpus))
            _within(f"stages[{index}].layers[1]", stage.last, len(self.chain.layers))
            if stage.first > stage.last:
                raise ValueError(
                    f"stages[{index}].layers: got {list(stage.layers)}, need first <= last"
                )
        for index, op in enumerate(self.ops):
            where = f"ops[{index}]"
            _within(f"{where}.stage", op.stage, len(self.stages))
            _within(f"{where}.copy", op.copy_, self.k)
            wanted, other = ("link", "gpu") if op.kind.is_send else ("gpu", "link")
            if getattr(op, wanted) is None or getattr(op, other) is not None:
                raise ValueError(
                    f"{where}: got {op.kind} with gpu {op.gpu} and link {op.link},"
                    f" need {wanted!r} and no {other!r}"
                )
            for gpu in op.link or (op.gpu or 0,):
                _within(f"{where}.{wanted}", gpu, len(self.cluster.gpus))
        for index, row in enumerate(self.memory):
            _within(f"memory[{index}].gpu", row.gpu, len(self.cluster.gpus))
        return self


def _within(where: str, value: int, limit: int) -> None:
    if value >= limit:
        raise ValueError(f"{where}: got {value}, need an index below {limit}")
