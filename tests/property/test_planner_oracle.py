"""The planner held against brute force on tiny instances: never better, never wrongly proven."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any
from unittest import mock

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeplan import planner
from pipeplan.chain import Chain
from pipeplan.cluster import Cluster, Gpu, Links, Pair, uniform
from pipeplan.errors import InfeasibleError
from pipeplan.ilp.costs import CostModel
from pipeplan.ilp.cpsat import period_search
from pipeplan.plan import MemoryModel, Plan, Rational, Semantics
from tests import handmade, oracle

CHECKS = [HealthCheck.too_slow, HealthCheck.data_too_large]
EXAMPLES = settings(max_examples=40, derandomize=True, deadline=None, suppress_health_check=CHECKS)
FEW = settings(max_examples=30, derandomize=True, deadline=None, suppress_health_check=CHECKS)

small = st.integers(0, 3)


@st.composite
def chains(
    draw: st.DrawFn, layers: int, times: st.SearchStrategy[int], *, messages: bool
) -> Chain:
    """Up to `layers` layers of a few ns and bytes; boundaries carry bytes where `messages`."""
    count = draw(st.integers(1, layers))
    fields: list[Mapping[str, Any]] = []
    for layer in range(count):
        output = draw(small) if messages else 0
        before = fields[-1]["output_bytes"] if layer else 0
        fields.append(
            {
                "output_bytes": output,
                "saved_output_bytes": draw(st.integers(0, output)),
                "saved_input_bytes": draw(st.integers(0, before)),
                "saved_bytes": draw(small),
                "weight_bytes": draw(st.integers(0, 2)),
                "forward_workspace_bytes": draw(st.sampled_from([0, 0, 1])),
                "optimizer_workspace_bytes": draw(st.sampled_from([0, 0, 4])),
                "parameters": draw(st.sampled_from([(), (), (), ("tied",)])),
            }
        )
    return handmade.chain([(draw(times), draw(times)) for _ in range(count)], fields)


@st.composite
def waiting(draw: st.DrawFn) -> tuple[Chain, int]:
    """Few layers with large late updates beside unsaved inputs; about what one GPU needs."""
    fields: list[Mapping[str, Any]] = []
    for _ in range(draw(st.integers(2, 3))):
        gradient = draw(st.integers(0, 1))
        fields.append(
            {
                "output_bytes": draw(small),
                "output_gradient_bytes": 0,
                "saved_bytes": draw(st.integers(0, 1)),
                "gradient_bytes": gradient,
                "waiting_gradient_bytes": draw(st.sampled_from([gradient, gradient, 0])),
                "optimizer_workspace_bytes": draw(st.sampled_from([0, 5, 7])),
            }
        )
    chain = handmade.chain([(1, 1)] * len(fields), fields)
    whole = CostModel(chain, uniform(1, 1), "2bw", "exact").segment(0, len(fields) - 1)
    need = max(whole.running, whole.saved + whole.backward, whole.optimizer)
    return chain, whole.states + need + draw(st.integers(-1, 1))


@st.composite
def clusters(draw: st.DrawFn, gpus: int, *, equal: bool, messages: bool) -> Cluster:
    """Up to `gpus` GPUs with little memory; transfers take 0 to 3 ns."""
    count = draw(st.integers(1, gpus))
    band = draw(st.sampled_from([None, 10**9, 5 * 10**8])) if messages else None
    latency = draw(st.integers(0, 1)) if messages else 0
    memory = st.integers(5, 24)
    one = draw(memory)
    pairs: Sequence[Pair] = ()
    if not equal and count > 1 and messages and draw(st.booleans()):
        pairs = (Pair(source=0, target=1, latency_ns=2),)
    return Cluster(
        gpus=tuple(
            Gpu(
                name=f"gpu{i}",
                memory_bytes=one if equal else draw(memory),
                speed=1.0 if equal else draw(st.sampled_from([0.5, 1.0, 2.0])),
            )
            for i in range(count)
        ),
        action_overhead_ns=draw(st.sampled_from([0, 0, 1])),
        links=Links(
            duplex=draw(st.sampled_from(["full", "half"])),
            latency_ns=latency,
            bandwidth_bytes_per_s=band,
            pairs=tuple(pairs),
        ),
    )


def solved(
    chain: Chain, cluster: Cluster, k: int, semantics: Semantics, model: MemoryModel
) -> Plan | None:
    """The planner's plan; None where it proves that there is none."""
    config = planner.Config(
        k=k,
        semantics=semantics,
        memory_model=model,
        microbatches=64,
        time_limit_s=4,
        workers=1,
        deterministic=True,
    )
    try:
        return planner.solve(chain, cluster, config)
    except InfeasibleError:
        return None


