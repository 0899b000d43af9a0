"""What an op of a rank that sleeps takes on this machine beside its sleep.

A sleeping rank wakes late, and its executor, its messages and its clocks take a little of their
own. A pipeline of equal stages shows it alone: eager 1F1B without transfers takes F + B for each
micro-batch, so what a launch takes longer is that of two ops. Predictions of launches count it as
the cluster's overhead per action (T2).
"""

from __future__ import annotations

from pipeplan.baselines.eager import Policy, eager_plan
from pipeplan.baselines.splits import to_stages
from pipeplan.baselines.timed import Setting
from pipeplan.chain import Chain, Layer
from pipeplan.cluster import uniform
from pipeplan.plan import Plan

NAME = "probe of actions"
_MEMORY = 2**40


def probe_plan(ranks: int, op_ns: int) -> Plan:
    """One stage per rank, whose forward and backward take `op_ns` each; transfers take none."""
    layers = tuple(
        Layer(name=f"stage{n}", forward_ns=op_ns, backward_ns=op_ns, output_bytes=0)
        for n in range(ranks)
    )
    setting = Setting(Chain(name=NAME, layers=layers), uniform(ranks, _MEMORY))
    stages = to_stages(tuple(range(1, ranks + 1)))
    plan = eager_plan(setting.outline(stages, "2bw", NAME), Policy((2 * ranks,) * ranks))
    assert plan is not None, "equal stages settle at once"
    return plan


def per_action_ns(plan: Plan, measured_ns: float) -> float:
    """What each of the two ops of a micro-batch takes beside its sleep; 0 where none is seen."""
    return max(0.0, (measured_ns - float(plan.period_per_microbatch)) / 2)
