"""The task of a launch, of which a rank builds what it hosts."""

from __future__ import annotations

import gc
import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from pipeplan.capture.layer_costs.optimizer_cost import check_optimizing
from pipeplan.errors import InputError
from pipeplan.filling import fill
from pipeplan.hosting import Draft
from pipeplan.launch.options import LaunchOptions
from pipeplan.plan import Plan
from pipeplan.repeat import check_data, seed_all
from pipeplan.runtime.transport.torchrun_env import TorchrunEnv
from pipeplan.split_model import SplitModel
from pipeplan.task import Task, maker, maker_named


@dataclass(frozen=True, slots=True)
class Loaded:
    """A task for one rank."""

    task: Task
    split: SplitModel
    data: str
    """A fingerprint of the first micro-batches."""
    witness: Mapping[str, str]
    """See `hosting.Hosted`."""


def loaded(
    plan: Plan, options: LaunchOptions, place: TorchrunEnv, seed: int, *, resumes: bool
) -> Loaded:
    """The task and its layers, with memory for those of this rank.

    Values follow from the seed, or come from the task's `weights`; a checkpoint's come later.

    Args:
        plan: what is executed.
        options: name the task; a dry run needs no memory.
        place: this rank.
        seed: of the weights.
        resumes: whether a checkpoint follows.

    Raises:
        InputError: if the task is none, cannot be made, is not the plan's, or has no values.
    """
    torch.set_num_threads(1)
    gc.freeze()  # torch's own objects, or each collection of garbage searches them all
    make = _maker(plan, options, seed)

    def anew() -> Task:
        seed_all(seed)
        return make()

    def say(text: str) -> None:
        print(f"rank {place.rank}: {text}", file=sys.stderr, flush=True)

    draft = Draft(anew, plan, say, evaluates=options.validate_every is not None)
    data = check_data(draft.task)
    if options.dry_run:
        check_optimizing(draft.task, draft.split)
        return Loaded(draft.task, draft.split, data, {})
    reads = draft.task.weights is not None and not resumes
    gpu = place.rank % len(plan.cluster.gpus)
    hosted = draft.hosted(gpu, seeded=not resumes and not reads, rest=place.rank == 0)
    if reads:
        fill(hosted, plan, gpu, rest=place.rank == 0)
    return Loaded(hosted.task, hosted.split, data, hosted.witness)


def _maker(plan: Plan, options: LaunchOptions, seed: int) -> Callable[[], Task]:
    """What makes the task that the user names, or the plan, which may name fewer."""
    if options.task is not None:
        return maker(options.task, seed)
    named = plan.chain.task
    if named is None:
        raise InputError(
            f"launch: {options.plan} names no task (its chain was not profiled)."
            " Give --task package.module:function"
        )

    def repeated(task: str) -> str:
        words = shlex.join([*options.words, "--task", task])
        size = len(plan.cluster.gpus) * options.replicas
        return f"torchrun --nproc-per-node {size} -m pipeplan.launch {words}"

    return maker_named(named, seed, file=str(options.plan), repeated=repeated)
