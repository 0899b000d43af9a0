"""The plan file: indices point somewhere; everything else is the verifier's business."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest

from pipeplan.errors import InputError, InvalidPlanError
from pipeplan.lowering import lower
from pipeplan.plan import MAX_SHIFT, MOST_NESTED, OpKind, Plan, Remat
from pipeplan.simulator import simulate
from pipeplan.verifier import Rule, verify
from tests import documents, handmade


def test_golden_plan_is_valid() -> None:
    """The documented example keeps every rule of docs/reference/model.md."""
    assert not verify(Plan.from_json(documents.golden("plan")))


def test_views() -> None:
    """What others read off a plan: stages by GPU, layers of a stage, labels, the period."""
    plan = Plan.from_json(documents.golden("plan"))
    assert [stage.id for stage in plan.hosted(1)] == [1]
    assert (plan.stages[1].first, plan.stages[1].last) == (1, 1)
    assert [op.label for op in plan.ops] == ["0F0", "0SEND_F0", "1F0", "1B0", "1SEND_B0", "0B0"]
    computes = [OpKind.F, OpKind.B, OpKind.I, OpKind.W]
    assert [kind for kind in OpKind if kind.is_compute] == computes
    halves = plan.stages[1].model_copy(update={"split_backward": True})
    assert (plan.stages[1].backward, halves.backward) == (OpKind.B, OpKind.I)
    assert not plan.splits
    assert plan.model_copy(update={"stages": (plan.stages[0], halves)}).splits
    assert plan.model_copy(update={"k": 4}).period_per_microbatch == Fraction(45, 2)


def change(*path: int | str, to: object) -> Callable[[Any], None]:
    """Sets what `path` leads to."""

    def apply(data: Any) -> None:
        for part in path[:-1]:
            data = data[part]
        data[path[-1]] = to

    return apply


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (change("stages", 1, "gpu", to=2), "stages[1].gpu: got 2, need an index below 2"),
        (change("stages", 1, "layers", to=[1, 2]), "stages[1].layers[1]: got 2, need an index"),
        (change("stages", 0, "layers", to=[1, 0]), "stages[0].layers: got [1, 0], need first"),
        (change("ops", 0, "stage", to=2), "ops[0].stage: got 2, need an index below 2"),
        (change("ops", 0, "copy", to=1), "ops[0].copy: got 1, need an index below 1"),
        (change("ops", 0, "gpu", to=2), "ops[0].gpu: got 2, need an index below 2"),
        (change("ops", 1, "link", to=[0, 2]), "ops[1].link: got 2, need an index below 2"),
        (change("ops", 1, "gpu", to=0), "ops[1]: got SEND_F with gpu 0 and link (0, 1)"),
        (change("ops", 0, "gpu", to=None), "ops[0]: got F with gpu None and link None"),
        (change("ops", 0, "kind", to="SEND_B"), "ops[0]: got SEND_B with gpu 0 and link None"),
        (change("ops", 0, "shift", to=MAX_SHIFT + 1), f"ops[0].shift: got {MAX_SHIFT + 1}, need"),
        (change("memory", 1, "gpu", to=2), "memory[1].gpu: got 2, need an index below 2"),
        (change("chain", "layers", 0, "name", to="head"), "chain.layers[1].name: got 'head'"),
        (change("period_ns", to=0), "period_ns: got 0, need at least 1"),
        (change("k", to=0), "k: got 0, need at least 1"),
    ],
)
def test_indices_point_somewhere(edit: Callable[[Any], None], message: str) -> None:
    """Each index and each kind of op is checked on reading, and named."""
    data = documents.data("plan")
    edit(data)
    with pytest.raises(InputError) as caught:
        Plan.from_data(data, "plan.json")
    assert str(caught.value).startswith(f"plan.json: {message}")


@pytest.mark.parametrize(
    "edit",
    [
        change("chain_digest", to="wrong"),
        change("period_ns", to=1),
        change("ops", to=[]),
        change("memory", to=[]),
        change("stages", 1, "id", to=7),
        change("solver", "gap", to=5.0),
    ],
)
def test_broken_rules_are_readable(edit: Callable[[Any], None]) -> None:
    """A plan that breaks rules can be read, so that the verifier can say which."""
    data = documents.data("plan")
    edit(data)
    assert verify(Plan.from_data(data))


def test_runs_in_runs_are_judged_as_deep_as_they_may_be() -> None:
    """Both voices judge the deepest; one more is refused."""
    runs = tuple((0, last) for last in range(MOST_NESTED, -1, -1))
    chain = handmade.chain([(1, 1)] * MOST_NESTED)
    plan = handmade.packed(chain, [(0, MOST_NESTED - 1, 0)], 3 * MOST_NESTED)
    stage = plan.stages[0].model_copy(update={"remat": Remat(recompute=runs[1:])})
    deep = plan.model_copy(update={"stages": (stage,)})
    assert {each.rule for each in verify(deep)} <= {Rule.DURATIONS, Rule.MEMORY}
    with pytest.raises(InvalidPlanError, match="durations, op 0B0"):
        simulate(deep, lower(deep))
    with pytest.raises(ValueError, match="got runs in runs, more than 300 deep"):
        Remat(recompute=runs)
