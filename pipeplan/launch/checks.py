"""Everything that can be wrong, checked on each rank before any process group is made."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from pipeplan import lowering, taskref, verifier
from pipeplan.errors import InputError
from pipeplan.launch.options import LaunchOptions
from pipeplan.plan import Plan
from pipeplan.program import Pattern
from pipeplan.runtime.startup.host_memory import check_host_room
from pipeplan.runtime.transport.torchrun_env import TorchrunEnv
from pipeplan.split_model import SplitModel
from pipeplan.task import Task
from pipeplan.units import counted, format_bytes, format_ns

if TYPE_CHECKING:
    import torch

    from pipeplan.runtime.checkpoint.storage import CheckpointMeta


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """A run that can begin."""

    options: LaunchOptions
    plan: Plan
    pattern: Pattern
    task: Task
    split: SplitModel
    device: torch.device
    """Where this rank computes."""
    task_digest: str
    data: str
    """A fingerprint of the first micro-batches."""
    witness: Mapping[str, str]
    """Fingerprints of first weights, those of other ranks among them."""
    seed: int
    checkpoint: Path | None
    """What to go on from."""
    first_step: int
    drawn: int
    """Micro-batches of the data that the steps before used."""
    remarks: tuple[str, ...]
    """What to say about the checkpoint."""


def prepare(options: LaunchOptions, place: TorchrunEnv) -> Setup:
    """Read, verify, lower, load and compare everything the run needs.

    Raises:
        InputError: if a file, flag, task, world size or directory is wrong.
        InvalidPlanError: if the plan breaks a rule.
        DeadlockError: if its program could not end.
    """
    options = _after_restart(options, place)
    plan, pattern = planned_run(options, place)
    begun = _begun(options)
    meta = begun.meta
    _check_resume(plan, options, meta)
    seed = options.seed or 0 if meta is None else meta.seed
    from pipeplan.launch.followable import check_followed
    from pipeplan.launch.loading import loaded
    from pipeplan.runtime.startup.gpu_memory import GpuMemory
    from pipeplan.runtime.transport.backend import Machine, check_current, device_of, take_gpu

    machine = Machine.here()
    machine.check(options.backend)
    take_gpu(place, machine)
    found = loaded(plan, options, place, seed, resumes=meta is not None)
    device = device_of(found.split)
    check_current(device, "task", "Say `cuda` without a number: each rank has its own GPU.")
    if room := GpuMemory.of(device):
        room.check(plan, place.rank % len(plan.cluster.gpus))
    _check_same_task(options, meta, found.split.digest())
    _check_counted(options, found.split)
    check_followed(options, found.task)
    return Setup(
        options=options,
        plan=plan,
        pattern=pattern,
        task=found.task,
        split=found.split,
        device=device,
        task_digest=found.split.digest(),
        data=found.data,
        witness=found.witness,
        seed=seed,
        checkpoint=begun.path,
        first_step=meta.step if meta else 0,
        drawn=meta.used if meta else 0,
        remarks=(*begun.remarks, *_changes(meta, found.task)),
    )


def foreign_task(options: LaunchOptions) -> str | None:
    """The task that a dry run leaves alone: one that only the plan names, and is not ours."""
    plan = Plan.read(options.plan)
    named = plan.chain.task
    if options.task is not None or named is None or taskref.parsed(named).own:
        return None
    return named


def check_without_task(options: LaunchOptions, place: TorchrunEnv) -> Plan:
    """The plan, checked as `prepare` does but for all that needs the task.

    Raises:
        InputError: as `prepare` does, like the other errors.
        InvalidPlanError: if the plan breaks a rule.
        DeadlockError: if its program could not end.
    """
    plan, _ = planned_run(options, place)
    _check_resume(plan, options, _begun(options).meta)
    return plan


def planned_run(options: LaunchOptions, place: TorchrunEnv) -> tuple[Plan, Pattern]:
    """The plan and its program, for these ranks: all that a dry run needs.

    Raises:
        InputError: if a file, the world size or the output directory is wrong.
        InvalidPlanError: if the plan breaks a rule.
        DeadlockError: if its program could not end.
    """
    plan = Plan.read(options.plan)
    verifier.check(plan, str(options.plan))
    pattern = lowering.lower(plan)
    lowering.check_deadlock(pattern)
    _check_size(plan, options, place)
    check_host_room(plan, place, options.replicas)
    _check_out(options, place)
    return plan, pattern


def rank_table(plan: Plan, unloaded: str | None = None, replicas: int = 1) -> str:
    """What each rank hosts and how many bytes it is predicted to hold at most, for people.

    The last line begins with the number of ranks to start, which the recipes read.

    Args:
        plan: that would run.
        unloaded: the task that nothing was checked of.
        replicas: pipelines side by side; ranks of all but the first are as those of the first.
    """
    names = [layer.name for layer in plan.chain.layers]
    away = any(row.host_bytes for row in plan.memory)
    on_host = f"{'on the host':>14}  " if away else ""
    lines = [f"{'rank':>4}  {'predicted peak':>14}  {on_host}stages: layers"]
    for gpu, row in enumerate(plan.memory):
        hosted = "; ".join(
            f"{stage.id}: {' .. '.join(dict.fromkeys((names[stage.first], names[stage.last])))}"
            for stage in plan.hosted(gpu)
        )
        on_host = f"{format_bytes(row.host_bytes):>14}  " if away else ""
        peak = format_bytes(row.peak_bytes)
        lines.append(f"{gpu:>4}  {peak:>14}  {on_host}{hosted or 'none'}")
    ranks = len(plan.cluster.gpus) * replicas
    lines.append(
        f"{counted(ranks, 'rank')}: {plan.semantics},"
        f" {counted(plan.microbatches, 'micro-batch')} per step,"
        f" period {format_ns(plan.period_ns)} (k = {plan.k}). {_passed(unloaded)}"
    )
    return "\n".join(lines)


def _passed(unloaded: str | None) -> str:
    if unloaded is None:
        return "All checks passed."
    return (
        "All checks passed but those of the task: a dry run loads none that only a file names."
        f" Add --task {shlex.quote(unloaded)} to check it, too."
    )


def _check_size(plan: Plan, options: LaunchOptions, place: TorchrunEnv) -> None:
    gpus, replicas = len(plan.cluster.gpus), options.replicas
    need = gpus * replicas
    if place.size == need or (options.dry_run and not place.launched):
        return
    raise InputError(
        f"launch: got {counted(place.size, 'rank')}, need {need}, one per GPU of {options.plan}"
        + (f" and replica: {gpus} x {replicas}" if replicas > 1 else "")
        + f". Run torchrun --nproc-per-node {need} -m pipeplan.launch {shlex.join(options.words)}"
    )


def _after_restart(options: LaunchOptions, place: TorchrunEnv) -> LaunchOptions:
    """A rank that torchrun restarted goes on from what an attempt before it saved, if any."""
    if not place.attempt or options.out is None:
        return options
    from pipeplan.runtime.checkpoint.storage import has_checkpoint

    return replace(options, resume=options.out) if has_checkpoint(options.out) else options


def _check_out(options: LaunchOptions, place: TorchrunEnv) -> None:
    from pipeplan.runtime.checkpoint.storage import has_checkpoint

    out = options.out
    if out is None or place.attempt:
        return
    parent = next(folder for folder in (out, *out.absolute().parents) if os.path.lexists(folder))
    if not parent.is_dir():
        kind = "a file" if parent.exists() else "a link to nothing"
        raise InputError(f"--out {out}: {parent} is {kind}, need a directory")
    if out.is_dir() and any(out.iterdir()) and out != options.resume:
        further = f", or go on with --resume {out}" if has_checkpoint(out) else ""
        raise InputError(
            f"--out {out}: is not empty and nothing is ever overwritten."
            f" Choose another directory{further}"
        )
    if not os.access(parent, os.W_OK):
        raise InputError(f"--out {out}: {parent} cannot be written to. Choose another directory.")


@dataclass(frozen=True, slots=True)
class _Begun:
    """What an earlier run left to go on from, if it is asked for."""

    path: Path | None = None
    meta: CheckpointMeta | None = None
    remarks: tuple[str, ...] = ()


def _begun(options: LaunchOptions) -> _Begun:
    if options.resume is None:
        return _Begun()
    from pipeplan.runtime.checkpoint.storage import latest, passed_over, read_meta

    path = latest(options.resume)
    meta, remarks = read_meta(path), passed_over(options.resume, path)
    if _lacks_results(options, meta):
        remarks.append(f"all {meta.step} steps are done and saved: the results are written")
    return _Begun(path, meta, tuple(remarks))


def _check_resume(plan: Plan, options: LaunchOptions, meta: CheckpointMeta | None) -> None:
    if meta is None:
        return
    planned = f"--semantics {meta.semantics} --microbatches {meta.microbatches}"
    same_plan = f"Make the plan with pipeplan plan {planned}."
    seed = meta.seed if options.seed is None else options.seed
    pairs = (
        ("semantics", meta.semantics, plan.semantics, same_plan),
        ("micro-batches per step", meta.microbatches, plan.microbatches, same_plan),
        ("seed", meta.seed, seed, "Leave out --seed."),
    )
    for name, stored, wanted, step in pairs:
        _check_same(options, name, stored, wanted, step)
    if meta.step >= options.steps and not _lacks_results(options, meta):
        raise InputError(
            f"--resume {options.resume}: {meta.step} steps are done, and --steps {options.steps}"
            " is the total. Give a larger --steps."
        )


def _check_same_task(
    options: LaunchOptions, meta: CheckpointMeta | None, task_digest: str
) -> None:
    if meta is not None:
        step = "Resume with the same task."
        _check_same(options, "task digest", meta.task_digest, task_digest, step)


def _changes(meta: CheckpointMeta | None, task: Task) -> list[str]:
    """What a resumed run trains with otherwise than before."""
    from pipeplan.runtime.checkpoint.recipe import differences, recipe

    return differences(meta.recipe, recipe(task)) if meta else []


def _check_counted(options: LaunchOptions, split: SplitModel) -> None:
    """Refuse to count bytes that cannot be seen."""
    if options.instrument and split.compile:
        raise InputError(
            f"launch: --instrument: got a task that is compiled ({split.compile}), need one that"
            " is not: what compiled code takes is no operation's and would not be counted. Leave"
            " it out; on a GPU run.json has the allocator's own peak (allocated_bytes)."
        )


def _lacks_results(options: LaunchOptions, meta: CheckpointMeta) -> bool:
    """Whether all steps are done and saved, and the run ended before it had written the rest."""
    out = options.out
    if out is None or out != options.resume or meta.step != options.steps:
        return False
    try:
        told = json.loads((out / "run.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return True
    written = isinstance(told, dict) and told.get("complete") and told.get("steps") == meta.step
    return not written or not (out / "model.pt").is_file()


def _check_same(
    options: LaunchOptions, name: str, stored: object, wanted: object, step: str
) -> None:
    if stored != wanted:
        raise InputError(
            f"--resume {options.resume}: its {name} is {stored}, this run's is {wanted}. {step}"
        )
