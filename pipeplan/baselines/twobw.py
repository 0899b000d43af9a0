"""PipeDream-2BW's shape of plan: equal blocks, one stage per GPU, 1F1B with two weight versions.

Its planner repeats one block of layers and searches the depth of the pipeline; with one GPU per
stage the depth is all that is left to choose. The published search is not available, so every
depth up to the number of GPUs is tried and judged by our own model.

Source: D. Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training" (2021), section 3.
"""

from __future__ import annotations

from collections.abc import Iterator

from pipeplan.baselines.eager import Policy, eager_plan
from pipeplan.baselines.splits import keeps_ties, to_stages, uniform_split
from pipeplan.baselines.timed import Setting
from pipeplan.plan import Plan
from pipeplan.self_timed import staircase


def equal_blocks(setting: Setting) -> Iterator[Plan]:
    """A plan for every depth, deepest first, of blocks of equal numbers of layers."""
    for depth in range(min(setting.gpus, len(setting.chain.layers)), 0, -1):
        stages = to_stages(uniform_split(setting.chain, depth))
        if not keeps_ties(setting.chain, stages):
            continue
        outline = setting.outline(stages, "2bw", "pipedream-2bw")
        plan = eager_plan(outline, Policy(staircase(depth, depth)))
        if plan is not None:
            yield plan
