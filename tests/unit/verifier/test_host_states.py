"""States on the host, (U1) to (U6): tables worked out by hand, and what breaks which rule."""

from __future__ import annotations

import pytest

from pipeplan import lowering, simulator
from pipeplan.cluster import Host, uniform
from pipeplan.plan import Plan, Remat
from pipeplan.verifier import Rule, verify
from tests import handmade

HOST = Host(memory_bytes=100, bandwidth_bytes_per_s=2 * 10**9, update_bytes_per_s=3 * 10**9)
LAYERS = (
    {"weight_bytes": 10, "gradient_bytes": 5, "optimizer_bytes": 20, "buffer_bytes": 3}
    | {"optimizer_ns": 2, "saved_bytes": 4, "optimizer_workspace_bytes": 50},
    {"weight_bytes": 7, "gradient_bytes": 6, "optimizer_bytes": 9, "frozen_bytes": 2}
    | {"optimizer_ns": 3, "saved_bytes": 1, "optimizer_workspace_bytes": 60},
)


def made(semantics: str, host: Host | None = HOST, *, again: bool = False) -> Plan:
    """One stage of both layers, whose states are on the host; `again`: layer 0 runs twice."""
    of = handmade.chain([(1, 1), (1, 2)], LAYERS)
    cluster = uniform(1, 2**40, host=host)
    # A backward of 1 + 2, and of 1 more where layer 0 is recomputed.
    plan = handmade.plan(
        of, [(0, 1, 0)], 8, {"0F0": 0, "0B0": 3}, cluster=cluster, semantics=semantics,
        durations={"0B": 4 if again else 3},
    )  # fmt: skip
    remat = Remat(recompute=((0, 0),)) if again else None
    stage = plan.stages[0].model_copy(update={"states": "host", "remat": remat})
    return handmade.filled(plan.model_copy(update={"stages": (stage,)}))


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize(("semantics", "states", "step"), [("2bw", 50, 64), ("flush", 33, 62)])
def test_one_stage(semantics: str, states: int, step: int, *, again: bool) -> None:
    """Of both layers 17 + 7 = 24 bytes leave: states V * 17 + 11 + 29 - 24, h = 24 + 17 + 11.

    No optimizer's workspace counts on the GPU: the peak is what is saved, 5. Where layer 0 is
    recomputed it works with 4 and with a copy of its 3 bytes of buffers.
    The update takes 11 / 2 -> 6, 17 / 3 -> 6 and 17 / 2 -> 9: 21 ns, the step of 8 micro-batches
    8 * 8 + 21 (2bw), or 7 * 8 + 6 + 21 from the first start to the last end (7 with the second
    forward).
    """
    plan = made(semantics, again=again)
    assert verify(plan) == ()
    (row,) = plan.memory
    assert row.states_bytes == states
    assert row.host_bytes == 52
    assert row.peak_bytes == states + (7 if again else 5)
    assert plan.step_ns == step + 21 + (again and semantics == "flush")
    told = simulator.check(plan, lowering.lower(plan))
    assert told.memory == plan.memory
    assert told.step_ns == plan.step_ns
    assert told.terms(0).host_size == 52


def test_an_update_holds_its_rank() -> None:
    """On the eager clock, updates counted, a step of flush ends 21 ns behind its last backward."""
    plan = made("flush")
    program = lowering.lower(plan).unroll(plan.microbatches)
    told = simulator.replay(plan, program, updates=True)
    # Micro-batches follow each other at once: each 2 + 3.
    assert told.makespan_ns == 8 * 5 + 21


def broken(plan: Plan) -> set[Rule]:
    """The rules that a plan breaks; the replay must refuse it as well."""
    rules = {violation.rule for violation in verify(plan)}
    assert bool(rules) == (simulator.simulate(plan, lowering.lower(plan)).memory != plan.memory)
    return rules


def test_what_breaks_which_rule() -> None:
    """The host's memory, its rate, where states are, and the step."""
    plan = made("2bw")
    assert broken(plan) == set()

    def hosted(**fields: object) -> Plan:
        host = HOST.model_copy(update=fields)
        cluster = plan.cluster.model_copy(update={"host": host})
        return plan.model_copy(update={"cluster": cluster})

    assert {v.rule for v in verify(hosted(memory_bytes=51))} == {Rule.HOST}
    assert not verify(hosted(memory_bytes=52))
    assert {v.rule for v in verify(hosted(update_bytes_per_s=2 * 10**9))} == {Rule.STEP}
    assert {v.rule for v in verify(hosted(update_bytes_per_s=None))} == {Rule.STAGES}
    nowhere = plan.model_copy(update={"cluster": plan.cluster.model_copy(update={"host": None})})
    assert {v.rule for v in verify(nowhere)} == {Rule.STAGES}
    paper = plan.model_copy(update={"memory_model": "paper"})
    assert {v.rule for v in verify(paper)} == {Rule.STAGES}
    home = plan.stages[0].model_copy(update={"states": "gpu"})
    assert broken(plan.model_copy(update={"stages": (home,)})) == {Rule.MEMORY, Rule.STEP}
