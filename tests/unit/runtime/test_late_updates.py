"""Updates that wait for other stages (2bw, clipped or scaled) need what the plan counts: (M7)."""

from __future__ import annotations

from torch import nn

from pipeplan.capture import profile_task
from pipeplan.chain import Layer
from pipeplan.plan import Plan, Semantics, Stage
from pipeplan.task import LossScale, Task
from pipeplan.testing import plans
from tests import capture_tasks, grids
from tests.captured import lasting
from tests.unit.runtime.test_memory import measured, planned

RULES = {"clip": {"clip_norm": 0.1}, "scale": {"loss_scale": LossScale()}}


NORMS_BYTES = 32 * 10
"""10 parameters; their weights have 9,216 bytes each."""


def wide(rule: str) -> Task:
    """Layers whose weights are large beside their tensors, so that updates need the most."""
    layers: list[nn.Module] = []
    for _ in range(5):
        layers += [nn.Linear(48, 48), nn.Tanh()]
    return Task(
        model=layers,
        loss=nn.functional.mse_loss,
        optimizer=capture_tasks.adamw,
        data=lambda number: (
            capture_tasks.rows(number, 4, 48),
            capture_tasks.rows(~number, 4, 48),
        ),
        **RULES[rule],
    )


@grids.each_pair(
    rule=list(RULES),
    shape=[(1, 1, 0), (2, 1, 1), (3, 2, 2), (4, 1, 3)],
    semantics=["flush", "2bw"],
)
def test_peak_is_as_planned(rule: str, shape: tuple[int, int, int], semantics: Semantics) -> None:
    """Every rank's measured peak equals `peak_bytes`, but for the norms that ranks exchange.

    Four steps, 13 micro-batches each: with k = 2 a late update comes before either copy.
    """
    gpus, k, seed = shape
    task = wide(rule)
    plan = planned(lasting(profile_task(task, repeats=1, warmup=0)), gpus, semantics, k, seed)
    for peak, row in zip(measured(plan, task, steps=4), plan.memory, strict=True):
        assert 0 <= peak - row.peak_bytes <= NORMS_BYTES


def at_once(plan: Plan) -> Plan:
    """The same plan where no update waits."""
    fields = {"waiting_gradient_bytes": 0}
    layers = tuple(layer.model_copy(update=fields) for layer in plan.chain.layers)
    chain = plan.chain.model_copy(update={"layers": layers})
    return plans.settle(plan.model_copy(update={"chain": chain}))


def test_a_late_update_moves_the_peak() -> None:
    """The input waits beside a late update, not beside one right after the backward."""
    late = planned(lasting(profile_task(wide("clip"), repeats=1, warmup=0)), 2, "2bw", 1, 1)
    now = at_once(late)
    waiting = [
        sum(x.waiting_gradient_bytes for s in late.hosted(gpu) for x in layers_of(late, s))
        for gpu in range(2)
    ]
    pairs = zip(late.memory, now.memory, waiting, strict=True)
    assert [one.peak_bytes - two.peak_bytes - size for one, two, size in pairs] != [0, 0]


def layers_of(plan: Plan, stage: Stage) -> tuple[Layer, ...]:
    """What a stage hosts."""
    return plan.chain.layers[stage.first : stage.last + 1]
