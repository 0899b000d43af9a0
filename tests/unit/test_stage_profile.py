"""Stages measured fused, and a chain corrected by them."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeplan.capture import fuse_stages, measure_stages, profile_task, split
from pipeplan.chain import Chain, Layer
from pipeplan.cluster import uniform
from pipeplan.errors import InputError
from pipeplan.plan import Plan, Stage
from pipeplan.stage_profile import StageMeasure, StageProfile, proportional_shares, refine
from tests.capture_tasks import conv, gpt2, mlp, rows, skips


def chain_of(*times: int, **fields: object) -> Chain:
    """A chain of layers that take these times forward, twice as long backward."""
    layers = tuple(
        Layer(name=str(i), forward_ns=t, backward_ns=2 * t, output_bytes=1)
        for i, t in enumerate(times)
    )
    return Chain(name="x", source="made", layers=layers, **fields)  # type: ignore[arg-type]


def stage(first: int, last: int, forward: int, backward: int, **fields: int) -> StageMeasure:
    """A measured stage that holds what was predicted, unless said otherwise."""
    usual = {
        "optimizer_ns": 0,
        "kept_bytes": 0,
        "forward_peak_bytes": 10,
        "backward_peak_bytes": 10,
        "predicted_forward_peak_bytes": 10,
        "predicted_backward_peak_bytes": 10,
    }
    return StageMeasure(
        layers=(first, last), forward_ns=forward, backward_ns=backward, **{**usual, **fields}
    )


def planned(chain: Chain, *edges: int) -> Plan:
    """A plan with one stage per pair of neighbouring edges; only its stages matter here."""
    stages = tuple(
        Stage(id=i, layers=(a, b - 1), gpu=0) for i, (a, b) in enumerate(pairwise(edges))
    )
    return Plan(
        chain=chain,
        chain_digest=chain.digest(),
        task_digest=chain.task_digest,
        cluster=uniform(1, 2**40),
        period_ns=1,
        step_ns=1,
        stages=stages,
        ops=(),
        memory=(),
    )


@settings(max_examples=200, derandomize=True, deadline=None)
@given(st.lists(st.integers(0, 10**9), min_size=1, max_size=20), st.integers(0, 10**12))
def test_shares_add_up_and_are_fair(parts: list[int], total: int) -> None:
    """Exactly the total, each part within one of its exact share."""
    found = proportional_shares(parts, total)
    assert sum(found) == total
    whole = sum(parts)
    for part, value in zip(parts, found, strict=True):
        exact = total * part / whole if whole else total / len(parts)
        assert value >= 0
        assert abs(value - exact) <= 1 + exact * 1e-9


def test_refined_stages_take_what_was_measured() -> None:
    """Sums over each stage are the fused times, layers keep their shares, others their times."""
    chain = chain_of(10, 30, 5, 7)
    profile = StageProfile(source="again", stages=(stage(0, 1, 80, 41, optimizer_ns=6),))
    refined = refine(chain, profile)
    assert [layer.forward_ns for layer in refined.layers] == [20, 60, 5, 7]
    assert sum(layer.backward_ns for layer in refined.layers[:2]) == 41
    assert sum(layer.optimizer_ns for layer in refined.layers) == 6
    assert refined.layers[2:] == chain.layers[2:]
    assert refined.source == "made; as 1 stages again"
    assert refined.device["refined_by"] == profile.digest()
    assert Chain.from_json(refined.to_json()) == refined


def test_refining_again_changes_nothing() -> None:
    """The chain knows what it was refined by."""
    profile = StageProfile(stages=(stage(0, 2, 7, 9, forward_peak_bytes=15),))
    once = refine(chain_of(1, 2, 3), profile)
    assert refine(once, profile) == once


def test_only_bytes_that_were_missed_are_added() -> None:
    """A peak above the prediction raises the workspaces by the difference, one below nothing."""
    profile = StageProfile(
        stages=(stage(0, 0, 1, 2, forward_peak_bytes=14), stage(1, 1, 1, 2, backward_peak_bytes=3))
    )
    chain = chain_of(1, 1)
    known = chain.layers[0].model_copy(update={"forward_light_workspace_bytes": -1})
    chain = chain.model_copy(update={"layers": (known, chain.layers[1])})
    first, second = refine(chain, profile).layers
    assert (first.forward_workspace_bytes, first.backward_workspace_bytes) == (4, 0)
    assert (first.forward_light_workspace_bytes, second.forward_light_workspace_bytes) == (3, None)
    assert (second.forward_workspace_bytes, second.backward_workspace_bytes) == (0, 0)


def test_part_of_the_backward_is_scaled_with_it() -> None:
    """The weight gradients' part stays a part; so does the forward without autograd."""
    layer = Layer(
        name="a",
        forward_ns=4,
        forward_light_ns=3,
        forward_split_ns=5,
        backward_ns=10,
        backward_weight_ns=3,
        backward_input_ns=7,
        output_bytes=1,
    )
    chain = Chain(name="x", layers=(layer,))
    profile = StageProfile(stages=(stage(0, 0, 8, 5),))
    refined = refine(chain, profile)
    (one,) = refined.layers
    assert (one.forward_light_ns, one.forward_split_ns) == (6, 10)
    assert (one.backward_weight_ns, one.backward_input_ns) == (1, 4), "no less than 5 together"
    assert Chain.from_data(refined.model_dump(mode="json")) == refined


