"""Trainable parameters that several layers have."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from torch import nn

from pipeplan.errors import InputError
from pipeplan.task import Task


def sharing_layers(layers: Mapping[str, nn.Module]) -> dict[nn.Parameter, list[str]]:
    """Of each trainable parameter that several of `layers` have, the names of these."""
    users: dict[nn.Parameter, list[str]] = {}
    for name, layer in layers.items():
        for parameter in layer.parameters():
            if parameter.requires_grad:
                users.setdefault(parameter, []).append(name)
    return {parameter: names for parameter, names in users.items() if len(names) > 1}


def sharing_notes(layers: Mapping[str, nn.Module]) -> Iterator[str]:
    """What to tell of the order of sums where `layers` share parameters."""
    groups = Counter(map(tuple, sharing_layers(layers).values()))
    for names, count in groups.items():
        several = f" ({count} in all)" if count > 1 else ""
        yield (
            f"layers {', '.join(names)} share a parameter{several}: its gradient is added up layer"
            " by layer, so its last bits may differ from those of a loop that adds up all uses of"
            " a micro-batch first (as the task's tied='transmit' does, where it can)"
        )


def takes_graph(task: Task, row: nn.Module) -> bool:
    """Whether parameters are to pass between the members of `row`, which only its graph allows.

    Raises:
        InputError: if they are a list, which may do what no graph can hold.
    """
    if task.tied != "transmit":
        return False
    named = row.named_modules(remove_duplicate=False)  # one that occurs twice comes twice
    shared = sharing_layers({name: each for name, each in named if name and "." not in name})
    if not shared or isinstance(task.model, nn.Module):
        return bool(shared)
    first = " and ".join(next(iter(shared.values())))
    raise InputError(
        f"task: tied: got 'transmit' and a list of layers, of which {first} share a parameter:"
        " lists are not cut as graphs. Give them as one nn.Sequential, or take tied='colocate' or"
        " 'synchronize'."
    )
