"""Bytes of a GPU, term by term: the data that predictions and measurements share.

The simulator's ledger makes such values of a plan, the run's counting of storages makes them of a
step that it samples, and `report` puts them beside each other. Only the data are common.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from pipeplan.document import Count, Document, Positive, Record


class Purpose(StrEnum):
    """What bytes are for; equation numbers are those of docs/reference/model.md.

    F and B at the end of a name say which way a tensor goes: an activation on, a gradient back.
    A tensor belongs to the stage that made it while it waits to be handed on, and to the stage
    that takes it while it arrives.
    """

    WEIGHTS = "weights"
    """The newest version, (M1)."""
    OLDER_WEIGHTS = "older_weights"
    """The version before it, under 2bw."""
    GRADIENTS = "gradients"
    WAITING_GRADIENTS = "waiting_gradients"
    """Room for those of the next step, where updates wait for other stages."""
    OPTIMIZER = "optimizer"
    """Optimizer state, master weights, frozen parameters, buffers."""
    UPDATE = "update"
    """Workspace of the optimizer, W(s)."""
    SAVED = "saved"
    """Kept for the backward, (M2)."""
    SAVED_FOR_W = "saved_for_w"
    """Kept between the two halves of a split backward, (S3)."""
    WORK_F = "work_f"
    """More than what is saved while the operation runs, (M3), (S4), (S5)."""
    WORK_B = "work_b"
    WORK_I = "work_i"
    WORK_W = "work_w"
    DIRECT_F = "direct_f"
    """Between two stages of the GPU, (M4)."""
    DIRECT_B = "direct_b"
    SENT_F = "sent_f"
    """Until the message has left, (M5)."""
    SENT_B = "sent_b"
    RECEIVED_F = "received_f"
    """From the post of the receive to the operation that uses it, (M5)."""
    RECEIVED_B = "received_b"
    OTHER = "other"
    """Of a measurement: what no term of the model is for."""


class Term(Record):
    """`count` times `each_bytes` of one stage: of so many micro-batches, messages or storages."""

    purpose: Purpose
    stage: Count
    each_bytes: Count
    count: Positive = 1

    @property
    def size(self) -> int:
        """All its bytes."""
        return self.each_bytes * self.count


class Instant(Record):
    """What a GPU holds at one instant; the terms add up to all of it."""

    time_ns: Count
    """Since the period of the plan, or the measured step, began."""
    action: str
    """`1B3` while it runs, or `end of 1B3`; empty where nothing happens on the GPU."""
    terms: tuple[Term, ...]

    @property
    def size(self) -> int:
        """Bytes of all terms."""
        return sum(term.size for term in self.terms)

    @property
    def kind(self) -> str:
        """Stage and kind of the action, without micro-batch and end: `1B`."""
        return self.action.removeprefix("end of ").rstrip("0123456789")

    def by_purpose(self) -> dict[tuple[int, Purpose], int]:
        """Bytes of each purpose of each stage."""
        found: dict[tuple[int, Purpose], int] = {}
        for term in self.terms:
            key = term.stage, term.purpose
            found[key] = found.get(key, 0) + term.size
        return found


class Curve(Record):
    """Bytes over time, stacked by purpose."""

    purposes: tuple[Purpose, ...] = ()
    times_ns: tuple[Count, ...] = ()
    """In order; what is held from then on."""
    sizes: tuple[tuple[Count, ...], ...] = ()
    """At each time the bytes of each purpose."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if len(self.sizes) != len(self.times_ns):
            raise ValueError(
                f"sizes: got {len(self.sizes)} instants, need {len(self.times_ns)}, one per time"
            )
        for index, row in enumerate(self.sizes):
            if len(row) != len(self.purposes):
                raise ValueError(
                    f"sizes[{index}]: got {len(row)} numbers, need {len(self.purposes)},"
                    " one per purpose"
                )
        return self

    @classmethod
    def of(cls, rows: Sequence[tuple[int, Mapping[Purpose, int]]]) -> Curve:
        """Times in ns with bytes by purpose; a purpose that is 0 everywhere is left out."""
        used = [each for each in Purpose if any(row.get(each) for _, row in rows)]
        return cls(
            purposes=tuple(used),
            times_ns=tuple(time for time, _ in rows),
            sizes=tuple(tuple(row.get(each, 0) for each in used) for _, row in rows),
        )


