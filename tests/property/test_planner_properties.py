"""What must hold between plans: more of anything never hurts, names mean nothing, proofs agree."""

from __future__ import annotations

import random
from fractions import Fraction

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from pipeplan import planner
from pipeplan.chain import Chain
from pipeplan.cluster import Cluster, Gpu, Links
from pipeplan.errors import InfeasibleError, TimeLimitError
from pipeplan.plan import MemoryModel, Plan, Rational, Semantics
from tests import grids, handmade
from tests.property.test_planner_oracle import chains

EXAMPLES = settings(
    max_examples=16,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],  # shrinking a search takes minutes
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
some_chain = chains(4, st.integers(1, 3), messages=True)
models = st.sampled_from(["exact", "paper"])
kinds = st.sampled_from(["2bw", "flush"])
duplexes = st.sampled_from(["full", "half"])


def machines(memories: list[int], duplex: str, speeds: list[float] | None = None) -> Cluster:
    """GPUs named in order; transfers of one byte last 1 ns."""
    names = (f"gpu{index}" for index in range(len(memories)))
    rates = speeds or [1.0] * len(memories)
    return Cluster.from_data(
        {
            "format": "pipeplan-cluster/1",
            "gpus": [
                {"name": name, "memory_bytes": memory, "speed": speed}
                for name, memory, speed in zip(names, memories, rates, strict=True)
            ],
            "links": {"duplex": duplex, "bandwidth_bytes_per_s": 10**9},
        }
    )


def solve(
    chain: Chain, cluster: Cluster, model: MemoryModel, semantics: Semantics = "2bw"
) -> Plan | None:
    """The plan of a search that repeats exactly; None where it is proven that there is none."""
    config = planner.Config(
        memory_model=model,
        semantics=semantics,
        k=1,
        time_limit_s=1,
        workers=1,
        microbatches=16,
        deterministic=True,
    )
    try:
        return planner.solve(chain, cluster, config)
    except InfeasibleError:
        return None


def value(bound: Rational | None) -> Fraction:
    """A bound as a number."""
    return Fraction(*bound) if bound else Fraction(0)


def assert_no_better(less: Plan | None, more: Plan | None) -> None:
    """A plan for less is one for more: no proof for more may exclude it, no optimum be worse."""
    if less is None:
        return
    assert more is not None
    period = less.period_per_microbatch
    assert value(more.solver.bounds.any) <= period
    if less.k == 1:
        assert value(more.solver.bounds.k1) <= period
    if "optimal" == less.solver.status == more.solver.status:
        assert more.period_per_microbatch <= period


@EXAMPLES
@given(
    some_chain, st.integers(1, 3), st.integers(5, 24), st.integers(1, 9), duplexes, kinds, models
)
def test_more_memory_is_never_worse(
    chain: Chain,
    gpus: int,
    memory: int,
    extra: int,
    duplex: str,
    semantics: Semantics,
    model: MemoryModel,
) -> None:
    """Neither the proven period nor any bound grows with memory; nothing becomes infeasible."""
    less = solve(chain, machines([memory] * gpus, duplex), model, semantics)
    more = solve(chain, machines([memory + extra] * gpus, duplex), model, semantics)
    assert_no_better(less, more)


@EXAMPLES
@given(some_chain, st.integers(1, 2), st.integers(5, 24), duplexes, kinds, models)
def test_another_gpu_is_never_worse(
    chain: Chain, gpus: int, memory: int, duplex: str, semantics: Semantics, model: MemoryModel
) -> None:
    """Neither the proven period nor any bound grows with the number of GPUs."""
    fewer = solve(chain, machines([memory] * gpus, duplex), model, semantics)
    more = solve(chain, machines([memory] * (gpus + 1), duplex), model, semantics)
    assert_no_better(fewer, more)


@EXAMPLES
@given(some_chain, st.integers(6, 24), duplexes, models, st.permutations(["a", "b", "c"]))
def test_names_mean_nothing(
    chain: Chain, memory: int, duplex: str, model: MemoryModel, names: list[str]
) -> None:
    """Renamed GPUs get the same plan, apart from the names."""
    cluster = machines([memory] * 3, duplex)
    gpus = tuple(Gpu(name=name, memory_bytes=memory) for name in names)
    plans = [
        solve(chain, each, model) for each in (cluster, cluster.model_copy(update={"gpus": gpus}))
    ]
    if plans[0] is None or plans[1] is None:
        assert plans[0] is plans[1] is None
        return
    assert plans[0].stages == plans[1].stages
    assert plans[0].ops == plans[1].ops
    assert plans[0].solver.bounds == plans[1].solver.bounds


@EXAMPLES
@given(
    some_chain,
    st.lists(st.integers(5, 20), min_size=2, max_size=2),
    st.lists(st.sampled_from([0.5, 1.0, 2.0]), min_size=2, max_size=2),
    models,
)
def test_the_order_of_gpus_means_nothing(
    chain: Chain, memories: list[int], speeds: list[float], model: MemoryModel
) -> None:
    """Two different GPUs named the other way round: the same feasibility, the same optimum."""
    one = solve(chain, machines(memories, "full", speeds), model)
    other = solve(chain, machines(memories[::-1], "full", speeds[::-1]), model)
    assert (one is None) == (other is None)
    if one is None or other is None:
        return
    assert value(one.solver.bounds.k1) <= other.period_ns
    assert value(other.solver.bounds.k1) <= one.period_ns
    if "optimal" == one.solver.status == other.solver.status:
        assert one.period_ns == other.period_ns


def instance(seed: int) -> tuple[Chain, Cluster]:
    """Six or seven layers for two or three of the paper's GPUs, memory where it binds."""
    rng = random.Random(seed)
    count = rng.choice((6, 7))
    saved = [rng.randint(1, 4) for _ in range(count)]
    fields = [
        {
            "saved_bytes": saved[i],
            "output_bytes": rng.randint(0, 2),
            "weight_bytes": rng.randint(0, 1),
        }
        for i in range(count)
    ]
    chain = handmade.chain([(rng.randint(1, 4), rng.randint(1, 6)) for _ in range(count)], fields)
    gpus = rng.choice((2, 3))
    memory = sum(saved) // gpus * 2 + rng.randint(4, 12)
    cluster = Cluster(
        gpus=tuple(Gpu(name=f"g{i}", memory_bytes=memory) for i in range(gpus)),
        links=Links(duplex="half", bandwidth_bytes_per_s=10**9),
    )
    return chain, cluster


@grids.first(2, seed=[3, 4, 1, 2])
def test_six_and_seven_layers_against_the_literal_ilp(seed: int) -> None:
    """The paper's ILP and our search agree: no bound of one exceeds a plan of the other."""
    chain, cluster = instance(seed)
    methods: tuple[planner.Method, ...] = ("paper-ilp", "auto")
    ilp, ours = (answer(chain, cluster, method) for method in methods)
    if isinstance(ilp, TimeLimitError) or isinstance(ours, TimeLimitError):
        return
    assert (ilp is None) == (ours is None)
    if ilp is None or ours is None:
        return
    assert value(ilp.solver.bounds.k1) <= ours.period_ns
    assert value(ours.solver.bounds.k1) <= ilp.period_ns


def answer(chain: Chain, cluster: Cluster, method: planner.Method) -> Plan | TimeLimitError | None:
    """After at most three seconds of work."""
    config = planner.Config(
        method=method, memory_model="paper", k=1, time_limit_s=3, workers=1, deterministic=True
    )
    try:
        return planner.solve(chain, cluster, config)
    except InfeasibleError:
        return None
    except TimeLimitError as error:
        return error
