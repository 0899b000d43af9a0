"""Layers that share what a forward changes: no cut may lie between them.

Stages run micro-batches in an order of their own: between two layers of one micro-batch, in two
stages, others come. What a layer reads would then not be what the model reads. So all from the
first to the last of these layers is one layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from torch import nn

from pipeplan.capture.user_model.state_writes import states_of
from pipeplan.livebytes import storages


@dataclass(frozen=True, slots=True)
class SharedState:
    """A buffer or frozen parameter that a forward changes and several layers have."""

    storage: int
    first: int
    last: int
    """The first and the last of these layers."""


def shared_states(
    layers: Sequence[nn.Module], changes: Sequence[frozenset[int]]
) -> list[SharedState]:
    """What several of `layers` have and one changes; `changes` has the storages, by layer."""
    holders: dict[int, list[int]] = {}
    for index, layer in enumerate(layers):
        for storage in storages(states_of(layer)):
            holders.setdefault(storage, []).append(index)
    changed = frozenset[int]().union(*changes)
    return [
        SharedState(storage, places[0], places[-1])
        for storage, places in holders.items()
        if storage in changed and len(places) > 1
    ]


def starts_without(states: Sequence[SharedState], layers: int) -> list[int]:
    """Where layers begin, of that many, when none of `states` is parted."""
    lost = {index for each in states for index in range(each.first + 1, each.last + 1)}
    return [index for index in range(layers) if index not in lost]


def joined_notes(
    states: Sequence[SharedState], layers: Mapping[str, nn.Module], model: nn.Module
) -> Iterator[str]:
    """What to tell of each layer that comes of several of `layers`, and how to keep them apart.

    Args:
        states: what they share.
        layers: by name, before they are one.
        model: knows the names of its tensors.
    """
    users = {
        storage: name
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]
        for storage in storages([tensor])
    }
    starts, names = starts_without(states, len(layers)), list(layers)
    for begin, end in pairwise([*starts, len(names)]):
        inside = [each for each in states if begin <= each.first < end]
        if not inside:
            continue
        count = f" (one of {len(inside)})" if len(inside) > 1 else ""
        whole = ", all of the model," if len(starts) == 1 else ""
        yield (
            f"layers {names[begin]} to {names[end - 1]} ({end - begin} in all){whole} are one"
            f" layer: their forwards change {users.get(inside[0].storage, 'a tensor')!r}{count},"
            " which several of them have, so no other micro-batch may come between them. Give"
            " each a module of its own to have them apart, or let forwards leave it as it is (a"
            " BatchNorm in eval mode, or with track_running_stats=False)"
        )