class GpuTerms(Record):
    """What one GPU holds: at the worst instant of each of its kinds of action, and over time."""

    instants: Annotated[tuple[Instant, ...], Field(min_length=1)]
    """The largest first, the earlier one of equals; no two of one `kind`."""
    host: tuple[Term, ...] = ()
    """What waits in the host's memory when that is most; no part of the GPU's bytes."""
    curve: Curve = Curve()

    @property
    def peak(self) -> Instant:
        """When it holds most."""
        return self.instants[0]

    @property
    def following(self) -> Instant | None:
        """The largest instant of another action than the peak's."""
        return self.instants[1] if len(self.instants) > 1 else None

    @property
    def host_size(self) -> int:
        """The most bytes in the host's memory at once."""
        return sum(term.size for term in self.host)

    def like(self, other: Instant) -> Instant:
        """The peak; of several instants as large the one of the same kind of action as `other`."""
        equal = (each for each in self.instants if each.size == self.peak.size)
        return next((each for each in equal if each.kind == other.kind), self.peak)


class Room(Record):
    """A GPU of the report, and what it has for plans."""

    name: str
    memory_bytes: Count
    reserve_bytes: Count
    """Of it, what no plan may use (M8)."""
    measured_reserve_bytes: Count | None = None
    """The most that the allocator kept beyond tensors in a run; None where nobody asked it."""
    plan_peak_bytes: Count | None = None
    """The plan's own peak where the terms add up to less: they count riding tensors once (M9)."""
    lower: str = ""
    """What would have to change for a peak 10 % lower, for people."""

    @property
    def budget_bytes(self) -> int:
        """What plans may use."""
        return self.memory_bytes - self.reserve_bytes


class StagePlace(Record):
    """The layers of a stage, [first, last], and its GPU."""

    gpu: Count
    layers: tuple[Count, Count]


class MemoryReport(Document):
    """Each GPU's bytes, term by term: as a plan predicts them and, of a run, as measured."""

    format: Literal["pipeplan-memory/1"] = "pipeplan-memory/1"
    plan_digest: str
    semantics: Literal["2bw", "flush"]
    memory_model: Literal["exact", "paper"]
    gpus: Annotated[tuple[Room, ...], Field(min_length=1)]
    stages: tuple[StagePlace, ...]
    predicted: tuple[GpuTerms, ...]
    """One of each GPU."""
    measured: tuple[GpuTerms | None, ...] = ()
    """One of each GPU; None where nothing was counted. Empty of a plan alone."""
    step: Positive | None = None
    """The optimizer step that was measured, the run's first one being 1."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        """One entry per GPU; stages and terms point somewhere."""
        gpus = len(self.gpus)
        for where, values in (("predicted", self.predicted), ("measured", self.measured)):
            if len(values) != gpus and (values or where == "predicted"):
                raise ValueError(f"{where}: got {len(values)} GPUs, need {gpus}")
            for gpu, memory in enumerate(values):
                for term in _terms(memory):
                    if term.stage >= len(self.stages):
                        raise ValueError(
                            f"{where}[{gpu}]: got a term of stage {term.stage}, need one below"
                            f" {len(self.stages)}"
                        )
        for index, stage in enumerate(self.stages):
            if stage.gpu >= gpus:
                raise ValueError(f"stages[{index}].gpu: got {stage.gpu}, need one below {gpus}")
        return self


def _terms(memory: GpuTerms | None) -> Iterable[Term]:
    if memory is not None:
        yield from (term for instant in memory.instants for term in instant.terms)
        yield from memory.host


Key = tuple[Purpose, int, int]
"""Purpose, stage, bytes of each."""


def counted(found: Iterable[Key]) -> tuple[Term, ...]:
    """Terms of single things, equal ones together; by stage, then in the order of purposes.

    Args:
        found: one entry per thing; those without bytes are left out.
    """
    counts: dict[Key, int] = {}
    for key in found:
        if key[2]:
            counts[key] = counts.get(key, 0) + 1
    return terms_of(counts)


def terms_of(counts: Mapping[Key, int]) -> tuple[Term, ...]:
    """Terms by stage, then in the order of purposes, the largest things first.

    Args:
        counts: how often each thing is there.
    """
    order = {purpose: place for place, purpose in enumerate(Purpose)}
    keys = sorted(counts, key=lambda key: (key[1], order[key[0]], -key[2]))
    return tuple(
        Term(purpose=key[0], stage=key[1], each_bytes=key[2], count=counts[key]) for key in keys
    )
