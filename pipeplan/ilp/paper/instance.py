"""The numbers of the paper's ILP, from chain and cluster; whether they are the paper's setting.

Indices are the paper's, from 1: layers l = 1..L, tasks q = 1..2L with T_l = F_l and
T_{2L+1-l} = B_l, messages q = 1..2L-1 from T_q to T_{q+1}.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Generic, TypeVar, cast

from pipeplan.chain import Chain
from pipeplan.cluster import Cluster
from pipeplan.errors import InputError
from pipeplan.ilp.costs import CostModel

MAX_LAYERS = 64
"""Rows (1) grow with L^3 / 2: far beyond this the model alone takes minutes to write down."""
MAX_SUM = 2**50
"""Largest sum of times or bytes: the solvers' numbers are exact up to 2^53."""

Number_co = TypeVar("Number_co", bound=float, covariant=True)


@dataclass(frozen=True)
class PaperInstance(Generic[Number_co]):
    """One chain on equal GPUs as the paper sees it; index 0 of a task or layer table is unused.

    Attributes:
        layers: L.
        gpus: P.
        memory: M, bytes of each GPU, or the most any schedule can use where that is less.
        duration: d_q of the tasks 1..2L, in ns.
        transfer: d~_q of the messages 1..2L-1 if their ends are on two GPUs, in ns; 0 at L.
        size: a_q for q = 0..2L, in bytes, a_{2L-q} = a_q.
        stored: st_l, bytes of one stored micro-batch of layer l (the paper's a_{l-1}).
        states: 3 W_l, in bytes.
        working: bytes beside the stored ones while T_q runs (the paper's a_{q-1} + a_q).
        tied: groups of layers that must share a GPU.
        in_flight_limit: most micro-batches a layer may hold at once (R6), or None.
    """

    layers: int
    gpus: int
    memory: Number_co
    duration: tuple[Number_co, ...]
    transfer: tuple[Number_co, ...]
    size: tuple[Number_co, ...]
    stored: tuple[Number_co, ...]
    states: tuple[Number_co, ...]
    working: tuple[Number_co, ...]
    tied: tuple[tuple[int, ...], ...]
    in_flight_limit: int | None

    @property
    def tasks(self) -> range:
        """Q = 1..2L."""
        return range(1, 2 * self.layers + 1)

    @property
    def messages(self) -> tuple[int, ...]:
        """Q = 1..2L-1 without L: F_L and B_L are always on one GPU (4)."""
        return tuple(q for q in range(1, 2 * self.layers) if q != self.layers)

    def layer(self, task: int) -> int:
        """The layer of T_task."""
        return task if task <= self.layers else 2 * self.layers + 1 - task

    def backward(self, layer: int) -> int:
        """The task B_layer."""
        return 2 * self.layers + 1 - layer

    @property
    def horizon(self) -> Number_co:
        """A period that always suffices: one micro-batch at a time, every boundary cut."""
        return cast("Number_co", sum(self.duration) + sum(self.transfer))

    def load(self, layer: int) -> Number_co:
        """Forward plus backward of a layer, in ns."""
        return cast("Number_co", self.duration[layer] + self.duration[self.backward(layer)])

    def scaled(self, time_unit: float, byte_unit: float) -> PaperInstance[float]:
        """The same instance with times and bytes counted in these units."""

        def per(unit: float, values: Sequence[float]) -> tuple[float, ...]:
            return tuple(value / unit for value in values)

        return PaperInstance(
            layers=self.layers,
            gpus=self.gpus,
            memory=self.memory / byte_unit,
            duration=per(time_unit, self.duration),
            transfer=per(time_unit, self.transfer),
            size=per(byte_unit, self.size),
            stored=per(byte_unit, self.stored),
            states=per(byte_unit, self.states),
            working=per(byte_unit, self.working),
            tied=self.tied,
            in_flight_limit=self.in_flight_limit,
        )


