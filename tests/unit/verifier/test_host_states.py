"""States on the host, (U1) to (U7): tables worked out by hand, and what breaks which rule."""

from __future__ import annotations

import pytest

from pipeplan import lowering, simulator
from pipeplan.cluster import Host, uniform
from pipeplan.plan import Plan, Remat
from pipeplan.verifier import Rule, verify
from tests import handmade
from tests.offloading import offloaded

HOST = Host(memory_bytes=100, bandwidth_bytes_per_s=2 * 10**9, update_bytes_per_s=3 * 10**9)
LAYERS = (
    {"weight_bytes": 10, "gradient_bytes": 5, "optimizer_bytes": 20, "buffer_bytes": 3}
    | {"optimizer_ns": 2, "saved_bytes": 4, "optimizer_workspace_bytes": 50},
    {"weight_bytes": 7, "gradient_bytes": 6, "optimizer_bytes": 9, "frozen_bytes": 2}
    | {"optimizer_ns": 3, "saved_bytes": 1, "optimizer_workspace_bytes": 60},
)


def made(
    semantics: str, host: Host | None = HOST, *, again: bool = False, backward: int = 3
) -> Plan:
    """One stage of both layers, whose states are on the host; `again`: layer 0 runs twice."""
    of = handmade.chain([(1, 1), (1, 2)], LAYERS)
    cluster = uniform(1, 2**40, host=host)
    # A backward of 1 + 2, and of 1 more where layer 0 is recomputed.
    plan = handmade.plan(
        of, [(0, 1, 0)], 8, {"0F0": 0, "0B0": backward}, cluster=cluster, semantics=semantics,
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
    7 * 8 + 6 + 21 from the first start to the last end (7 with the second forward), or 8 * 8 + 6
    (2bw): 64 - 6 ns after an update comes the next one, so that 15 ns run beside.
    """
    plan = made(semantics, again=again)
    assert verify(plan) == ()
    (row,) = plan.memory
    assert row.states_bytes == states
    assert row.host_bytes == 52
    assert row.peak_bytes == states + (7 if again else 5)
    assert plan.step_ns == step + (6 if semantics == "2bw" else 21 + again)
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


def changed(plan: Plan, **layer: int) -> Plan:
    """With fields of the first layer, and the table and step that follow."""
    first, *others = plan.chain.layers
    layers = (first.model_copy(update=layer), *others)
    chain = plan.chain.model_copy(update={"layers": layers})
    digest = chain.digest()
    return handmade.filled(plan.model_copy(update={"chain": chain, "chain_digest": digest}))


def test_what_does_not_run_beside() -> None:
    """An update that waits for other stages, and one on a GPU that offloads activations."""
    assert changed(made("2bw"), waiting_gradient_bytes=1).step_ns == 64 + 21
    later = made("2bw", backward=35)
    assert later.step_ns == 64 + 6
    moving = offloaded(later, {0: ((0, 1),)}, {0: 5}, {"0OFFLOAD0": 2, "0PREFETCH0": 20})
    host = HOST.model_copy(update={"bandwidth_bytes_per_s": 10**9})
    cluster = moving.cluster.model_copy(update={"host": host})
    moving = handmade.filled(moving.model_copy(update={"cluster": cluster}))
    assert verify(moving) == ()
    # 11 and 17 bytes at one byte per ns, and 17 / 3 -> 6.
    assert moving.step_ns == 64 + 11 + 6 + 17
    assert simulator.check(moving, lowering.lower(moving)).step_ns == moving.step_ns


def test_what_is_too_long_to_run_beside() -> None:
    """At 1/5 of a byte per ns 17 bytes take 85 ns and 9 back: 64 are left, 30 ns are waited for.

    On the eager clock a step of 8 micro-batches takes 8 * 5 + 6 where the host is fast, and
    6 + 94 where the next update waits for it.
    """
    slow = HOST.model_copy(update={"update_bytes_per_s": 10**9 // 5})
    for host, planned, eager in ((HOST, 64 + 6, 46), (slow, 64 + 6 + 30, 100)):
        plan = made("2bw", host)
        assert verify(plan) == ()
        assert plan.step_ns == planned
        pattern = lowering.lower(plan)
        assert simulator.check(plan, pattern).step_ns == planned
        told = simulator.simulate(plan, pattern, clock="eager", updates=True)
        assert told.step_ns == eager


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
    assert {v.rule for v in verify(hosted(update_bytes_per_s=10**9 // 5))} == {Rule.STEP}
    assert {v.rule for v in verify(hosted(bandwidth_bytes_per_s=10**9))} == {Rule.STEP}
    assert not verify(hosted(update_bytes_per_s=2 * 10**9))  # 9 + 9 ns fit beside, too
    assert {v.rule for v in verify(hosted(update_bytes_per_s=None))} == {Rule.STAGES}
    nowhere = plan.model_copy(update={"cluster": plan.cluster.model_copy(update={"host": None})})
    assert {v.rule for v in verify(nowhere)} == {Rule.STAGES}
    paper = plan.model_copy(update={"memory_model": "paper"})
    assert {v.rule for v in verify(paper)} == {Rule.STAGES}
    home = plan.stages[0].model_copy(update={"states": "gpu"})
    assert broken(plan.model_copy(update={"stages": (home,)})) == {Rule.MEMORY, Rule.STEP}
