"""Which chains, numbers of GPUs and memories the planner's benchmark measures, in groups.

A group is a line of what is asked of the planner: a gap to be proven within a time. Memories are
shares of the peak that the best contiguous 1F1B plan has when memory is no limit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pipeplan.testing.instances import Case, chain_of

AMPLE = 1.2
FRACTIONS = (1.2, 0.8, 0.6, 0.5)


@dataclass(frozen=True, slots=True)
class Group:
    """Instances that share a target.

    gap: the proven gap asked for; None where none is.
    """

    name: str
    time_limit_s: float
    gap: float | None


TINY = Group("up to 7 layers", 30, 0.0)
AMPLE_50 = Group("ample, 18..50 layers", 60, 0.01)
AMPLE_152 = Group("ample, 101..152 layers", 120, 0.015)
TRANSFORMERS = Group("ample, transformers", 5, 0.01)
SPLIT = Group("ample, two alternating sizes", 60, 0.03)
MIDDLE = Group("in between", 60, None)
SCARCE_18 = Group("scarce, up to 18 layers", 120, 0.05)
SCARCE_21 = Group("scarce, up to 21 layers", 120, 0.10)
SCARCE_50 = Group("scarce, 22..50 layers", 120, 0.20)
SCARCE = Group("scarce, more layers", 120, None)
GROUPS = (
    TINY, AMPLE_50, AMPLE_152, TRANSFORMERS, SPLIT,
    MIDDLE, SCARCE_18, SCARCE_21, SCARCE_50, SCARCE,
)  # fmt: skip

_FAMILIES: tuple[tuple[tuple[str, ...], tuple[int, ...]], ...] = (
    (("gpt3", "llama4", "gpt5"), (2, 3)),
    (("resnet18", "resnet34", "resnet50", "resnet101", "resnet152", "densenet121"), (2, 4, 8)),
    (("gpt24", "gpt48", "gpt96", "llama24", "llama32", "llama80", "llama96"), (8, 16, 32)),
    (("gpt96split",), (32,)),
)


def group_of(case: Case) -> Group:
    """By kind of chain, memory and layers."""
    layers = len(case.chain.layers)
    if layers <= 7:
        return TINY
    if case.fraction >= AMPLE:
        return _ample(case.name, layers)
    if case.fraction > 0.6:
        return MIDDLE
    limits = ((18, SCARCE_18), (21, SCARCE_21), (51, SCARCE_50))
    return next((group for most, group in limits if layers <= most), SCARCE)


def _ample(name: str, layers: int) -> Group:
    if name.endswith("split"):
        return SPLIT
    if name.startswith(("gpt", "llama")):
        return TRANSFORMERS
    return AMPLE_50 if layers <= 51 else AMPLE_152


def cases(
    only: Sequence[str] = (), gpus: Sequence[int] = (), fractions: Sequence[float] = FRACTIONS
) -> Iterator[Case]:
    """The instances, small ones first; `only` and `gpus` choose names and numbers of GPUs."""
    known = {name: numbers for names, numbers in _FAMILIES for name in names}
    for name in only or known:
        for number in gpus or known.get(name, (2, 4, 8)):
            for fraction in fractions:
                # The paper's ILP counts bytes as the paper does: so do the chains it can solve.
                small = len(chain_of(name).layers) <= 7
                yield Case(name, number, fraction, "paper" if small else "exact")
