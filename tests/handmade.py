"""Small plans written by hand: absolute times in, a plan file's fields out.

Durations follow from a formula of their own here, or are stated by the test: they do not come from
the code under test. Only the memory table and the step, where a test does
not state them, are filled in by `verifier.audit`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from fractions import Fraction
from functools import cache
from math import ceil
from typing import Any

from pipeplan.chain import Chain, Layer
from pipeplan.cluster import Cluster, uniform
from pipeplan.plan import Op, OpKind, Plan, Remat, Stage
from pipeplan.verifier import audit


def chain(
    times: Sequence[tuple[int, int]], layers: Sequence[Mapping[str, Any]] = (), **fields: Any
) -> Chain:
    """A chain of len(times) layers: (forward, backward) ns each, other fields from `layers`."""
    more = list(layers) or [{}] * len(times)
    return Chain(
        name="handmade",
        layers=tuple(
            Layer(
                **{"name": f"layer{i}", "output_bytes": 0, "forward_ns": f, "backward_ns": b}
                | dict(extra)
            )
            for i, ((f, b), extra) in enumerate(zip(times, more, strict=True))
        ),
        **fields,
    )


def plan(
    of: Chain,
    stages: Sequence[tuple[int, int, int]],
    period: int,
    times: Mapping[str, int],
    *,
    cluster: Cluster | None = None,
    k: int = 1,
    durations: Mapping[str, int] | None = None,
    split: Collection[int] = (),
    **fields: Any,
) -> Plan:
    """A plan from stages (first layer, last layer, GPU) and the ops' absolute times.

    Args:
        of: the chain.
        stages: first and last layer and GPU of each stage.
        period: ns.
        times: (T4) start with j = 0 of each op by label, such as `2SEND_F0`. Transfers that are
            left out start where their producer ends.
        cluster: default: as many equal GPUs as the stages need, 2**40 bytes, no transfer time.
        k: copies.
        durations: by label without the copy (`2F`), where they are not to be `length`.
        split: stages that have I and W.
        fields: other fields of the plan.
    """
    where = cluster or uniform(max(gpu for _, _, gpu in stages) + 1, 2**40)
    given = dict(durations or {})
    ops: list[Op] = []
    for kind, stage in order(stages, split):
        key = f"{stage}{kind}"
        duration = given.get(key, length(of, where, stages, kind, stage, split))
        for copy in range(k):
            start = times.get(f"{key}{copy}")
            if start is None:
                start = ops[-k].shift * period + ops[-k].start_ns + ops[-k].duration_ns
            ops.append(_op(stages, kind, stage, copy, start, duration, period))
    labels = {op.label for op in ops}
    assert labels >= times.keys(), f"no such ops: {sorted(times.keys() - labels)}"
    built = Plan(
        chain=of,
        chain_digest=of.digest(),
        task_digest=of.task_digest,
        cluster=where,
        k=k,
        period_ns=period,
        stages=tuple(
            Stage(id=i, layers=(a, b), gpu=g, split_backward=i in split)
            for i, (a, b, g) in enumerate(stages)
        ),
        ops=tuple(ops),
        **{"step_ns": 0, "memory": ()} | fields,
    )
    return built if "memory" in fields else filled(built)


def packed(of: Chain, stages: Sequence[tuple[int, int, int]], period: int, **fields: Any) -> Plan:
    """A plan whose GPUs do their ops back to back from 0, in chain order, k = 1.

    Each op of a micro-batch waits for its turn (paper 002, Lemma 1): it takes the first of its
    places that is not too early. Transfers take no time.
    """
    where = fields.get("cluster") or uniform(max(gpu for _, _, gpu in stages) + 1, 2**40)
    busy, ready, times = dict.fromkeys(range(len(where.gpus)), 0), 0, {}
    for kind, stage in order(stages):
        if kind.is_compute:
            gpu, lasts = stages[stage][2], length(of, where, stages, kind, stage)
            times[f"{stage}{kind}0"] = ready + (busy[gpu] - ready) % period
            busy[gpu] += lasts
            ready = times[f"{stage}{kind}0"] + lasts
    return plan(of, stages, period, times, **fields | {"cluster": where})


def with_(built: Plan, **fields: Any) -> Plan:
    """The same plan with top-level fields replaced, still a plan that parses."""
    return Plan.from_json(built.model_copy(update=fields).to_json())


def with_duplex(built: Plan, duplex: str) -> Plan:
    """The same plan on half- or full-duplex links, otherwise the same."""
    links = built.cluster.links.model_copy(update={"duplex": duplex})
    return with_(built, cluster=built.cluster.model_copy(update={"links": links}))


def filled(built: Plan) -> Plan:
    """The same plan with the memory table and step that its schedule has."""
    told = audit(built)
    return built.model_copy(update={"memory": told.memory, "step_ns": told.step_ns})


def changed(built: Plan, label: str, **fields: Any) -> Plan:
    """The same plan with fields of the op `label` (`2F0`) replaced."""
    assert any(op.label == label for op in built.ops), label
    ops = tuple(op.model_copy(update=fields) if op.label == label else op for op in built.ops)
    return built.model_copy(update={"ops": ops})


def moved(built: Plan, label: str, time: int) -> Plan:
    """The same plan with the op `label` at another absolute time."""
    shift, start = divmod(time, built.period_ns)
    return changed(built, label, shift=shift, start_ns=start)


_TIMES = {
    "0F0": 0,  # GPU 0,   0..10
    "0SEND_F0": 10,
    "1F0": 15,  # GPU 1,  15..35
    "1SEND_F0": 35,
    "2F0": 41,  # GPU 0,  41..51
    "2B0": 70,  # GPU 0,  10..20 of the next period
    "2SEND_B0": 80,
    "1B0": 95,  # GPU 1,  35..55
    "1SEND_B0": 115,
    "0B0": 140,  # GPU 0, 20..30 two periods later
}
_SENDS = {"0SEND_F": 5, "1SEND_F": 6, "2SEND_B": 6, "1SEND_B": 5}  # 2 + bytes at one byte per ns


def base(**fields: Any) -> Plan:
    """Three stages on two GPUs: 0 and 2 share GPU 0; every transfer takes time."""
    sizes = (
        {"weight_bytes": 100, "gradient_bytes": 100, "output_bytes": 3, "saved_bytes": 7},
        {"weight_bytes": 200, "gradient_bytes": 200, "output_bytes": 4, "saved_bytes": 9},
        {"weight_bytes": 50, "gradient_bytes": 50, "output_bytes": 1, "saved_bytes": 5},
    )
    of = chain([(10, 10), (20, 20), (10, 10)], sizes)
    cluster = uniform(2, 10_000, bandwidth_bytes_per_s=10**9, latency_ns=2)
    stages = [(0, 0, 0), (1, 1, 1), (2, 2, 0)]
    options = {"cluster": cluster, "durations": _SENDS, "microbatches": 4} | fields
    return plan(of, stages, 60, _TIMES, **options)


def recomputed_whole() -> Plan:
    """A flush step at speed 2: two layers of F 1 and B 1 that are computed again, F 0..2, B 2..6.

    They count as one layer, so their updates of 1 ns each take 1 ns together.
    """
    of = chain([(2, 2)] * 2, [{"optimizer_ns": 1}] * 2)
    where = uniform(1, 2**40)
    fast = tuple(gpu.model_copy(update={"speed": 2.0}) for gpu in where.gpus)
    where = where.model_copy(update={"gpus": fast})
    options = {"cluster": where, "semantics": "flush", "microbatches": 1, "durations": {"0B": 4}}
    plain = plan(of, [(0, 1, 0)], 6, {"0F0": 0, "0B0": 2}, **options)
    again = plain.stages[0].model_copy(update={"remat": Remat(recompute=((0, 1),))})
    return filled(plain.model_copy(update={"stages": (again,)}))


def order(
    stages: Sequence[tuple[int, int, int]], split: Collection[int] = ()
) -> list[tuple[OpKind, int]]:
    """(kind, stage) in chain order, transfers only where GPUs differ; every W at the end."""
    last, found = len(stages) - 1, []
    for s in range(last + 1):
        found.append((OpKind.F, s))
        if s < last and stages[s][2] != stages[s + 1][2]:
            found.append((OpKind.SEND_F, s))
    for s in range(last, -1, -1):
        found.append((OpKind.I if s in split else OpKind.B, s))
        if s > 0 and stages[s][2] != stages[s - 1][2]:
            found.append((OpKind.SEND_B, s))
    return found + [(OpKind.W, s) for s in split]


def length(
    of: Chain,
    cluster: Cluster,
    stages: Sequence[tuple[int, int, int]],
    kind: OpKind,
    stage: int,
    split: Collection[int] = (),
) -> int:
    """(T2), (T3), (S2) of one op, in fractions."""
    first, last, gpu = stages[stage]
    if kind.is_compute:
        speed, layers = cluster.gpus[gpu].speed, of.layers[first : last + 1]
        times = (_alone(x, kind, split=stage in split) for x in layers)
        return sum(_at(speed, time) for time in times) + cluster.action_overhead_ns
    if kind is OpKind.SEND_F:
        size, other = of.layers[last].output_bytes, stage + 1
    else:
        size, other = of.layers[first - 1].gradient_of_output_bytes, stage - 1
    latency, bandwidth = cluster.links.between(gpu, stages[other][2])
    return latency + (ceil(Fraction(size * 10**9, bandwidth)) if bandwidth else 0)


@cache
def _at(speed: float, time: int) -> int:
    return ceil(time / Fraction(str(speed)))


def _alone(layer: Layer, kind: OpKind, *, split: bool) -> int:
    weights = layer.backward_weight_ns or 0
    if kind is OpKind.F and split and layer.forward_split_ns is not None:
        return layer.forward_split_ns
    if kind is OpKind.I and layer.backward_input_ns is not None:
        return layer.backward_input_ns
    both = {OpKind.I: layer.backward_ns - weights, OpKind.W: weights}
    return {OpKind.F: layer.forward_ns, OpKind.B: layer.backward_ns, **both}[kind]


def _op(
    stages: Sequence[tuple[int, int, int]],
    kind: OpKind,
    stage: int,
    copy: int,
    start: int,
    duration: int,
    period: int,
) -> Op:
    other = {OpKind.SEND_F: stage + 1, OpKind.SEND_B: stage - 1}.get(kind)
    gpu = stages[stage][2]
    shift, begin = divmod(start, period)
    return Op(
        kind=kind,
        stage=stage,
        copy=copy,
        gpu=gpu if other is None else None,
        link=None if other is None else (gpu, stages[other][2]),
        start_ns=begin,
        duration_ns=duration,
        shift=shift,
    )
