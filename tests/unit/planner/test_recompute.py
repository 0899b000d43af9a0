"""Plans that compute layers again: verified like all, never worse, resumed, refused clearly."""

from __future__ import annotations

import functools
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest

from pipeplan.chain import Chain
from pipeplan.cluster import Cluster, Host, uniform
from pipeplan.errors import InfeasibleError, InputError
from pipeplan.plan import Plan
from pipeplan.planner import Config, solve
from pipeplan.testing.networks import build
from pipeplan.testing.plans import random_plan
from pipeplan.verifier import verify
from tests import grids, handmade

GIB = 2**30
LITTLE = 8 * GIB // 5


def chain() -> Chain:
    """ResNet-18 at the paper's setting."""
    return build("resnet18", 8, 1000)


def machines(memory: int) -> Cluster:
    """Two GPUs, 12 GB/s."""
    return uniform(2, memory, bandwidth_bytes_per_s=12 * 10**9)


def planned(memory: int, **options: Any) -> Plan:
    """A short search, one thread, limited in work."""
    limits = {"time_limit_s": 1, "deterministic": True, "workers": 1, "gap": 0.02}
    return solve(chain(), machines(memory), Config(**limits | options))


@functools.cache
def with_little(semantics: str = "2bw") -> Plan:
    """The plan with recomputation where no other one fits."""
    return planned(LITTLE, semantics=semantics, recompute="auto")


def per_microbatch(plan: Plan) -> Fraction:
    """Ns."""
    return Fraction(plan.period_ns, plan.k)


@pytest.mark.parametrize("semantics", ["flush", "2bw"])
def test_a_plan_where_there_was_none(semantics: str) -> None:
    """Where no plan exists that keeps everything, one exists that does not; every voice agrees."""
    with pytest.raises(InfeasibleError):
        planned(LITTLE, semantics=semantics)
    plan = with_little(semantics)
    assert verify(plan) == ()
    assert any(stage.remat for stage in plan.stages)
    assert plan.chain == chain()


def test_a_layer_that_fits_nowhere_is_named() -> None:
    """What no recomputation can help is proven at once, and the advice does not name it."""
    with pytest.raises(InfeasibleError, match=r"layer 0 .*A smaller micro-batch or a GPU with"):
        planned(GIB, recompute="auto")


@pytest.mark.parametrize("offload", ["off", "auto"])
@pytest.mark.parametrize("recompute", ["off", "auto"])
def test_states_beyond_all_memory_are_proof(recompute: str, offload: str) -> None:
    """Eight copies of two bytes: 7 + 7 are too few whatever is computed again, 8 + 8 are not."""
    heavy = handmade.chain([(1, 1)] * 8, [{"weight_bytes": 1}] * 8)
    asked: Any = {"recompute": recompute, "offload": offload, "time_limit_s": 10, "workers": 1}
    host = Host(memory_bytes=100, bandwidth_bytes_per_s=10**9)
    with pytest.raises(InfeasibleError, match=r"16 bytes .*the 2 GPUs have 14: 2 bytes over"):
        solve(heavy, uniform(2, 7, host=host), Config(**asked))
    assert solve(heavy, uniform(2, 8, host=host), Config(**asked)).memory[0].peak_bytes == 8


def test_recomputing_is_never_worse() -> None:
    """The search with recomputation offers what the one without it finds."""
    plain = planned(6 * GIB, method="contiguous")
    joint = planned(6 * GIB, method="contiguous", recompute="auto")
    assert per_microbatch(joint) < per_microbatch(plain)
    ample = planned(60 * GIB, recompute="auto")
    assert not any(stage.remat for stage in ample.stages)


def test_the_bound_holds_with_recomputation() -> None:
    """No bound that follows from kept bytes is claimed: it would exceed what is possible."""
    plain = planned(4 * GIB, method="contiguous")
    joint = planned(4 * GIB, method="contiguous", recompute="auto")
    bounds = joint.solver.bounds
    claims = [Fraction(*bound) for bound in (bounds.any, bounds.k1, bounds.contiguous) if bound]
    assert claims
    assert max(claims) <= per_microbatch(joint) < Fraction(*(plain.solver.bounds.contiguous or ()))


