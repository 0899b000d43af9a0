"""What a forward changed in place while the backward of an earlier micro-batch still needed it.

A plain loop has one micro-batch under way and never sees it; autograd names a shape alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from torch import Tensor, nn

from pipeplan.errors import InputError

_MODIFIED = re.compile(r"modified by an inplace operation.*?is at version (\d+)", re.DOTALL)


@contextmanager
def explained(
    first_layer: int, layers: Sequence[nn.Module], fqns: Sequence[Mapping[str, str]]
) -> Iterator[None]:
    """Around a backward of `layers`.

    Args:
        first_layer: 0-based index in the chain.
        layers: of a stage.
        fqns: per layer names of its parameters and buffers in the user's model.

    Raises:
        InputError: where autograd finds a tensor that was written to since its forward.
    """
    try:
        yield
    except RuntimeError as error:
        found = _MODIFIED.search(str(error))
        if found is None:
            raise
        what = f"layers {first_layer} to {first_layer + len(layers) - 1}: a tensor"
        for number, (layer, names) in enumerate(zip(layers, fqns, strict=True), first_layer):
            for local, tensor in (*layer.named_buffers(), *layer.named_parameters()):
                if _writes(tensor) == int(found[1]):
                    what = f"layer {number}: {names.get(local, local)!r}"
        raise InputError(
            f"task: {what}, needed by the backward of one micro-batch, was changed in place by the"
            f" forward of a later one: got {str(error).partition('. Hint')[0]}; need it unchanged,"
            " as a pipeline has several micro-batches under way. Let the forward compute with a"
            " copy (buffer.clone()), or put a new tensor there (self.buffer = self.buffer + 1)."
        ) from error


def _writes(tensor: Tensor) -> int:
    return tensor._version  # noqa: SLF001  torch has no public name for it
