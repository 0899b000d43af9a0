"""Random valid plans: chains, clusters, allocations and schedules that keep every rule.

`random_plan(seed)` is deterministic. Sizes and times are small integers so that ties, zero
lengths and wrap-arounds are common. The memory table and the step are the verifier's.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Literal

from pipeplan.chain import Chain, Layer
from pipeplan.cluster import Cluster, Gpu, Links, Pair
from pipeplan.plan import MemoryModel, Plan, Remat, Semantics, Stage
from pipeplan.testing.plans_offload import fit_host, offloading, with_states_on_host
from pipeplan.testing.plans_programs import running, with_options
from pipeplan.testing.plans_times import with_times
from pipeplan.verifier import Audit, audit

Duplex = Literal["full", "half"]
_DUPLEXES: tuple[Duplex, ...] = ("full", "half")
GBPS = 10**9
"""One byte per nanosecond."""
UNSPLIT = dict.fromkeys(("backward_weight_ns", "backward_input_ns", "forward_split_ns"))
"""Fields of a layer that does not tell what a backward in two halves takes."""
NO_OTHER_TIMES: dict[str, int | None] = {"forward_light_ns": None, "optimizer_ns": 0, **UNSPLIT}
"""Of a layer that tells the times of a whole forward and backward alone."""


def random_plan(
    seed: int,
    *,
    layers: int | None = None,
    gpus: int | None = None,
    k: int | None = None,
    semantics: Semantics | None = None,
    memory_model: MemoryModel | None = None,
    duplex: Duplex | None = None,
    offload: bool | None = None,
    programs: bool = False,
) -> Plan:
    """A valid plan; what is not given is drawn. Offloading needs the exact memory model.

    With `programs` some plans have layers under options; these name no real program.
    """
    rng = Random(seed)
    chain = random_chain(rng, layers or rng.randint(1, 7))
    shared = rng.choice(_DUPLEXES) if duplex is None else duplex
    cluster = random_cluster(rng, gpus or rng.randint(1, 5), shared)
    stages = random_stages(rng, len(chain.layers), len(cluster.gpus))
    memory_model = memory_model or rng.choice(["exact", "exact", "exact", "paper"])
    if memory_model == "exact" and rng.random() < 0.4:
        stages = tuple(recomputing(rng, stage) for stage in stages)
    # Draws of their own: plans without options, or that do not offload, stay what they were.
    optional = Random(f"{seed} programs")
    if programs and memory_model == "exact" and optional.random() < 0.3:
        chain = with_options(optional, chain)
        stages = tuple(running(optional, chain, stage) for stage in stages)
    plan = scheduled(rng, chain, cluster, stages, k or rng.randint(1, 3))
    semantics = semantics or rng.choice(["2bw", "flush"])
    plan = _with(plan, semantics=semantics, memory_model=memory_model)
    plan = _tie(rng, plan)
    hosts = Random(f"{seed} host")
    drawn = hosts.random() < 0.3
    if memory_model == "exact" and (drawn if offload is None else offload):
        plan = with_states_on_host(Random(f"{seed} states"), offloading(hosts, plan))
    return fit_host(hosts, _fill_in(rng, plan))


def scheduled(
    rng: Random, chain: Chain, cluster: Cluster, stages: tuple[Stage, ...], k: int
) -> Plan:
    """A plan with a feasible schedule; memory table, step and budgets are still open."""
    plan = Plan(
        chain=chain,
        chain_digest=chain.digest(),
        cluster=cluster,
        k=k,
        period_ns=1,
        step_ns=0,
        stages=stages,
        ops=(),
        memory=(),
    )
    return with_times(rng, plan)


def settle(plan: Plan) -> Plan:
    """`plan` with its memory table and step as the verifier has them."""
    found = audit(plan)
    return _with(plan, memory=found.memory, step_ns=found.step_ns)


def random_chain(rng: Random, count: int) -> Chain:
    """Layers with small times and sizes, zeros among them."""

    def some(most: int, zero: float = 0.25) -> int:
        return 0 if rng.random() < zero else rng.randint(1, most)

    layers: list[Layer] = []
    size = input_bytes = some(6)
    for index in range(count):
        output = some(6)
        layers.append(
            Layer(
                name=f"l{index}",
                forward_ns=some(5, 0.15),
                backward_ns=some(8, 0.1),
                optimizer_ns=some(4),
                weight_bytes=some(5),
                gradient_bytes=(gradient := some(5)),
                waiting_gradient_bytes=gradient // 2,
                buffer_bytes=gradient % 3,
                frozen_bytes=gradient // 3,
                optimizer_bytes=some(5),
                output_bytes=output,
                output_gradient_bytes=None if rng.random() < 0.6 else some(7),
                saved_input_bytes=(kept := rng.randint(0, size)),
                saved_bytes=(rest := some(6)),
                saved_output_bytes=(out := rng.randint(0, output)),
                saved_passing_bytes=min(kept, output - out) if kept % 2 else 0,
                forward_workspace_bytes=(work := some(6, 0.5)),
                forward_light_workspace_bytes=(None, work, rest // 2 - output, rest + 2 * work)[
                    (rest + gradient) % 4
                ],
                backward_workspace_bytes=some(6, 0.5),
                optimizer_workspace_bytes=some(20, 0.5),
                parameters=(f"p{index}",),
            )
        )
        size = output
    return Chain(name="random", input_bytes=input_bytes, layers=tuple(layers))


def random_cluster(rng: Random, count: int, duplex: Duplex) -> Cluster:
    """GPUs of different speed, links with and without latency and bandwidth."""

    def link() -> tuple[int, int | None]:
        return rng.choice([0, 0, 1, 2]), rng.choice([None, GBPS, GBPS, GBPS // 2, 3 * GBPS])

    ends = [(a, b) for a in range(count) for b in range(count) if a != b]
    if duplex == "half":
        ends = [rng.choice([(a, b), (b, a)]) for a, b in ends if a < b]
    chosen = rng.sample(ends, rng.randint(0, len(ends)))
    latency, bandwidth = link()
    return Cluster(
        gpus=tuple(
            Gpu(name=f"g{i}", memory_bytes=0, speed=rng.choice([1.0, 1.0, 0.5, 2.0, 0.7]))
            for i in range(count)
        ),
        action_overhead_ns=rng.choice([0, 0, 1]),
        links=Links(
            duplex=duplex,
            latency_ns=latency,
            bandwidth_bytes_per_s=bandwidth,
            pairs=tuple(_pair(a, b, *link()) for a, b in chosen),
        ),
    )


def _pair(source: int, target: int, latency: int, bandwidth: int | None) -> Pair:
    return Pair(source=source, target=target, latency_ns=latency, bandwidth_bytes_per_s=bandwidth)


def random_stages(rng: Random, layers: int, gpus: int) -> tuple[Stage, ...]:
    """Stages of any length on any GPU."""
    count = max(rng.randint(0, layers - 1), rng.randint(0, layers - 1))
    cuts = sorted(rng.sample(range(1, layers), count))
    firsts, lasts = [0, *cuts], [*(cut - 1 for cut in cuts), layers - 1]
    return tuple(
        Stage(id=i, layers=(a, b), gpu=rng.randrange(gpus))
        for i, (a, b) in enumerate(zip(firsts, lasts, strict=True))
    )


def recomputing(rng: Random, stage: Stage) -> Stage:
    """The stage with random runs of its layers, or none, computed again."""
    runs = tuple(_runs(rng, *stage.layers))
    return stage.model_copy(update={"remat": Remat(recompute=runs) if runs else None})


def _runs(rng: Random, first: int, last: int) -> Iterator[tuple[int, int]]:
    """Random runs of layers first..last, each before random ones that it holds."""
    while first <= last:
        end = rng.randint(first, last)
        if rng.random() < 0.5:
            yield first, end
            yield from _runs(rng, first, end - 1)
        first = end + 1


def _tie(rng: Random, plan: Plan) -> Plan:
    """Sometimes lets two layers of one GPU share a parameter."""
    hosted = [s for s in plan.stages if rng.random() < 0.3]
    if len(hosted) < 2 or hosted[0].gpu != hosted[-1].gpu:
        return plan
    layers = list(plan.chain.layers)
    first, last = hosted[0].first, hosted[-1].first
    layers[last] = layers[last].model_copy(update={"parameters": layers[first].parameters})
    chain = plan.chain.model_copy(update={"layers": tuple(layers)})
    return _with(plan, chain=chain, chain_digest=chain.digest())


def _fill_in(rng: Random, plan: Plan) -> Plan:
    """Micro-batches per step that (R6) allows, budgets that hold, then table and step."""
    found = audit(plan)
    needed = max(1, max(found.in_flight) - 1, found.least_microbatches)
    return _fitting(rng, _with(plan, microbatches=needed + rng.choice([0, 0, 1, 5])), found)


def budgeted(rng: Random, plan: Plan) -> Plan:
    """`plan` on GPUs whose memory it fits into, with its table and step."""
    return _fitting(rng, plan, audit(plan))


def _fitting(rng: Random, plan: Plan, found: Audit) -> Plan:
    spare = rng.choice([0, 0, 100])
    gpus = tuple(
        gpu.model_copy(update={"memory_bytes": row.peak_bytes + spare})
        for gpu, row in zip(plan.cluster.gpus, found.memory, strict=True)
    )
    cluster = plan.cluster.model_copy(update={"gpus": gpus})
    return settle(_with(plan, cluster=cluster))


def _with(plan: Plan, **fields: object) -> Plan:
    return plan.model_copy(update=fields)