@grids.each_value(
    case=[((0, 1), 2.0), ((1, 7), 8.0), ((0, 1001), 2.0)], semantics=["2bw", "flush"]
)
def test_no_bound_rounds_what_a_run_does_not(
    case: tuple[tuple[int, int], float], semantics: Any
) -> None:
    """(T2) rounds a run of layers once where a GPU's speed divides its times."""
    times, speed = case
    row = {"output_bytes": 10, "saved_input_bytes": 10, "saved_bytes": 1000}
    of = handmade.chain([times] * 6, [row | {"saved_input_bytes": 0}, *[row] * 5])
    fast = uniform(1, 2600)
    gpus = tuple(gpu.model_copy(update={"speed": speed}) for gpu in fast.gpus)
    config = Config(recompute="auto", semantics=semantics, time_limit_s=1, deterministic=True)
    plan = solve(of, fast.model_copy(update={"gpus": gpus}), config)
    assert any(stage.remat for stage in plan.stages)
    assert plan.solver.bounds.any is not None
    assert Fraction(*plan.solver.bounds.any) <= plan.period_per_microbatch


def test_resumes_from_a_plan_that_recomputes() -> None:
    """With --recompute auto it competes; without, it is refused with the way out."""
    first = with_little()
    second = planned(LITTLE, recompute="auto", resume=first, time_limit_s=0.5)
    assert per_microbatch(second) <= per_microbatch(first)
    with pytest.raises(InputError, match="recompute layers"):
        planned(16 * GIB, resume=first)


def test_a_plan_to_start_from_competes_though_the_gap_is_reached() -> None:
    """A search that is content at once still is no longer than the plan it starts from."""
    first = planned(4 * GIB, recompute="auto", method="contiguous")
    lazy = {"recompute": "auto", "gap": 9.0, "method": "contiguous"}
    assert per_microbatch(planned(4 * GIB, **lazy)) > per_microbatch(first)
    assert per_microbatch(planned(4 * GIB, **lazy, resume=first)) <= per_microbatch(first)


def test_resumes_no_plan_of_another_question() -> None:
    """A recomputing plan of another chain, on more GPUs, or that offloads is refused at once."""
    first = with_little()
    seen: list[str] = []
    config = Config(recompute="auto", resume=first, time_limit_s=1, workers=1)

    def refused(chain_: Chain, cluster: Cluster, again: Config, message: str) -> None:
        with pytest.raises(InputError, match=message):
            solve(chain_, cluster, again, lambda *row: seen.append(row[4]))

    other = chain().model_copy(update={"layers": chain().layers[:-1]})
    refused(other, machines(16 * GIB), config, "got a plan for chain .*Plan without config.resume")
    one = uniform(1, 16 * GIB, bandwidth_bytes_per_s=12 * 10**9)
    refused(chain(), one, config, "uses GPU 1, need GPUs below 1")
    away = next(
        plan
        for plan in (random_plan(seed, memory_model="exact", offload=True) for seed in range(40))
        if plan.recomputes and any(op.kind.is_host for op in plan.ops)
    )
    asked = replace(config, resume=away)
    refused(away.chain, away.cluster, asked, "send what they keep to the host")
    assert seen == []


@pytest.mark.parametrize("during", ["recompute options", "recompute bound", "bounds"])
def test_ctrl_c_keeps_the_best_plan(during: str) -> None:
    """Whatever the search does, once there is a plan: options, a candidate's start, the bound."""
    phases: list[str] = []

    def interrupt(*row: Any) -> None:
        started = "recompute options" in phases
        phases.append(row[4])
        if row[4] == during and (started or during == "recompute options"):
            raise KeyboardInterrupt

    config = Config(recompute="auto", time_limit_s=60, workers=1, method="contiguous")
    plan = solve(chain(), machines(4 * GIB), config, interrupt)
    assert verify(plan) == ()
    assert phases[-3:] == [during, "interrupted", "done"]


def test_ctrl_c_without_a_plan_is_passed_on() -> None:
    """Where nothing is found yet there is nothing to return."""

    def interrupt(*row: Any) -> None:
        if row[4] == "recompute options":
            raise KeyboardInterrupt

    config = Config(recompute="auto", time_limit_s=4, workers=1, method="contiguous")
    with pytest.raises(KeyboardInterrupt):
        solve(chain(), machines(LITTLE), config, interrupt)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"recompute": "some"}, "config.recompute: got some, need off or auto"),
        ({"recompute": "auto", "memory_model": "paper"}, "paper's model has no recomputation"),
        ({"recompute": "auto", "method": "paper-ilp"}, "ILP has no recomputation"),
    ],
)
def test_refuses_what_cannot_be(options: dict[str, Any], message: str) -> None:
    """Choices that exclude each other are named."""
    with pytest.raises(InputError, match=message):
        Config(**options)
