"""Parameters whose memory a forward replaces (`weight.data = ..`), found in trial runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor, nn

from pipeplan.errors import InputError


@contextmanager
def memory_kept(model: nn.Module) -> Iterator[None]:
    """Around runs of `model` without memory; what they made of its parameters is put back.

    Raises:
        InputError: if a forward put a tensor of its own behind a parameter, in place of any
            error that this led to.
    """
    kept = [(name, each, each.data) for name, each in model.named_parameters()]
    try:
        yield
    except Exception as error:
        _check(model, kept, error)
        raise
    _check(model, kept, None)


def _check(
    model: nn.Module, kept: Sequence[tuple[str, nn.Parameter, Tensor]], reason: Exception | None
) -> None:
    moved = [(name, each, data) for name, each, data in kept if each.device != data.device]
    for _, parameter, data in moved:
        parameter.data = data
    if moved:
        raise InputError(
            f"task: model {type(model).__name__}: parameter {moved[0][0]!r}: its forward replaces"
            " the memory behind it (weight.data = ..), need weights that the optimizer alone"
            " changes: several micro-batches are under way, and 2bw keeps two versions. Compute"
            " with a changed copy (functional.linear(x, 0.9 * self.weight)), or let"
            " torch.nn.utils.parametrize do it."
        ) from reason
