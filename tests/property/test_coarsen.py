"""Coarser chains: never cheaper than the layers they stand for, equal where they can be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from itertools import pairwise
from math import ceil
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeplan import planner, verifier
from pipeplan.chain import Chain, Layer
from pipeplan.cluster import Cluster, Gpu, Host, uniform
from pipeplan.errors import InfeasibleError, InputError, TimeLimitError
from pipeplan.ilp.coarsening import CoarseChain, coarsen
from pipeplan.ilp.costs import CostModel
from pipeplan.plan import Plan, Semantics
from tests import handmade

EXAMPLES = settings(max_examples=50, derandomize=True, deadline=None)
FEW = settings(max_examples=5, derandomize=True, deadline=None)
size = st.integers(0, 9)
DRAWN = (
    "output_bytes", "output_gradient_bytes", "saved_output_bytes", "saved_input_bytes",
    "saved_bytes", "weight_bytes", "gradient_bytes", "waiting_gradient_bytes", "optimizer_bytes",
    "optimizer_ns", "forward_workspace_bytes", "backward_workspace_bytes",
    "optimizer_workspace_bytes", "parameters", "forward_light_ns", "saved_passing_bytes",
    "forward_light_workspace_bytes",
    "buffer_bytes", "frozen_bytes",
)  # fmt: skip
"""The fields that `chains` varies."""


@st.composite
def chains(
    draw: st.DrawFn, least: int, most: int, *, plain: bool = False, shortest: int = 0
) -> Chain:
    """Layers of a few ns and bytes; `plain` ones save their whole input and equal gradients."""
    count = draw(st.integers(least, most))
    fields: list[Mapping[str, Any]] = []
    for layer in range(count):
        output = 5 if plain else draw(size)
        before = fields[-1]["output_bytes"] if layer else 0
        saved_output = draw(st.integers(0, output))
        kept, saved = before if plain else draw(st.integers(0, before)), draw(size)
        most = min(output - saved_output, kept + saved)
        fields.append(
            values := {
                "output_bytes": output,
                "output_gradient_bytes": None if plain else draw(st.none() | size),
                "saved_output_bytes": saved_output,
                "saved_passing_bytes": draw(st.integers(0, most)),
                "saved_input_bytes": kept,
                "saved_bytes": saved,
                "weight_bytes": draw(size),
                "gradient_bytes": draw(size),
                "waiting_gradient_bytes": draw(size),
                "optimizer_bytes": draw(size),
                "optimizer_ns": draw(size),
                "forward_workspace_bytes": draw(size),
                "backward_workspace_bytes": draw(size),
                "optimizer_workspace_bytes": draw(size),
                "parameters": draw(st.sampled_from([(), (), (), ("a",), ("b",)])),
                "forward_light_ns": draw(st.none() | size),
                "forward_light_workspace_bytes": draw(st.none() | size),
                "buffer_bytes": draw(size),
                "frozen_bytes": draw(size),
            }
        )
        assert set(values) == set(DRAWN)
    times = st.integers(shortest, 9)
    return handmade.chain([(draw(times), draw(times)) for _ in range(count)], fields)


def test_no_field_is_forgotten() -> None:
    """A field that layers get one day must be merged too: then add it there and here."""
    single = {  # backwards of groups are never split, programs are those of single layers,
        # exporters see no groups, and a solver counts what rides for each layer
        "options",
        "modules",
        "riding",
        "backward_weight_ns",
        "backward_input_ns",
        "forward_split_ns",
        "saved_for_weight_bytes",
        "saved_input_for_weight_bytes",
        "input_backward_workspace_bytes",
        "weight_backward_workspace_bytes",
    }
    drawn = {"name", "forward_ns", "backward_ns", *DRAWN}
    assert set(Layer.model_fields) - single == drawn


def both(chain: Chain, coarse: CoarseChain, cluster: Cluster) -> tuple[CostModel, CostModel]:
    """Costs of the chain and of the coarser one."""
    return (
        CostModel(chain, cluster, "2bw", "exact"),
        CostModel(coarse.chain, cluster, "2bw", "exact"),
    )


@EXAMPLES
@given(chains(1, 12), st.integers(1, 12), st.sets(st.integers(0, 10)))
def test_groups_cover_the_chain(chain: Chain, count: int, apart: set[int]) -> None:
    """Groups are neighbours, all of it, as few as asked for, and `apart` is kept."""
    coarse = coarsen(chain, count, apart=apart)
    groups = coarse.groups
    assert (groups[0][0], groups[-1][1]) == (0, len(chain.layers) - 1)
    assert all(one[1] + 1 == two[0] for one, two in pairwise(groups))
    kept = {layer for layer in apart if layer < len(chain.layers) - 1}
    assert kept <= {last for _, last in groups}
    assert len(groups) == max(min(count, len(chain.layers)), 1 + len(kept))


def lights(layers: Sequence[Layer], speed: Fraction) -> int:
    """Forwards without autograd of all layers on a GPU of this speed."""
    return sum(ceil(layer.light_ns / speed) for layer in layers)


@EXAMPLES
@given(chains(2, 9), st.integers(1, 8), st.sampled_from([(1.0,), (0.3, 1.0), (0.7, 1.9)]))
def test_never_cheaper(chain: Chain, count: int, speeds: tuple[float, ...]) -> None:
    """Stages of groups: bytes and times at least those of their layers, most of them equal."""
    coarse = coarsen(chain, count, speeds=speeds)
    gpus = tuple(Gpu(name=str(speed), memory_bytes=1, speed=speed) for speed in speeds)
    fine, rough = both(chain, coarse, Cluster(gpus=gpus))
    for a in range(len(coarse.groups)):
        for b in range(a, len(coarse.groups)):
            first, last = coarse.layers(a, b)
            for covered in (False, True):
                true, got = fine.segment(first, last, covered), rough.segment(a, b, covered)
                assert (got.saved, got.states) == (true.saved, true.states)
                assert got.optimizer == true.optimizer
                assert got.forward >= true.forward
                assert got.backward >= true.backward
            for backward in (False, True):
                sent = fine.unsaved_bytes(last, backward=backward)
                assert rough.unsaved_bytes(b, backward=backward) == sent
            one, many = coarse.chain.layers[a : b + 1], chain.layers[first : last + 1]
            assert sum(g.buffer_bytes for g in one) == sum(layer.buffer_bytes for layer in many)
            for gpu, speed in enumerate(speeds):
                forward, backward = (
                    fine.forward_ns(first, last, gpu),
                    fine.backward_ns(first, last, gpu),
                )
                assert rough.forward_ns(a, b, gpu) >= forward
                assert rough.backward_ns(a, b, gpu) >= backward
                exact = Fraction(repr(speed))
                assert lights(one, exact) >= lights(many, exact)
                if speeds == (1.0,):
                    assert rough.load_ns(a, b, gpu) == forward + backward, speed


@EXAMPLES
@given(chains(2, 9, plain=True), st.integers(1, 8))
def test_equal_where_inputs_are_saved(chain: Chain, count: int) -> None:
    """With whole inputs saved and gradients of one size not a byte is added."""
    coarse = coarsen(chain, count)
    fine, rough = both(chain, coarse, uniform(1, 1))
    for a in range(1, len(coarse.groups)):
        for b in range(a, len(coarse.groups)):
            assert rough.segment(a, b) == fine.segment(*coarse.layers(a, b))


@FEW
@given(
    chains(12, 16, shortest=1),
    st.integers(6, 9),
    st.sampled_from(["2bw", "flush"]),
    st.integers(60, 400),
)
def test_plans_are_for_the_chain_itself(
    chain: Chain, count: int, semantics: Semantics, memory: int
) -> None:
    """A plan found on groups is verified for the layers and no worse than contiguous groups."""
    cluster = uniform(3, memory, bandwidth_bytes_per_s=2 * 10**9)
    try:
        plan = solve(chain, cluster, semantics, coarsen=count)
    except (InfeasibleError, TimeLimitError):
        return
    assert plan.chain == chain
    assert verifier.verify(plan) == ()
    assert any("groups of" in note for note in plan.solver.notes)
    try:
        rival = solve(coarsen(chain, count).chain, cluster, semantics, method="contiguous", k=1)
    except (InfeasibleError, TimeLimitError):
        return
    if semantics == "2bw":
        assert plan.period_per_microbatch <= rival.period_per_microbatch
    else:
        assert plan.step_ns <= rival.step_ns


def solve(chain: Chain, cluster: Cluster, semantics: Semantics, **options: Any) -> Plan:
    """After at most half a second of work."""
    limits = {"time_limit_s": 0.5, "workers": 1, "deterministic": True}
    return planner.solve(chain, cluster, planner.Config(semantics=semantics, **limits, **options))


def test_only_long_chains_are_coarsened_unasked() -> None:
    """Up to 256 layers are searched as they are, more as 192 groups; `off` never merges."""
    ample = uniform(2, 10**6)
    for layers, options, merged in (
        (256, {}, False),
        (257, {}, True),
        (257, {"coarsen": "off"}, False),
        (20, {"coarsen": 5}, True),
        (20, {"coarsen": 20}, False),
    ):
        chain = handmade.chain([(2, 3)] * layers)
        plan = solve(chain, ample, "2bw", k=1, method="contiguous", **options)
        assert any("groups of" in note for note in plan.solver.notes) == merged
        assert plan.period_ns >= 5 * layers / 2


def test_the_papers_bytes_do_not_add_up() -> None:
    """Coarsening is refused under the paper's memory model."""
    with pytest.raises(InputError, match=r"coarsen: got 3 with config.memory_model paper"):
        solve(handmade.chain([(1, 1)] * 5), uniform(2, 9), "2bw", coarsen=3, memory_model="paper")