def held_against(
    chain: Chain, cluster: Cluster, k: int, semantics: Semantics, model: MemoryModel
) -> Plan | None:
    """Compare with brute force: feasibility, the period from below, each bound, `optimal`."""
    best = oracle.optimum(
        chain,
        cluster,
        k=k,
        limit=oracle.serial(chain, cluster) * k,
        semantics=semantics,
        memory_model=model,
    )
    plan = solved(chain, cluster, k, semantics, model)
    assert (plan is None) == (best is None)
    if plan is None or best is None:
        return None
    assert plan.k == k
    assert plan.period_ns >= best
    assert value(plan.solver.bounds.any) * k <= best
    if k == 1:
        assert value(plan.solver.bounds.k1) <= best
    if plan.solver.status == "optimal":
        assert plan.period_ns == best
    return plan


def value(bound: Rational | None) -> Fraction:
    """A bound as a number."""
    return Fraction(*bound) if bound else Fraction(0)


semantics = st.sampled_from(["2bw", "flush"])
models = st.sampled_from(["exact", "paper"])


@EXAMPLES
@given(
    chains(4, st.integers(1, 2), messages=False),
    clusters(3, equal=True, messages=False),
    semantics,
    models,
)
def test_free_boundaries(
    chain: Chain, cluster: Cluster, how: Semantics, model: MemoryModel
) -> None:
    """Without transfers and overhead the planner finds the optimum of k = 1 and proves it."""
    plan = held_against(chain, cluster, 1, how, model)
    if plan is not None and how == "2bw" and not cluster.action_overhead_ns:
        assert plan.solver.status == "optimal"


@EXAMPLES
@given(
    chains(3, st.integers(0, 2), messages=True),
    clusters(2, equal=True, messages=True),
    semantics,
    models,
)
def test_messages(chain: Chain, cluster: Cluster, how: Semantics, model: MemoryModel) -> None:
    """With transfers, message bytes, zero-length ops and tied layers no claim is ever wrong."""
    held_against(chain, cluster, 1, how, model)


@settings(max_examples=12, derandomize=True, deadline=None, suppress_health_check=CHECKS)
@given(waiting(), st.integers(1, 2))
def test_waiting_gradients(chain: tuple[Chain, int], gpus: int) -> None:
    """Updates just before a stage's forward (M7): none is charged to layers in its midst."""
    held_against(chain[0], uniform(gpus, max(1, chain[1])), 1, "2bw", "exact")


@FEW
@given(
    chains(3, st.integers(1, 2), messages=True),
    clusters(2, equal=False, messages=True),
    semantics,
    models,
)
def test_unequal_gpus(chain: Chain, cluster: Cluster, how: Semantics, model: MemoryModel) -> None:
    """GPUs of different speed and memory, links of different latency: no claim is ever wrong."""
    held_against(chain, cluster, 1, how, model)


@FEW
@given(
    chains(3, st.integers(1, 2), messages=False),
    clusters(2, equal=True, messages=False),
    semantics,
    models,
)
def test_two_per_period(
    chain: Chain, cluster: Cluster, how: Semantics, model: MemoryModel
) -> None:
    """With k = 2: never below brute force, bounds for any k hold, `optimal` is."""
    held_against(chain, cluster, 2, how, model)


STRETCH = 10**6


def stretched(chain: Chain, cluster: Cluster) -> tuple[Chain, Cluster]:
    """The same with every duration `STRETCH` times as long, bytes as they are."""
    layers = [
        layer.model_copy(
            update={
                "forward_ns": layer.forward_ns * STRETCH,
                "backward_ns": layer.backward_ns * STRETCH,
            }
        )
        for layer in chain.layers
    ]
    links = cluster.links
    band = links.bandwidth_bytes_per_s
    slow = {
        "latency_ns": links.latency_ns * STRETCH,
        "bandwidth_bytes_per_s": None if band is None else band // STRETCH,
    }
    return chain.model_copy(update={"layers": tuple(layers)}), cluster.model_copy(
        update={
            "links": links.model_copy(update=slow),
            "action_overhead_ns": cluster.action_overhead_ns * STRETCH,
        }
    )


@settings(max_examples=30, derandomize=True, deadline=None, suppress_health_check=CHECKS)
@given(
    chains(3, st.integers(0, 2), messages=True),
    clusters(2, equal=True, messages=True),
    models,
    st.sampled_from([0, period_search.FINE_ITEMS]),
)
def test_long_times(chain: Chain, cluster: Cluster, model: MemoryModel, fine: int) -> None:
    """Milliseconds, in ticks or exact: the period and each bound agree with the same in ns.

    A period of many ns lies between those of the few ns it stands for, which are rounded up.
    """
    limit = oracle.serial(chain, cluster)
    best = oracle.optimum(chain, cluster, limit=limit, memory_model=model)
    with mock.patch.object(period_search, "FINE_ITEMS", fine):
        plan = solved(*stretched(chain, cluster), 1, "2bw", model)
    assert (plan is None) == (best is None)
    if plan is None or best is None:
        return
    assert plan.period_ns > (best - 1) * STRETCH
    assert value(plan.solver.bounds.k1) <= best * STRETCH
    if plan.solver.status == "optimal":
        assert plan.period_ns <= best * STRETCH