def test_stages_of_something_else_are_refused() -> None:
    """Another task or a longer chain is not corrected by these stages."""
    profile = StageProfile(task_digest="a", stages=(stage(0, 1, 1, 1),))
    with pytest.raises(InputError, match="another task: got digest a, need b"):
        refine(chain_of(1, 1, task_digest="b"), profile)
    with pytest.raises(InputError, match="a stage up to layer 1, need one of the chain's 1"):
        refine(chain_of(1), profile)


def test_overlapping_stages_are_refused() -> None:
    """A layer has one correction; stages come in order."""
    with pytest.raises(ValueError, match=r"stages\[1\]\.layers: got \[1, 2\]"):
        StageProfile(stages=(stage(0, 1, 1, 1), stage(1, 2, 1, 1)))
    with pytest.raises(ValueError, match="need first <= last"):
        stage(2, 1, 1, 1)


@pytest.mark.parametrize("make", [mlp, conv, gpt2, skips])
def test_fused_stages_hold_what_the_chain_predicts(make: object) -> None:
    """Peaks of measured stages are those of (M3), to the byte."""
    torch.manual_seed(0)
    task = make()  # type: ignore[operator]
    chain = profile_task(task, repeats=1, warmup=0)
    last = len(chain.layers)
    found = measure_stages(task, planned(chain, 0, 2, last - 1, last), repeats=2, warmup=0)
    assert [one.layers for one in found.stages] == [(0, 1), (2, last - 2), (last - 1, last - 1)]
    assert found.task_digest == chain.task_digest
    for one in found.stages:
        assert one.forward_ns > 0
        assert one.backward_ns > 0
        assert one.forward_peak_bytes == one.predicted_forward_peak_bytes
        assert one.backward_peak_bytes == one.predicted_backward_peak_bytes
    assert StageProfile.from_json(found.to_json()) == found


def test_a_tied_stage_is_seen_to_hold_more() -> None:
    """Both ends of a tied weight in one stage hold a second gradient; refine adds it."""
    task = gpt2(tied=True, blocks=1)
    chain = profile_task(task, repeats=1, warmup=0)
    plan = planned(chain, 0, len(chain.layers))
    found = measure_stages(task, plan, repeats=1, warmup=0)
    (whole,) = found.stages
    missed = whole.backward_peak_bytes - whole.predicted_backward_peak_bytes
    refined = refine(chain, found)
    assert missed > 0
    added = refined.layers[1].backward_workspace_bytes - chain.layers[1].backward_workspace_bytes
    assert added == missed


def test_fused_model_has_the_parameters_of_its_layers() -> None:
    """Fusing renames nothing: the same objects under the user's names."""
    model = split(gpt2(), evaluates=False)
    fused = fuse_stages(
        model, [Stage(id=0, layers=(0, 2), gpu=0), Stage(id=1, layers=(3, 4), gpu=0)]
    )
    assert fused.names == ("0-2", "3-4")
    assert fused.boundaries == (model.boundaries[0], model.boundaries[3])
    for layer, fqns in zip(fused.layers, fused.fqns, strict=True):
        for local, parameter in layer.named_parameters():
            where = next(i for i, names in enumerate(model.fqns) if fqns[local] in names.values())
            assert any(parameter is other for other in model.layers[where].parameters())


def test_stages_of_another_task_are_not_measured() -> None:
    """A plan for another model is refused before anything is timed."""
    plan = planned(profile_task(mlp(), repeats=1, warmup=0), 0, 10)
    with pytest.raises(InputError, match="the plan is not for this task"):
        measure_stages(conv(), plan)
    other = replace(mlp(), data=lambda number: (rows(number, 16, 64), rows(~number, 16, 64)))
    with pytest.raises(InputError, match="task digest"):
        measure_stages(other, plan)
    with pytest.raises(InputError, match="not its 10 layers in order"):
        measure_stages(mlp(), planned(plan.chain, 0, 9))


def test_profile_of_stages_survives_its_file(tmp_path: Path) -> None:
    """What is written is what is read."""
    profile = StageProfile(source="s", task="a:b", stages=(stage(0, 1, 1, 1),))
    file = tmp_path / "stages.json"
    file.write_text(profile.to_json())
    assert StageProfile.read(file) == profile
