"""Chains and machines that are legal and rare: layers of no length, GPUs of no memory, no way."""

from __future__ import annotations

from random import Random

import pytest

from pipeplan.chain import Chain, Layer
from pipeplan.cluster import Cluster, Gpu, Host, Links
from pipeplan.ilp import Limits, Problem, solve
from pipeplan.ilp.costs import CostModel
from pipeplan.ilp.cpsat.period_search import exact_scaling
from pipeplan.ilp.cpsat.solve import solve_at
from pipeplan.ilp.cpsat.variables import Instance
from pipeplan.ilp.problem import options_of

MB = 10**6
LAYER = {
    "optimizer_ns": 0,
    "weight_bytes": MB,
    "gradient_bytes": MB,
    "output_bytes": MB,
    "saved_input_bytes": MB,
    "saved_bytes": MB,
}
QUICK = Limits(time_limit_s=0.5, workers=1, deterministic=True)


def chain(times: list[tuple[int, int]], **last: int) -> Chain:
    """Layers with these F and B in ns; `last`: bytes of the last one."""
    fields = [LAYER] * (len(times) - 1) + [LAYER | last]
    layers = (
        Layer(name=f"l{i}", forward_ns=f, backward_ns=b, **fields[i])
        for i, (f, b) in enumerate(times)
    )
    return Chain(name="odd", input_bytes=MB, layers=tuple(layers))


def machines(gpus: int, memory: int = 10**12, bandwidth: int = 10**9, **more: Host) -> Cluster:
    """Equal GPUs."""
    each = Gpu(name="gpu", memory_bytes=memory)
    links = Links(duplex="half", bandwidth_bytes_per_s=bandwidth)
    return Cluster(gpus=(each,) * gpus, links=links, **more)


@pytest.mark.parametrize("stretch", [1.0, 1.05, 1.2, 2.0])
def test_orders_of_ops_shorter_than_a_tick_agree(stretch: float) -> None:
    """Eight layers are modelled in ticks: 100 ns and nothing begin together, in this order."""
    times = [(10**8 * (1 + i % 3), 2 * 10**8) for i in range(8)]
    for long, none in ((2, 3), (5, 6)):
        times[long], times[none] = (100, 100), (0, 0)
    of = chain(times)
    costs = CostModel(of, machines(2), "2bw", "exact")
    instance = exact_scaling(Instance(costs, tuple((i, i) for i in range(8))))
    assert instance.tick > 100
    period = int(costs.load_ns(0, 7, 0) // 2 * stretch) // instance.tick + 1
    options = options_of(Problem(chain=of, cluster=costs.cluster), QUICK)
    found = solve_at(instance, period, costs.budgets, options, 2.0)
    for schedule in found.schedules:
        assert schedule.period >= costs.load_ns(0, 7, 0) // 2


def test_a_gpu_without_memory_hosts_nothing() -> None:
    """Its budget of 0 divides nothing: the other one does all."""
    gpus = (Gpu(name="a", memory_bytes=10**9), Gpu(name="b", memory_bytes=0))
    problem = Problem(
        chain=chain([(MB, 2 * MB)] * 4),
        cluster=Cluster(gpus=gpus),
        semantics="flush",
        microbatches=4,
        ks=(1, 2, 3, 4),
    )
    found = solve(problem, QUICK)
    assert {stage.gpu for stage in found.stages} == {0}


def test_transfers_that_never_happen_are_no_number() -> None:
    """On one GPU nothing is sent, and nobody is sent what the last layer makes."""
    times = [(MB, 2 * MB)] * 3
    assert solve(Problem(chain=chain(times), cluster=machines(1, bandwidth=1)), QUICK).period_ns
    huge = chain(times, output_bytes=2**55)
    cluster = machines(2, memory=2**57, bandwidth=1)
    assert solve(Problem(chain=huge, cluster=cluster), QUICK).period_ns


def test_the_start_of_a_step_search_is_the_shortest_periodic_plan() -> None:
    """Eight equal layers on four GPUs, 32 micro-batches: 31 periods of 6 ms, and 24 of the first.

    What no step goes below, fill and drain in it, is no bound on its periods.
    """
    of = chain([(MB, 2 * MB)] * 8)
    layers = tuple(layer.model_copy(update={"output_bytes": 0}) for layer in of.layers)
    problem = Problem(
        chain=of.model_copy(update={"layers": layers}),
        cluster=machines(4),
        semantics="flush",
        microbatches=32,
        ks=(1, 2, 3, 4, 5, 6, 7, 8),
    )
    found = solve(problem, Limits(time_limit_s=1.0, without=frozenset({"step search"})))
    assert found.period_ns == (31 * 6 + 24) * MB


def random_chain(seed: int, count: int) -> Chain:
    """Layers of any times and sizes."""
    draw = Random(seed).randint
    small = LAYER | dict.fromkeys(("weight_bytes", "gradient_bytes"), MB // 10)
    small |= dict.fromkeys(("output_bytes", "saved_input_bytes"), MB // 5)
    layers = []
    for i in range(count):
        times = {"forward_ns": draw(5, 30) * MB // 10, "backward_ns": draw(10, 60) * MB // 10}
        fields = small | {"saved_bytes": draw(5, 30) * MB // 10}
        layers.append(Layer(name=f"l{i}", **times, **fields))
    return Chain(name="random", input_bytes=MB // 5, layers=tuple(layers))


def test_models_without_offloading_end_no_search_with_it() -> None:
    """Six layers: they decide 16.2 ms, what leaves the GPUs allows 12.6."""
    host = Host(memory_bytes=10**9, bandwidth_bytes_per_s=2 * 10**9)
    cluster = machines(3, 9 * MB, host=host).model_copy(update={"links": Links()})
    problem = Problem(
        chain=random_chain(1, 6), cluster=cluster, ks=(1, 2, 3, 4, 5, 6, 7, 8), offload=True
    )
    found = solve(problem, Limits(time_limit_s=2.0, workers=1, deterministic=True))
    assert found.per_microbatch < 13 * MB


def test_the_user_keeps_what_the_enumeration_of_sets_has_found() -> None:
    """Ctrl-C where progress has just told of a shorter plan: it is what is returned."""
    problem = Problem(
        chain=random_chain(2, 4),
        cluster=machines(2, 5 * MB).model_copy(update={"links": Links()}),
        ks=(1,),
        recompute=True,
    )
    told: list[object] = []

    def hears(_: float, period: object, __: object, ___: object, phase: str) -> None:
        if phase.startswith("recompute enumeration"):
            told.append(period)
            if period != told[0]:
                raise KeyboardInterrupt

    without = frozenset({"recompute balancing"})
    found = solve(problem, Limits(time_limit_s=20.0, workers=1, without=without), (), hears)
    assert len(told) > 1
    assert found.per_microbatch == told[-1]
