"""Which messages need a communicator of their own where messages have no tags, as under NCCL.

There a posted message holds up all behind it on its communicator. So every directed boundary gets
one, as does each direction of the gradients of tied weights between two stages, and of those
between neighbouring replicas: a receive that waits never blocks a send, and messages of one
channel have one order at both ends. A rank makes those that end at it, in the one order of
`communicators`, so nobody waits in a circle while they connect; every other one comes first, so
that neighbours connect side by side and not one after the other. Source: ours.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pipeplan.plan import Stage as PlannedStage
from pipeplan.runtime.parameters.tied_parameters import Tie, tags_of
from pipeplan.runtime.transport.endpoints import endpoints, first_tie_tag
from pipeplan.runtime.transport.pair_communicator import CommunicatorSpec
from pipeplan.split_model import TensorSpec

ACROSS = 0
"""The tag of messages between replicas of one rank."""


def communicators(
    stages: Sequence[PlannedStage],
    boundaries: Sequence[Sequence[TensorSpec]],
    ranks: int,
    replicas: int = 1,
    ties: Sequence[Tie] = (),
) -> tuple[CommunicatorSpec, ...]:
    """All channels of a run, the same on every rank.

    Args:
        stages: all stages of the plan, in chain order.
        boundaries: specs of the boundary before each layer.
        ranks: of one replica.
        replicas: side by side.
        ties: shared parameters.
    """
    inside = [*_between(stages, boundaries), *_tied(ties, first_tie_tag(boundaries))]
    within = [
        CommunicatorSpec(replica * ranks + each.source, replica * ranks + each.target, each.tags)
        for replica in range(replicas)
        for each in inside
    ]
    return (*within, *_across(ranks, replicas))


def _between(
    stages: Sequence[PlannedStage], boundaries: Sequence[Sequence[TensorSpec]]
) -> Iterator[CommunicatorSpec]:
    """Forth and back over each boundary between two ranks."""
    for index in _alternating(len(stages) - 1):
        here, there = stages[index].gpu, stages[index + 1].gpu
        forth = endpoints(stages, boundaries, index).output
        back = endpoints(stages, boundaries, index + 1).input_gradient
        for source, target, endpoint in ((here, there, forth), (there, here, back)):
            if endpoint is not None and endpoint.tags:
                yield CommunicatorSpec(source, target, endpoint.tags)


def _tied(ties: Sequence[Tie], first_tag: int) -> Iterator[CommunicatorSpec]:
    """From copies to the owner and back, per pair of stages: both ends have the order of ties."""
    tags = tags_of(ties, first_tag)
    pairs: dict[tuple[int, int], tuple[int, int, list[int]]] = {}
    for tie in ties:
        for use in tie.uses[1:]:
            if use.rank != tie.owner.rank:
                stages = (use.stage, tie.owner.stage)
                found = pairs.setdefault(stages, (use.rank, tie.owner.rank, []))
                found[2].append(tags[id(use)])
    for copy, owner, used in pairs.values():
        yield CommunicatorSpec(copy, owner, tuple(used))
        yield CommunicatorSpec(owner, copy, tuple(used))


def _across(ranks: int, replicas: int) -> Iterator[CommunicatorSpec]:
    """What `Replicas` sends: sums to the next replica, means to the one before."""
    for rank in range(ranks):
        for replica in _alternating(replicas - 1):
            here = replica * ranks + rank
            yield CommunicatorSpec(here, here + ranks, (ACROSS,))
            yield CommunicatorSpec(here + ranks, here, (ACROSS,))


def _alternating(count: int) -> tuple[int, ...]:
    """0, 2, 4, .., 1, 3, ..: what has even numbers has no ends in common."""
    return (*range(0, count, 2), *range(1, count, 2))