def from_costs(costs: CostModel, in_flight_limit: int | None) -> PaperInstance[int]:
    """The paper's numbers for the chain and the cluster of `costs`.

    Raises:
        InputError: if the chain or the cluster is outside the paper's setting.
    """
    chain, cluster = costs.chain, costs.cluster
    if costs.memory_model != "paper":
        raise InputError(
            f"method paper-ilp, memory model: got {costs.memory_model!r}, need 'paper': equation"
            " (36) is that count. Add --memory-model paper or use --method auto."
        )
    _check_cluster(cluster)
    _check_chain(chain)
    count = len(chain.layers)
    segments = [costs.segment(index, index) for index in range(count)]
    forward_sizes = [chain.input_bytes, *(layer.output_bytes for layer in chain.layers)]
    send_forward = send_backward = [0] * (count - 1)
    if len(cluster.gpus) > 1:
        send_forward = [costs.send_forward_ns(index, 0, 1) for index in range(count - 1)]
        send_backward = [costs.send_backward_ns(index, 0, 1) for index in range(count - 1)]
    working = [
        0,
        *(segment.forward for segment in segments),
        *(segment.backward for segment in reversed(segments)),
    ]
    budget = cluster.gpus[0].budget_bytes
    most = (
        sum(x.states + min(8 * count * x.saved, budget + x.saved) for x in segments)
        + max(working)
        + 6 * sum(forward_sizes)  # waiting inside and two slots, each way
    )
    instance = PaperInstance(
        layers=count,
        gpus=len(cluster.gpus),
        memory=min(budget, most),
        duration=(
            0,
            *(costs.forward_ns(index, index, 0) for index in range(count)),
            *(costs.backward_ns(index, index, 0) for index in reversed(range(count))),
        ),
        transfer=(0, *send_forward, 0, *reversed(send_backward)),
        size=(*forward_sizes, *reversed(forward_sizes[:-1])),
        stored=(0, *(segment.saved for segment in segments)),
        states=(0, *(segment.states for segment in segments)),
        working=tuple(working),
        tied=tuple(tuple(layer + 1 for layer in group) for group in costs.tied_groups),
        in_flight_limit=in_flight_limit,
    )
    if max(instance.horizon, most) > MAX_SUM:
        raise InputError(
            f"method paper-ilp, chain {chain.name!r}: got {instance.horizon} ns and {most} bytes"
            f" in all, need at most {MAX_SUM} of each: larger numbers are not exact in its"
            " solvers. Use --method auto."
        )
    return instance


def _check_cluster(cluster: Cluster) -> None:
    first = cluster.gpus[0]
    for index, gpu in enumerate(cluster.gpus):
        if (gpu.budget_bytes, gpu.speed) != (first.budget_bytes, first.speed):
            raise InputError(
                f"method paper-ilp, cluster.gpus[{index}]: got {gpu.budget_bytes} bytes at speed"
                f" {gpu.speed}, need {first.budget_bytes} bytes at speed {first.speed} as"
                " gpus[0] has: the paper's GPUs are equal. Use --method auto."
            )
    if cluster.action_overhead_ns:
        raise InputError(
            f"method paper-ilp, cluster.action_overhead_ns: got {cluster.action_overhead_ns},"
            " need 0: the paper places single layers, whose number of stages is not"
            " decided. Use --method auto."
        )
    links = cluster.links
    if len(cluster.gpus) > 1 and links.duplex != "half":
        raise InputError(
            f"method paper-ilp, cluster.links.duplex: got {links.duplex!r}, need 'half': the"
            " paper has one link per pair of GPUs. Add --duplex half or use --method auto."
        )
    pairs = combinations(range(len(cluster.gpus)), 2) if links.pairs else ()
    kinds = {links.between(source, target) for source, target in pairs}
    if len(kinds) > 1:
        raise InputError(
            f"method paper-ilp, cluster.links.pairs: got links of {len(kinds)} kinds, need one"
            " latency and bandwidth for all: the paper's network is uniform. Use --method auto."
        )


def _check_chain(chain: Chain) -> None:
    if len(chain.layers) > MAX_LAYERS:
        raise InputError(
            f"method paper-ilp, chain {chain.name!r}: got {len(chain.layers)} layers, need at"
            f" most {MAX_LAYERS}: its rows grow with the cube. Use --method auto."
        )
    for index, layer in enumerate(chain.layers):
        for field in ("forward_ns", "backward_ns"):
            if not getattr(layer, field):
                raise InputError(
                    f"method paper-ilp, layers[{index}].{field}: got 0, need at least 1: the"
                    " paper orders tasks by their times, and tasks of no length have no order."
                    " Use --method auto."
                )
