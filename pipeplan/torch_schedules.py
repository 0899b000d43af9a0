"""The schedules of torch.distributed.pipelining as lists, made by torch's own classes.

A class makes its action lists when it is constructed, from the number of stages, ranks and
micro-batches alone, so stages without a model and without processes do. torch is looked at only
when lists are asked for. GPipe, 1F1B and interleaved 1F1B are the same as those of
`pipeplan.baselines` and not repeated here (a test compares them).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

from pipeplan.baselines.interleaved import looped_gpus, v_gpus
from pipeplan.baselines.listed import ListedOp, ListedSchedule
from pipeplan.errors import InputError
from pipeplan.plan import OpKind

_COMPUTES = {kind.value: kind for kind in (OpKind.F, OpKind.B, OpKind.I, OpKind.W)}


def torch_lists(
    gpus: int, microbatches: int, name: str, stages_per_gpu: int
) -> list[list[ListedOp]]:
    """What each rank computes, in order, as `Schedule<name>` of the installed torch has it.

    A forward and a backward that the class lets overlap follow each other, as its runtime has it
    without an overlap function. Each kind of op of a stage is numbered in the order of its list
    (R5): looped BFS runs backwards in the opposite order, which takes the same time and bytes.

    Args:
        gpus: ranks.
        microbatches: per step.
        name: of the class without `Schedule`.
        stages_per_gpu: 1 where the class takes one stage.

    Raises:
        InputError: if torch is missing, has no such class or another interface, or if the class
            is not made for so many micro-batches.
    """
    try:
        from torch.distributed.pipelining import schedules
    except ImportError as error:
        raise InputError(
            f"{name}: got no torch here ({error}), need torch with torch.distributed:"
            " pip install 'pipeplan[run]'"
        ) from error
    try:
        made = getattr(schedules, f"Schedule{name}")
        stage = SimpleNamespace(
            num_stages=gpus * stages_per_gpu, group_size=gpus, group_rank=0, submod=None
        )
        single = issubclass(made, schedules.PipelineScheduleSingle)
        order = made(stage if single else [stage] * stages_per_gpu, microbatches).pipeline_order
        return [list(_in_order(_computes(order[rank]))) for rank in range(gpus)]
    except ValueError as error:
        raise InputError(f"{name}: {error}") from error
    except (AttributeError, TypeError, KeyError) as error:
        raise InputError(
            f"{name}: got {error!r} from {schedules.__name__}, need its classes as torch 2.13 has"
            " them. Install that torch to compare with this schedule."
        ) from error


def _computes(actions: Iterable[Any]) -> Iterator[tuple[OpKind, int]]:
    """Kind and stage of each compute; torch's idle slots, messages and reductions are none."""
    for action in actions:
        if action is None:
            continue
        if action.sub_actions is not None:
            yield from _computes(action.sub_actions)
        elif (kind := _COMPUTES.get(action.computation_type.value)) is not None:
            yield kind, action.stage_index


def _in_order(computes: Iterable[tuple[OpKind, int]]) -> Iterator[ListedOp]:
    """The computes with micro-batches by number of F, of I and of W; B is both of the latter."""
    passed: Counter[tuple[OpKind, int]] = Counter()
    for kind, stage in computes:
        counted = (OpKind.I, OpKind.W) if kind is OpKind.B else (kind,)
        yield kind, stage, passed[counted[0], stage]
        passed.update((each, stage) for each in counted)


def _looped(name: str) -> tuple[ListedSchedule, ...]:
    return tuple(
        ListedSchedule(
            partial(torch_lists, name=name, stages_per_gpu=count),
            partial(looped_gpus, chunks=count),
            f"{count} stages per GPU",
        )
        for count in (2, 3, 4)
    )


def _v_shaped(name: str) -> tuple[ListedSchedule, ...]:
    return (ListedSchedule(partial(torch_lists, name=name, stages_per_gpu=2), v_gpus),)


TORCH_SCHEDULES = {
    "torch, looped BFS": _looped("LoopedBFS"),
    "torch, interleaved zero bubble": _looped("InterleavedZeroBubble"),
    "torch, ZBV": _v_shaped("ZBVZeroBubble"),
    "torch, DualPipeV": _v_shaped("DualPipeV"),
}
"""By the name of their row in a comparison (`compare.Request.more`)."""
