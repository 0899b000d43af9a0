"""ZB-H1 and ZB-H2: 1F1B with a flush whose weight gradients come late, one stage per GPU.

The backward of a stage is I and W: on I the stage before waits, on W nobody waits before the
update. Stage s begins its W late, so that W fill what 1F1B idles while the pipeline drains.

- ZB-H1 runs P - 1 - s forwards first and its W s micro-batches late: no GPU keeps more than P
  micro-batches. On equal stages without communication a step takes
  m * (f + i + w) + (P - 1) * (f + i - w).
- ZB-H2 runs 2 * (P - 1 - s) forwards first and its W 2 * s micro-batches late: at most 2 * P - 1
  micro-batches. With f = i = w each GPU then works without a gap; the source counts a step per GPU
  and lets the next one begin before all have ended. Here the slowest GPU ends the step, so what
  the last GPU waits for its first input counts: m * (f + i + w) + (P - 1) * f.

Source: P. Qi et al., "Zero Bubble Pipeline Parallelism" (2023), section 2.
"""

from __future__ import annotations

from pipeplan.baselines.flush import alternating
from pipeplan.baselines.listed import ListedOp
from pipeplan.plan import OpKind


def zb_h1(stages: int, microbatches: int) -> list[list[ListedOp]]:
    """W of stage s is s micro-batches late; stage s on GPU s."""
    return [_late(stage, microbatches, stages - 1 - stage, stage) for stage in range(stages)]


def zb_h2(stages: int, microbatches: int) -> list[list[ListedOp]]:
    """Twice the forwards of ZB-H1 before the first backward, and W twice as late."""
    return [
        _late(stage, microbatches, 2 * (stages - 1 - stage), 2 * stage) for stage in range(stages)
    ]


def _late(stage: int, microbatches: int, warm_up: int, late: int) -> list[ListedOp]:
    """1F1B behind `warm_up` forwards; a W behind each I from number `late` on, the rest last."""
    forwards = [(OpKind.F, stage, m) for m in range(microbatches)]
    inputs = [(OpKind.I, stage, m) for m in range(microbatches)]
    steps: list[ListedOp] = []
    for step in alternating(forwards, inputs, warm_up):
        steps.append(step)
        if step[0] is OpKind.I and step[2] >= late:
            steps.append((OpKind.W, stage, step[2] - late))
    rest = range(max(0, microbatches - late), microbatches)
    return steps + [(OpKind.W, stage, m) for m in rest]
