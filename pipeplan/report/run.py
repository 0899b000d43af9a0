"""A finished run beside its plan's promises; reads the run.json that `launch` writes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Self

from pydantic import ConfigDict, model_validator

from pipeplan.document import Document, Record
from pipeplan.errors import InputError
from pipeplan.report.remat import Share
from pipeplan.report.tables import PredictedMeasured, stage_table
from pipeplan.units import counted

if TYPE_CHECKING:
    from rich.table import Table

_LENIENT = ConfigDict(extra="ignore")
"""A run says much more than its report needs."""

PLAN = "plan.json"
"""What was run, in the folder of a run."""


class Predicted(Record):
    """What the plan promises: ns, bytes per rank, and what each stage does not keep."""

    model_config = _LENIENT
    period_ns: int
    step_ns: int
    peak_bytes: tuple[int, ...]
    times: str = "measured"
    """How the chain's times were obtained, as its `mode` says."""
    host_bytes: tuple[int, ...] = ()
    stages: tuple[Share, ...] = ()


class RunMeasurements(Record):
    """What happened; None where it was not measured."""

    model_config = _LENIENT
    period_ns: float | None
    """Best window of consecutive periods."""
    median_period_ns: float | None = None
    """Of all single periods."""
    step_ns: float | None
    peak_bytes: tuple[int | None, ...]
    """Of live tensors; only of instrumented runs."""
    allocated_bytes: tuple[int | None, ...] = ()
    reserved_bytes: tuple[int | None, ...] = ()
    """By torch's allocator; only of runs on GPUs."""
    first_loss: float | None
    last_loss: float | None


class RunMachine(Record):
    """The first rank's machine; None where a run does not tell."""

    model_config = _LENIENT
    cores: int | None = None
    ranks: int | None = None
    device: str = "cpu"


class TrainingRun(Document):
    """The part of run.json that is reported."""

    model_config = _LENIENT
    format: Literal["pipeplan-run/1"]
    semantics: Literal["2bw", "flush"]
    steps: int
    instrumented: bool
    predicted: Predicted
    measured: RunMeasurements
    host: RunMachine = RunMachine()

    @model_validator(mode="after")
    def _check(self) -> Self:
        """Numbers of ranks must be as many as there are ranks."""
        ranks = len(self.predicted.peak_bytes)
        for where, values in (
            ("measured.peak_bytes", self.measured.peak_bytes),
            ("measured.allocated_bytes", self.measured.allocated_bytes or (0,) * ranks),
            ("measured.reserved_bytes", self.measured.reserved_bytes or (0,) * ranks),
            ("predicted.host_bytes", self.predicted.host_bytes or (0,) * ranks),
        ):
            if len(values) != ranks:
                raise ValueError(
                    f"{where}: got {len(values)} numbers, need {ranks}, one of each rank"
                )
        for index, share in enumerate(self.predicted.stages):
            if share.gpu >= ranks:
                raise ValueError(
                    f"predicted.stages[{index}].gpu: got {share.gpu}, need one below {ranks}"
                )
        return self


def read(folder: str | Path) -> TrainingRun:
    """The run in the output folder of a `launch`.

    Raises:
        InputError: if the folder holds no finished run.
    """
    file = Path(folder) / "run.json"
    if not file.is_file():
        step = "Check the path. A run that failed goes on with --resume, if it has a checkpoint."
        if Path(folder).is_file():
            step = "Plans and chains are shown by pipeplan show."
        raise InputError(
            f"run {folder}: got no run.json, need the --out folder of a finished run of"
            f" pipeplan.launch. {step}"
        )
    return TrainingRun.read(file)


def comparisons(runs: Sequence[TrainingRun]) -> list[PredictedMeasured]:
    """Predicted and measured, for all that the runs measured.

    Times come from runs that were not instrumented, bytes from those that were: counting bytes
    slows a run down.
    """
    rows = (_bytes if run.instrumented else _times for run in runs)
    return [
        row for run, make in zip(runs, rows, strict=True) for row in (*make(run), *_taken(run))
    ]


def crowded(runs: Sequence[TrainingRun], titles: Sequence[str]) -> Iterator[str]:
    """What to know of measured times where ranks had to share cores."""
    for run, title in zip(runs, titles, strict=True):
        ranks, cores = run.host.ranks, run.host.cores
        if ranks and cores and ranks > cores and run.host.device == "cpu" and not run.instrumented:
            yield (
                f"{title}: {ranks} ranks shared {counted(cores, 'core')}, so its"
                " times say nothing about the plan's; bytes do"
            )


def _times(run: TrainingRun) -> Iterator[PredictedMeasured]:
    predicted, measured = run.predicted, run.measured
    how = ", predicted by an estimate" if predicted.times == "estimated" else ""
    if measured.period_ns is not None:
        name = f"{run.semantics}: period, best four in a row{how}"
        yield PredictedMeasured(name, "ns", predicted.period_ns, measured.period_ns)
    if measured.step_ns is not None:
        name = f"{run.semantics}: step, best{how}"
        yield PredictedMeasured(name, "ns", predicted.step_ns, measured.step_ns)


def _bytes(run: TrainingRun) -> Iterator[PredictedMeasured]:
    pairs = zip(run.predicted.peak_bytes, run.measured.peak_bytes, strict=True)
    for rank, (predicted, measured) in enumerate(pairs):
        if measured is not None:
            name = f"{run.semantics}: peak of rank {rank}"
            stages = tuple(share for share in run.predicted.stages if share.gpu == rank)
            yield PredictedMeasured(name, "bytes", predicted, measured, stages)


def _taken(run: TrainingRun) -> Iterator[PredictedMeasured]:
    """What the GPUs' allocators held, rounding, kernels' scratch and gaps included."""
    measured = {"allocated": run.measured.allocated_bytes, "reserved": run.measured.reserved_bytes}
    for rank, predicted in enumerate(run.predicted.peak_bytes):
        for how, sizes in measured.items():
            if sizes and (size := sizes[rank]) is not None:
                yield PredictedMeasured(
                    f"{run.semantics}: {how} on rank {rank}", "bytes", predicted, size
                )


def stage_tables(runs: Sequence[TrainingRun], titles: Sequence[str]) -> Iterator[Table]:
    """For each run whose stages compute again or offload: what, beside the bytes of its ranks.

    Of runs of one plan the instrumented one is shown, if there is one: it has measured bytes.
    """
    shown: dict[tuple[str, tuple[Share, ...]], tuple[TrainingRun, str]] = {}
    for run, title in zip(runs, titles, strict=True):
        plan = run.semantics, run.predicted.stages
        gives_up = any(share.recomputed or share.on_host for share in run.predicted.stages)
        if gives_up and (run.instrumented or plan not in shown):
            shown[plan] = (run, title)
    for run, title in shown.values():
        told, measured = run.predicted, run.measured.peak_bytes
        yield stage_table(told.stages, told.peak_bytes, measured, told.host_bytes, title)
