"""Backwards that stay in one piece, since two halves would not give what one gives.

A leaf whose gradient waits in one operation and not in another one gets two sums per micro-batch
in place of one: its last bit may differ, and hooks on it run twice. That shows without values, by
how often each leaf's gradient is added up; `measurement.halves` compares the bits themselves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor, nn

from pipeplan.weight_gradients import InnerBackwardError

TWO_SUMS = "a weight's gradient would come in two sums"
OTHER_BITS = "the gradients' bits would differ"
_MOST = 5
"""Layers that are named."""


@contextmanager
def accumulations(layer: nn.Module) -> Iterator[Counter[str]]:
    """Counts inside how often a gradient is added up, by name of the parameter of `layer`."""
    found: Counter[str] = Counter()

    def counting(name: str) -> Callable[[Tensor], None]:
        return lambda _: found.update([name])

    handles = [
        parameter.register_post_accumulate_grad_hook(counting(name))
        for name, parameter in layer.named_parameters()
        if parameter.requires_grad
    ]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def more_sums(halves: Counter[str], once: Counter[str]) -> bool:
    """Whether a gradient is added up more often in two halves than in one backward.

    A layer that is skipped at random may have added up nothing there.
    """
    return any(count > max(1, once[name]) for name, count in halves.items())


def failed(error: Exception) -> str:
    """Why a backward stays whole whose halves fail with `error`."""
    cause = error.__cause__ or error
    if isinstance(cause, InnerBackwardError):
        return "a forward computes gradients itself"
    *_, line = str(cause).strip().splitlines() or [""]
    return f"in two halves it fails ({type(cause).__name__}: {line.strip()})"


def told(names: Sequence[str], reasons: Sequence[str | None]) -> list[str]:
    """One line for each reason, which names layers.

    Args:
        names: of all layers.
        reasons: why a layer's backward stays whole; None where it may be split, or never is.
    """
    return [
        f"{'1 backward' if count == 1 else f'{count} backwards'} will not be split, as {reason}:"
        f" {layers}"
        for reason, count, layers in by_reason(names, reasons)
    ]


def by_reason(
    names: Sequence[str], reasons: Sequence[str | None]
) -> Iterator[tuple[str, int, str]]:
    """Each reason once, with how many of `names` have it, and the first of them for people."""
    for reason in dict.fromkeys(filter(None, reasons)):
        found = [name for name, why in zip(names, reasons, strict=True) if why == reason]
        more = f" and {len(found) - _MOST} more" if len(found) > _MOST else ""
        yield reason, len(found), f"{', '.join(found[:_MOST])}{more}"
