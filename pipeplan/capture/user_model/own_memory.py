"""Whether each parameter has memory of its own.

Who is one parameter is asked by identity: two of them that lie in one memory would be two, each
with its own gradient, copies and place, and what an update writes to one would reach the other on
the same GPU alone.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from pipeplan.errors import InputError
from pipeplan.livebytes import key

_Place = tuple[int, int, int, str, bool]
"""Storage, first byte in it, byte behind the last one, name, whether it is trained."""


def check_apart(model: nn.Module) -> None:
    """Refuse a trained parameter that lies where another parameter or a buffer does.

    Parts of one storage may be neighbours, as the weights of recurrent layers on a GPU are.

    Raises:
        InputError: if there is one.
    """
    named = [*model.named_parameters(), *model.named_buffers()]
    last: dict[tuple[int, bool], tuple[int, str]] = {}
    for storage, begin, end, name, trained in sorted(_places(named)):
        for kind in (True, False) if trained else (True,):
            behind, other = last.get((storage, kind), (0, ""))
            if begin < behind:
                raise InputError(
                    f"task: model {type(model).__name__}: {other!r} and {name!r} lie in one memory"
                    " but are two tensors, need one Parameter object where layers share a weight"
                    " (b.weight = a.weight, not b.weight.data = a.weight.data), or a clone() where"
                    " they share none."
                )
        last[storage, trained] = max(last.get((storage, trained), (0, "")), (end, name))


def _places(named: list[tuple[str, Tensor]]) -> Iterator[_Place]:
    """Where tensors lie; those that are no plain strided ones have no such place."""
    for name, tensor in named:
        if tensor.layout is torch.strided and tensor.numel():
            steps = zip(tensor.shape, tensor.stride(), strict=True)
            extent = 1 + sum((size - 1) * stride for size, stride in steps)
            begin = int(tensor.storage_offset()) * tensor.itemsize
            yield key(tensor), begin, begin + extent * tensor.itemsize, name, tensor.requires_grad
