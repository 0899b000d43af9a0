"""Which messages need a communicator of their own where messages have no tags, as under NCCL.

There a posted message holds up all behind it on its communicator. So every directed boundary gets
one: a receive that waits never blocks a send, and messages of one channel have one order at both
ends, that of their micro-batches. All ranks make all of them in the one order of `channels`, so
nobody waits in a circle while they connect. Source: ours.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pipeplan.plan import Stage as PlannedStage
from pipeplan.runtime.wiring import wires
from pipeplan.task import TensorSpec

ACROSS = 0
"""The tag of messages between replicas of one rank."""


@dataclass(frozen=True, slots=True)
class Channel:
    """One direction between two ranks, counted over all replicas, for the messages of `tags`."""

    source: int
    target: int
    tags: tuple[int, ...]


def channels(
    stages: Sequence[PlannedStage],
    boundaries: Sequence[Sequence[TensorSpec]],
    ranks: int,
    replicas: int = 1,
) -> tuple[Channel, ...]:
    """All channels of a run, the same on every rank.

    Args:
        stages: all stages of the plan, in chain order.
        boundaries: specs of the boundary before each layer.
        ranks: of one replica.
        replicas: side by side.
    """
    inside = list(_inside(stages, boundaries))
    within = [
        Channel(replica * ranks + each.source, replica * ranks + each.target, each.tags)
        for replica in range(replicas)
        for each in inside
    ]
    return (*within, *_across(ranks, replicas))


def _inside(
    stages: Sequence[PlannedStage], boundaries: Sequence[Sequence[TensorSpec]]
) -> Iterator[Channel]:
    for index, stage in enumerate(stages):
        links = wires(stages, boundaries, index)
        for wire in (links.output, links.input_gradient):
            if wire is not None and wire.tags:
                yield Channel(stage.gpu, wire.peer, wire.tags)


def _across(ranks: int, replicas: int) -> Iterator[Channel]:
    """What `Replicas.average` sends: to the next replica, and from the last one to all."""
    last = replicas - 1
    for rank in range(ranks):
        for replica in range(last):
            here = replica * ranks + rank
            yield Channel(here, here + ranks, (ACROSS,))
            yield Channel(last * ranks + rank, here, (ACROSS,))
