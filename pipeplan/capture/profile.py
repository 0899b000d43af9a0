"""Profiles the task that a reference names: measured where it is, or estimated without memory."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from pipeplan.capture.estimation.task_estimate import estimate_task
from pipeplan.capture.fake_tensors.fake_model import weightless
from pipeplan.capture.measurement.companions import companions as running_companions
from pipeplan.capture.measurement.fused_stages import measure_stages
from pipeplan.capture.measurement.task_profile import profile_task
from pipeplan.chain import Chain
from pipeplan.devices import Device
from pipeplan.errors import InputError
from pipeplan.plan import Plan
from pipeplan.repeat import seed_all
from pipeplan.stage_profile import StageProfile
from pipeplan.task import Task, load, load_named

Progress = Callable[[str], None]


def profile(
    reference: str,
    *,
    seed: int = 0,
    repeats: int = 20,
    warmup: int = 3,
    threads: int = 1,
    companions: int = 0,
    max_layers: int | None = None,
    progress: Progress | None = None,
) -> Chain:
    """The measured chain of the task that `reference` names.

    Args:
        reference: `package.module:function` or `path/to/file.py:function`.
        seed: of what the task is made from (`repeat.seed_all`), as under `launch`.
        repeats: micro-batches timed; each time is their median.
        warmup: micro-batches run before.
        threads: of torch, as many as a rank will have.
        companions: processes that run the same layers meanwhile, one for each other rank that
            will share the machine.
        max_layers: merges layers until there are no more than these (`split`).
        progress: told what happens, one line at a time.

    Raises:
        InputError: if the task cannot be loaded, split or run, or an argument is out of range.
    """
    _check(
        repeats=(repeats, 1), warmup=(warmup, 0), threads=(threads, 1), companions=(companions, 0)
    )
    with threads_of_torch(threads), contextlib.ExitStack() as stack:
        seed_all(seed)
        task = load(reference, seed)
        say = progress or (lambda _: None)
        if companions:
            say(f"starting {companions} companion process{'es' if companions > 1 else ''}")
            stack.enter_context(running_companions(companions, reference, seed, threads))
        chain = profile_task(
            task, repeats=repeats, warmup=warmup, max_layers=max_layers, progress=say
        )
    return _named(chain, reference, companions=companions, seed=seed)


def estimate(
    reference: str,
    device: Device,
    *,
    seed: int = 0,
    max_layers: int | None = None,
    progress: Progress | None = None,
) -> Chain:
    """The estimated chain of the task that `reference` names; its weights are never allocated.

    Args:
        reference: as for `profile`.
        device: what the times are for (`pipeplan.devices.find_device`).
        seed: as for `profile`.
        max_layers: merges layers until there are no more than these (`split`).
        progress: told what happens, one line at a time.

    Raises:
        InputError: if the task cannot be loaded or split, or looks at the values of weights.
    """
    seed_all(seed)
    with weightless():
        task = load(reference, seed)
    chain = estimate_task(task, device, progress, max_layers=max_layers)
    return _named(chain, reference, seed=seed)


def profile_stages(
    reference: str | None,
    plan: Plan,
    *,
    seed: int = 0,
    repeats: int = 20,
    warmup: int = 3,
    threads: int = 1,
    progress: Progress | None = None,
) -> StageProfile:
    """What the fused stages of `plan` take, for `pipeplan.stage_profile.refine`.

    Args:
        reference: the task; None for the one that the plan's chain names.
        plan: gives the stages.
        seed: as for `profile`, like what follows.
        repeats: micro-batches timed.
        warmup: micro-batches run before.
        threads: of torch.
        progress: told what happens, one line at a time.

    Raises:
        InputError: if there is no task, or it is not the plan's.
    """
    _check(repeats=(repeats, 1), warmup=(warmup, 0), threads=(threads, 1))
    if reference is None and plan.chain.task is None:
        raise InputError(
            "profile: the plan names no task (its chain was not profiled). Give TASK beside it."
        )
    with threads_of_torch(threads):
        seed_all(seed)
        task = _named_by(plan, seed) if reference is None else load(reference, seed)
        return measure_stages(task, plan, repeats=repeats, warmup=warmup, progress=progress)


def _named_by(plan: Plan, seed: int) -> Task:
    named = plan.chain.task or ""

    def repeated(task: str) -> str:
        return f"pipeplan profile {shlex.quote(task)} --stages PLAN -o STAGES"

    return load_named(named, seed, file="the plan", repeated=repeated)


def _named(chain: Chain, reference: str, **facts: int) -> Chain:
    """`chain` with the task it belongs to, and `facts` beside its device's."""
    place, _, function = reference.rpartition(":")
    return chain.model_copy(
        update={
            "name": f"{Path(place).stem if place.endswith('.py') else place}:{function}",
            "task": reference,
            "device": {**chain.device, **facts},
        }
    )


def _check(**arguments: tuple[int, int]) -> None:
    for name, (value, least) in arguments.items():
        if value < least:
            raise InputError(f"profile: {name}: got {value}, need at least {least}")


@contextlib.contextmanager
def threads_of_torch(count: int) -> Iterator[None]:
    """Inside, torch computes with `count` threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
