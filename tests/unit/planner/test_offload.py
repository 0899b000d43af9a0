"""Plans that offload: verified and replayed like all, never worse, resumed, refused clearly."""

from __future__ import annotations

from fractions import Fraction
from random import Random
from typing import Any

import pytest

from pipeplan.chain import Chain
from pipeplan.cluster import Cluster, Host, uniform
from pipeplan.errors import InfeasibleError, InputError, TimeLimitError
from pipeplan.plan import Plan
from pipeplan.planner import Config, solve
from pipeplan.sweep import sweep
from pipeplan.testing.networks import build
from pipeplan.testing.plans import random_plan
from pipeplan.verifier import verify
from tests import grids, handmade

GIB = 2**30
FAST = Host(memory_bytes=128 * GIB, bandwidth_bytes_per_s=12 * 10**9)


def chain() -> Chain:
    """ResNet-18 at the paper's setting."""
    return build("resnet18", 8, 1000)


def machines(memory: int, host: Host | None = FAST, gpus: int = 2) -> Cluster:
    """Equal GPUs, 12 GB/s between them and to the host."""
    return uniform(gpus, memory, bandwidth_bytes_per_s=12 * 10**9, host=host)


def planned(memory: int, host: Host | None = FAST, **options: Any) -> Plan:
    """A short search, one thread, contiguous plans."""
    limits = {"time_limit_s": 3, "workers": 1, "gap": 0.02, "method": "contiguous"}
    return solve(chain(), machines(memory, host), Config(**limits | options))


def per_microbatch(plan: Plan) -> Fraction:
    """Ns."""
    return Fraction(plan.period_ns, plan.k)


def moved(plan: Plan) -> int:
    """Ops on the ways to the host."""
    return sum(op.kind.is_host for op in plan.ops)


@pytest.mark.parametrize(("semantics", "duplex"), [("flush", "full"), ("2bw", "half")])
def test_one_gpu_offloads_between_its_stages(semantics: str, duplex: str) -> None:
    """One stage would save nothing. A little leaves beside the computes, for more they wait."""
    host = FAST.model_copy(update={"duplex": duplex})
    options = {
        "semantics": semantics,
        "method": "auto",
        "time_limit_s": 0.5,
        "deterministic": True,
    }
    ample, scarce, scarcer = (
        solve(chain(), machines(memory, host, 1), Config(offload="auto", workers=1, **options))
        for memory in (4 * GIB, 3 * GIB, 2 * GIB)
    )
    assert verify(scarce) == verify(scarcer) == ()
    assert not moved(ample)
    assert moved(scarce)
    assert scarce.period_ns == ample.period_ns < scarcer.period_ns
    with pytest.raises(TimeLimitError):
        solve(
            chain(),
            machines(3 * GIB, host, 1),
            Config(offload="auto", **options | {"method": "contiguous"}),
        )


def test_the_last_gpu_offloads_between_its_stages() -> None:
    """Its backward follows its forward: in one stage it has no plan, in small ones no wait.

    Four of eight equal layers keep 40 bytes and their boundaries. What leaves takes as long as
    the forward that made it.
    """
    fields = [
        {"output_bytes": 1, "saved_input_bytes": int(n > 0), "saved_bytes": 10} for n in range(8)
    ]
    equal = handmade.chain([(10, 20)] * 8, fields)
    host = Host(memory_bytes=1000, bandwidth_bytes_per_s=10**9)
    limits = {"offload": "auto", "k": 1, "time_limit_s": 0.5, "deterministic": True, "workers": 1}
    two = uniform(2, 44, host=host)
    plan = solve(equal, two, Config(**limits))
    assert verify(plan) == ()
    assert plan.period_ns == 4 * (10 + 20)
    assert {stage.gpu for stage in plan.stages if stage.remat and stage.remat.offload} == {0, 1}
    with pytest.raises(TimeLimitError):
        solve(equal, two, Config(**limits, method="contiguous"))


@pytest.mark.parametrize("semantics", ["flush", "2bw"])
@pytest.mark.parametrize("duplex", ["full", "half"])
def test_shorter_than_without(semantics: str, duplex: str) -> None:
    """Under scarce memory plans that offload are shorter; every voice accepts them."""
    host = FAST.model_copy(update={"duplex": duplex})
    plain = planned(4 * GIB, host, semantics=semantics)
    away = planned(4 * GIB, host, semantics=semantics, offload="auto")
    assert verify(away) == ()
    assert moved(away)
    assert not moved(plain)
    assert per_microbatch(away) < per_microbatch(plain)


@grids.first(2, memory=[2, 3, 5])
def test_all_three_together_are_never_worse(memory: int) -> None:
    """Cuts, recomputation and offloading at once: at most as long as the first two."""
    joint = planned(memory * GIB, recompute="auto")
    both = planned(memory * GIB, recompute="auto", offload="auto")
    assert verify(both) == ()
    assert per_microbatch(both) <= per_microbatch(joint)


