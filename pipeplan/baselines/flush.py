"""GPipe and 1F1B with a flush: one stage per GPU, one update per step.

Both take (m + P - 1) * (f + b) for m micro-batches on P equal stages without communication: the
share (P - 1) / (m + P - 1) of the time is idle. They differ in bytes: GPipe keeps all m
micro-batches, 1F1B at most P - s in stage s.

Source: Y. Huang et al., "GPipe" (2019); D. Narayanan et al., "PipeDream-Flush" (2021), section 2.
GPipe here runs backwards in the order of micro-batches, as rule (R5) of docs/reference/model.md
asks; its time and bytes are the same as in the opposite order.
"""

from __future__ import annotations

from pipeplan.baselines.listed import ListedOp
from pipeplan.plan import OpKind


def gpipe(stages: int, microbatches: int) -> list[list[ListedOp]]:
    """All forwards, then all backwards; stage s on GPU s."""
    return [
        [(kind, stage, m) for kind in (OpKind.F, OpKind.B) for m in range(microbatches)]
        for stage in range(stages)
    ]


def one_f_one_b(stages: int, microbatches: int) -> list[list[ListedOp]]:
    """P - 1 - s forwards, then forward and backward in turn, then the backwards that are left."""
    return [
        alternating(
            [(OpKind.F, stage, m) for m in range(microbatches)],
            [(OpKind.B, stage, m) for m in range(microbatches)],
            stages - 1 - stage,
        )
        for stage in range(stages)
    ]


def alternating(
    forwards: list[ListedOp], backwards: list[ListedOp], warm_up: int
) -> list[ListedOp]:
    """`warm_up` forwards, then one of each in turn, then what is left."""
    first = min(warm_up, len(forwards))
    steps = forwards[:first]
    for forward, backward in zip(forwards[first:], backwards, strict=False):
        steps += [forward, backward]
    return steps + backwards[len(forwards) - first :]
