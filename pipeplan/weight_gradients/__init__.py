"""Gradients of weights later than those of activations: the two halves of a split backward.

While layers run forward inside `deferring`, each operation on both an activation and a weight
(a leaf, or what operations of the same layer have made of leaves alone) keeps a small graph of its
own. The layers' backward, inside `activations`, asks that graph for gradients of activations only
and keeps it with the gradient that arrived; `weights` asks it for those of weights, in the same
order. So saved tensors that no weight needs are released by the first half, and both halves
together compute what one backward does, to the bit. (A leaf that one layer uses both ways,
deferred and not, gets two sums per micro-batch.)

Not deferred, but computed in the first half as always, is the gradient of a weight in: operations
in place or with `out=`, custom autograd Functions, compiled code, operations of several steps
(recurrent ones), what runs inside other hooks on saved tensors (a layer's own checkpoints), and
operations on a weight and data alone (embeddings).

P. Qi et al., Zero Bubble Pipeline Parallelism (2023) split the backward so; the way
it is done here is ours.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch import nn

from pipeplan.compiling import Compiled
from pipeplan.weight_gradients.interception import Deferring
from pipeplan.weight_gradients.waiting import InnerBackwardError, Waiting, WeightBackward

__all__ = ["InnerBackwardError", "WeightGradients"]


class WeightGradients:
    """The gradients of weights of one micro-batch in some layers; use once."""

    def __init__(self) -> None:
        self._waiting = Waiting()

    def deferring(self, layer: nn.Module) -> AbstractContextManager[Any]:
        """Around a forward of `layer`; within hooks on saved tensors, if both are wanted.

        What is compiled has its whole backward in one piece.
        """
        if isinstance(layer, Compiled):
            return nullcontext()
        self._waiting.next_layer()
        return Deferring(self._waiting)

    @contextmanager
    def activations(self) -> Iterator[None]:
        """Around the layers' backward, which leaves gradients of weights for `weights`."""
        self._waiting.collecting = True
        try:
            yield
        finally:
            self._waiting.collecting = False

    def weights(self) -> None:
        """Compute what waits, and add each leaf's sum to its gradient, with its hooks.

        A leaf gets it as soon as the last operation on it is done.
        """
        WeightBackward(self._waiting.take()).run()