@pytest.mark.timeout(60)
def test_all_three_together_with_two_microbatches_per_period() -> None:
    """Halving periods ends where --k writes a schedule of one micro-batch with k of them."""
    both = planned(4 * GIB, recompute="auto", offload="auto", k=2, time_limit_s=1)
    assert both.k == 2
    assert verify(both) == ()


def test_nothing_moves_without_need() -> None:
    """Where all fits on the GPUs nothing is offloaded."""
    ample = planned(60 * GIB, recompute="auto", offload="auto")
    assert not moved(ample)
    assert not any(stage.remat for stage in ample.stages)


def test_no_bound_from_bytes_is_claimed() -> None:
    """Bytes that may leave prove nothing: the bounds are those of the load."""
    plain, away = planned(4 * GIB), planned(4 * GIB, offload="auto")
    bounds = away.solver.bounds
    claims = [Fraction(*bound) for bound in (bounds.any, bounds.k1, bounds.contiguous) if bound]
    assert claims
    assert max(claims) <= per_microbatch(away) < Fraction(*(plain.solver.bounds.contiguous or ()))


def test_the_hosts_memory_is_kept() -> None:
    """A small host takes less, and the plan is longer for it."""
    small = FAST.model_copy(update={"memory_bytes": GIB // 2})
    tight, ample = planned(4 * GIB, small, offload="auto"), planned(4 * GIB, offload="auto")
    assert sum(row.host_bytes for row in tight.memory) <= GIB // 2
    assert sum(row.host_bytes for row in ample.memory) > GIB // 2
    assert per_microbatch(tight) >= per_microbatch(ample)


def test_resumes_from_a_plan_that_offloads() -> None:
    """With --offload auto it competes, with what is away; without, it is refused."""
    first = planned(4 * GIB, offload="auto")
    second = planned(4 * GIB, offload="auto", resume=first, time_limit_s=0.2)
    assert per_microbatch(second) <= per_microbatch(first)
    both = planned(4 * GIB, recompute="auto", offload="auto")
    third = planned(4 * GIB, recompute="auto", offload="auto", resume=both, time_limit_s=0.2)
    assert per_microbatch(third) <= per_microbatch(both)
    with pytest.raises(InputError, match="send what they keep to the host"):
        planned(16 * GIB, resume=first)


def test_the_same_seed_gives_the_same_plan() -> None:
    """With --deterministic offloading is decided the same way twice."""
    asked = {"recompute": "auto", "offload": "auto", "deterministic": True, "time_limit_s": 0.2}
    one, two = planned(4 * GIB, **asked), planned(4 * GIB, **asked)
    assert one.ops == two.ops
    assert one.stages == two.stages


def test_a_sweep_offloads() -> None:
    """Points of several memories may offload, and more memory is never slower."""
    config = Config(time_limit_s=2, workers=1, gap=0.02, method="contiguous", offload="auto")
    points = sweep(chain(), [machines(size * GIB) for size in (4, 5)], config)
    small, large = (point.plan for point in points)
    assert small is not None
    assert large is not None
    assert moved(small)
    assert per_microbatch(large) <= per_microbatch(small)


def test_a_cluster_without_a_host_is_refused() -> None:
    """Where to offload to must be said."""
    with pytest.raises(InputError, match=r"config.offload: got auto for a cluster without a host"):
        planned(4 * GIB, None, offload="auto")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"offload": "some"}, "config.offload: got some, need off, auto or states"),
        ({"offload": "auto", "memory_model": "paper"}, "paper's model has no offloading"),
        ({"offload": "auto", "method": "paper-ilp"}, "ILP has no offloading"),
    ],
)
def test_refuses_what_cannot_be(options: dict[str, Any], message: str) -> None:
    """Choices that exclude each other are named."""
    with pytest.raises(InputError, match=message):
        Config(**options)


def test_voices_agree_on_random_chains() -> None:
    """What the solver claims of small random plans that offload is what every voice says."""
    offloading = 0
    for seed in range(10):
        rng = Random(seed)
        plan = random_plan(seed, memory_model="exact", layers=rng.randint(3, 7))
        need = max(row.peak_bytes for row in plan.memory)
        host = Host(
            memory_bytes=rng.choice([100, 10**6]),
            bandwidth_bytes_per_s=rng.choice([3 * 10**8, 10**9, 7 * 10**9]),
            duplex=rng.choice(["full", "half"]),
        )
        least = max(1, int(need * rng.choice([0.6, 0.8, 1.0])))
        gpus = tuple(gpu.model_copy(update={"memory_bytes": least}) for gpu in plan.cluster.gpus)
        config = Config(
            semantics=rng.choice(["2bw", "flush"]),
            recompute=rng.choice(["off", "auto"]),
            k=rng.choice(["auto", 1]),
            offload="auto",
            method="auto" if seed % 2 else "contiguous",
            time_limit_s=0.3,
            workers=1,
            deterministic=True,
        )
        machines_ = plan.cluster.model_copy(update={"gpus": gpus, "host": host})
        try:
            found = solve(plan.chain, machines_, config)
        except (InfeasibleError, TimeLimitError):
            continue
        offloading += moved(found) > 0
    assert offloading >= 2
