"""Two autograd nodes that stand for a pass whose backward autograd does not run itself.

The first node of the backward only takes the gradients, so that autograd forgets them before the
second one runs what is behind. Layers (`rematerialized`) and device programs (`operators`) both
hand modules out that way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class PassLink(Protocol):
    """What both nodes of a pass share."""

    gradients: list[Tensor | None]
    """Of the outputs, None for one that nothing depended on."""

    def backward(self) -> list[Tensor | None]:
        """Takes `gradients` and runs the backward; the gradients of the inputs, in order."""


def tied_to_backward(
    link: PassLink,
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    fixed: Sequence[bool] | None = None,
) -> tuple[Tensor, ...]:
    """`outputs` as tensors whose backward is that of `link`.

    Args:
        link: of one pass.
        inputs: of the module's call.
        outputs: cut off any graph; the caller drops his.
        fixed: per output whether it has no gradient; none is fixed where it is left out.
    """
    token = _Body.apply(link, _TRIGGER, *inputs)  # type: ignore[no-untyped-call]
    flags = tuple(fixed) if fixed is not None else (False,) * len(outputs)
    results: tuple[Tensor, ...] = _PassExit.apply(link, flags, token, *outputs)  # type: ignore[no-untyped-call]
    return results


_TRIGGER = torch.empty(0, requires_grad=True)


class _Body(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, link: PassLink, trigger: Tensor, *_: Tensor) -> Tensor:
        ctx.link = link
        return trigger.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        return (None, None, *ctx.link.backward())


class _PassExit(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, link: PassLink, fixed: tuple[bool, ...], _: Tensor, *outputs: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.link = link
        ctx.set_materialize_grads(False)
        results = tuple(output.detach() for output in outputs)
        pairs = zip(results, fixed, strict=True)
        ctx.mark_non_differentiable(*(result for result, is_fixed in pairs if is_fixed))
        return results

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.link.gradients = list(gradients)
        return (None, None, _TRIGGER.new_empty(0), *(None for _ in gradients))