@pytest.mark.parametrize("flag", ["recompute", "offload"])
def test_groups_are_not_searched_with_recomputation_or_offloading(flag: str) -> None:
    """A number of groups is refused, a long chain gets a note; `off` and short chains do not."""
    host = Host(memory_bytes=10**6, bandwidth_bytes_per_s=10**9)
    cluster = uniform(2, 10**6, host=host)

    def notes(layers: int, coarsen: int | str) -> list[str]:
        options = {flag: "auto", "coarsen": coarsen, "k": 1, "method": "contiguous"}
        plan = solve(handmade.chain([(2, 3)] * layers), cluster, "2bw", **options)
        return [note for note in plan.solver.notes if "layer by layer" in note]

    with pytest.raises(
        InputError, match=rf"config.coarsen: got 5 with config.{flag} auto, need auto"
    ):
        notes(20, 5)
    assert len(notes(257, "auto")) == 1
    assert notes(257, "off") == notes(20, "auto") == notes(20, 20) == []


def test_ctrl_c_keeps_the_plan() -> None:
    """Ctrl-C in the inner search gives its best plan, for the layers, verified."""

    def interrupt(*row: Any) -> None:
        if row[1] is not None and row[4] not in ("interrupted", "done"):
            raise KeyboardInterrupt

    chain = handmade.chain([(1 + n % 3, 2) for n in range(30)], [{"saved_bytes": 3}] * 30)
    config = planner.Config(coarsen=10, workers=1, time_limit_s=30)
    plan = planner.solve(chain, uniform(3, 70), config, interrupt)
    assert len(plan.chain.layers) == 30
    assert verifier.verify(plan) == ()
