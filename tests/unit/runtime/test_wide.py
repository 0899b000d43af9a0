"""Sums of gradients and master weights in 32 bits: the plain loop's bits, the planned bytes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeplan import Pipeline
from pipeplan.capture import profile_task, split
from pipeplan.capture.estimation.task_estimate import estimate_task
from pipeplan.chain import Chain
from pipeplan.devices import find_device
from pipeplan.errors import InputError
from pipeplan.plan import Plan, Semantics
from pipeplan.runtime.build import Worker, build
from pipeplan.runtime.checkpoint import named_state, storage
from pipeplan.runtime.checkpoint.writer import CheckpointWriter
from pipeplan.runtime.data.feed import TaskFeed, Uses
from pipeplan.runtime.parameters.tied_parameters import untie
from pipeplan.runtime.transport.base import Transport
from pipeplan.runtime.transport.gloo import LocalTransport
from pipeplan.split_model import SplitModel
from pipeplan.task import LossScale, Task, Tied
from pipeplan.testing import reference
from pipeplan.testing.in_process import run_ranks
from tests import capture_tasks, grids, launch_task, pipelines
from tests.captured import chain_of, lasting
from tests.unit.runtime.test_hooks import recomputing
from tests.unit.runtime.test_memory import measured_of, planned
from tests.unit.runtime.test_updates import (
    FAR_TIES,
    MAPS,
    STEPS,
    TIES,
    M,
    Narrow,
    Widen,
    check,
    same,
)

MODES: tuple[Semantics, ...] = ("flush", "2bw")
KINDS: dict[str, dict[str, Any]] = {
    "sums": {"accumulate": torch.float32},
    "masters": {"master_weights": True},
    "both": {"accumulate": torch.float32, "master_weights": True},
}


def narrow(
    kind: str, dtype: torch.dtype = torch.bfloat16, optimizer: str = "adamw", **fields: Any
) -> tuple[SplitModel, Task]:
    """Eight layers in 16 bits, one of which keeps weights in 32; dropout."""
    torch.manual_seed(5)
    half = [nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Dropout(0.1), nn.Linear(6, 3)]
    inner = [layer.to(dtype) for layer in half]
    layers = [nn.LayerNorm(6), Narrow(dtype), *inner, Widen()]
    one, task = pipelines.split_by_hand(layers, optimizer)
    return one, replace(task, **KINDS.get(kind, {}), **fields)


@grids.each_pair(kind=list(KINDS), shape=MAPS, semantics=MODES)
def test_equals_a_plain_loop(
    kind: str, shape: tuple[Sequence[int], Sequence[int]], semantics: Semantics
) -> None:
    """A loop that adds in 32 bits, steps copies in 32 bits, and casts them: same bits."""
    expected = check(shape, semantics, *narrow(kind))
    free = reference.train(semantics, *narrow("none"), STEPS, M, seed=3)
    assert any(not torch.equal(free.weights[n], v) for n, v in expected.weights.items())
    assert {value.dtype for value in expected.weights.values()} == {torch.float32, torch.bfloat16}


@grids.each_pair(
    dtype={"bfloat16": torch.bfloat16, "float16": torch.float16},
    kind=["none", *KINDS],
    semantics=MODES,
)
def test_with_clipping_and_loss_scale(dtype: torch.dtype, kind: str, semantics: Semantics) -> None:
    """Norms are those of the sums; skipped steps leave master weights as they are.

    Weights in 16 and in 32 bits have norms in both, which torch adds in an order of its own.
    """
    initial = 2.0**24 if dtype is torch.float16 else 256.0
    rule = LossScale(initial=initial, interval=2)
    one, task = narrow(kind, dtype, "sgd", clip_norm=0.2, loss_scale=rule)
    expected = check(MAPS["looped"], semantics, one, task, steps=12)
    assert (0 < len(expected.skipped) < 12) == (dtype is torch.float16)
    assert max(expected.norms) > 0.2


@grids.each_value(kind=list(KINDS), semantics=MODES)
def test_layers_computed_again(kind: str, semantics: Semantics) -> None:
    """Their gradients are added once."""
    one, task = narrow(kind)
    expected = reference.train(semantics, one, task, STEPS, M, seed=3)
    plan = recomputing(semantics)
    same(pipelines.train(plan, pipelines.pattern_of(plan, 3), one, task, STEPS), expected)


def tied(kind: str, how: Tied, *, clip: bool) -> tuple[SplitModel, Task]:
    """Five layers in 16 bits: the outer two share a weight, the inner two a bias."""
    torch.manual_seed(1)
    inner = [nn.Linear(6, 6), nn.Linear(6, 6), nn.Dropout(0.1), nn.Linear(6, 6), nn.Linear(6, 6)]
    inner[4].weight = inner[0].weight
    inner[3].bias = inner[1].bias
    layers = [layer.bfloat16() for layer in inner]

    def data(number: int) -> tuple[Tensor, Tensor]:
        rows, classes = pipelines.data(number)
        return rows.bfloat16(), classes

    one, task = pipelines.split_by_hand(layers, "adamw", data=data)
    return one, replace(task, tied=how, clip_norm=0.2 if clip else None, **KINDS[kind])


TIED: dict[str, tuple[Tied, tuple[Sequence[int], Sequence[int]]]] = {
    "one stage": ("colocate", TIES["one stage"]),
    "two stages of one rank": ("colocate", TIES["two stages of one rank"]),
    "one rank": ("synchronize", TIES["one rank"]),
    "crossed": ("synchronize", FAR_TIES["crossed"]),
}


@grids.each_pair(case=TIED, kind=list(KINDS), semantics=MODES, clip=[False, True])
def test_tied_weights(
    case: tuple[Tied, tuple[Sequence[int], Sequence[int]]],
    kind: str,
    semantics: Semantics,
    clip: bool,
) -> None:
    """Sums of several layers are added, and sent, in 32 bits; copies have masters of their own."""
    how, shape = case
    check(shape, semantics, *tied(kind, how, clip=clip))


def scaling(parameter: nn.Parameter) -> None:
    """Hooks of both kinds."""

    def decay(used: nn.Parameter) -> None:
        assert used.grad is not None
        used.grad.add_(used.detach(), alpha=0.1).clamp_(-0.5, 0.5)

    parameter.register_hook(lambda gradient: gradient * 10)
    parameter.register_post_accumulate_grad_hook(decay)


@grids.each_value(kind=list(KINDS), semantics=MODES)
def test_hooks_see_the_gradient_of_one_micro_batch(kind: str, semantics: Semantics) -> None:
    """With wide sums .grad holds that of one micro-batch, in the weight's type, then is added."""
    one, task = narrow(kind)
    for layer in one.layers:
        for parameter in layer.parameters():
            scaling(parameter)
    check(MAPS["looped"], semantics, one, task)


TASKS: dict[str, Callable[[], Task]] = {
    "mlp": capture_tasks.mlp,
    "gpt2": partial(capture_tasks.gpt2, blocks=2),
}


def half(name: str, kind: str) -> Task:
    """A task of the capture tests whose model is in bfloat16."""
    torch.manual_seed(0)
    task = TASKS[name]()
    task.model.bfloat16()

    def data(number: int) -> tuple[Tensor, Tensor]:
        pair = (task.data(number)[0], task.data(number)[1])
        source, target = (x.bfloat16() if x.is_floating_point() else x for x in pair)
        return source, target

    return replace(task, data=data, **KINDS[kind])


@functools.cache
def profiled(name: str, kind: str) -> Chain:
    """Its chain, with times that make every op last."""
    return lasting(chain_of(half, name, kind))


PEAKS = [(1, 1, 0), (2, 1, 1), (3, 2, 2)]
"""GPUs, k, seed of the plan."""


@grids.each_pair(kind=list(KINDS), shape=PEAKS, semantics=MODES)
def test_peak_is_as_planned(kind: str, shape: tuple[int, int, int], semantics: Semantics) -> None:
    """Sums, masters and casts for a step are in the plan: measured peaks equal it to the byte."""
    check_peak("mlp", kind, shape, semantics)


@grids.each_value(kind=list(KINDS), shape=PEAKS, semantics=MODES)
def test_peak_of_a_graph_is_as_planned(
    kind: str, shape: tuple[int, int, int], semantics: Semantics
) -> None:
    """Of layers that are exported graphs, to the byte."""
    check_peak("gpt2", kind, shape, semantics)


def check_peak(name: str, kind: str, shape: tuple[int, int, int], semantics: Semantics) -> None:
    """Of every rank, to the byte."""
    gpus, k, seed = shape
    plan = planned(profiled(name, kind), gpus, semantics, k, seed)
    assert measured_of(plan, half, name, kind) == [row.peak_bytes for row in plan.memory]


@grids.each_value(name=["gpt2", "mlp"], kind=["both", "masters", "sums"])
def test_both_profiles_count_the_same(name: str, kind: str) -> None:
    """Fake and measured chains agree; sums and masters have four bytes per number."""

    def sizes(chain: Chain) -> list[dict[str, object]]:
        rows = [layer.model_dump() for layer in chain.layers]
        return [{k: v for k, v in row.items() if not k.endswith("_ns")} for row in rows]

    chain = profiled(name, kind)
    assert sizes(estimate_task(half(name, kind), find_device("h100"))) == sizes(chain)
    weights = sum(layer.weight_bytes for layer in chain.layers)
    gradients = sum(layer.gradient_bytes for layer in chain.layers)
    wide, masters = kind != "masters", kind != "sums"
    assert gradients == (2 if wide else 1) * weights
    states = 3 * 2 if masters else 2
    counters = 4 * sum(len(layer.parameters) for layer in chain.layers)
    buffers = sum(layer.buffer_bytes for layer in chain.layers)
    kept = sum(layer.optimizer_bytes for layer in chain.layers)
    assert kept == states * weights + counters + buffers


def worker(kind: str, plan: Plan, transport: Transport) -> Worker:
    """One rank with fresh weights."""
    one, task = narrow(kind)
    one = untie(one, task.tied)
    feed = TaskFeed(task, one, Uses.of(plan, one, transport.rank))
    pattern = pipelines.pattern_of(plan, 3)
    return build(plan, pattern, one, task, feed, transport, pipelines.Listener(), seed=3)


def saved(kind: str, semantics: Semantics, folder: Path) -> Worker:
    """Two steps on one rank, and a checkpoint."""
    trained = worker(kind, pipelines.plan_of([4], [0, 0], semantics, M), LocalTransport())
    trained.executor.run(0, 2)
    meta = storage.CheckpointMeta(
        step=2, seed=3, semantics=semantics, microbatches=M, task_digest="", plan_digest=""
    )
    CheckpointWriter(LocalTransport(), background=False).save(
        folder, meta, trained.stages.values()
    )
    return trained


@grids.each_value(kind=list(KINDS), semantics=MODES)
def test_resume_is_exact(tmp_path: Path, kind: str, semantics: Semantics) -> None:
    """Master weights are in the checkpoint: two steps more under another plan, as without."""
    trained = saved(kind, semantics, tmp_path / "c")
    trained.executor.run(2, 2)
    far = pipelines.plan_of([2, 4, 6], [0, 1, 0, 1], semantics, M)

    def work(transport: Transport) -> dict[str, Tensor]:
        resumed = worker(kind, far, transport)
        named_state.load(tmp_path / "c", 2, resumed)
        resumed.executor.run(2, 2)
        return {
            **pipelines.weights_of(resumed),
            **{
                f"master of {stage.names[weight]}": master.detach().clone()
                for stage in resumed.stages.values()
                for weight, master in stage.weights.masters().items()
            },
        }

    got = {name: value for part in run_ranks(2, work) for name, value in part.items()}
    expected = pipelines.weights_of(trained)
    for name, value in expected.items():
        assert torch.equal(got.pop(name), value), name
    masters = named_state.state_of(trained.stages.values())
    assert len(got) == (0 if kind == "sums" else 6)
    for name, value in got.items():
        assert torch.equal(masters[f"master.{name.removeprefix('master of ')}"], value)


def test_states_with_and_without_masters_do_not_mix(tmp_path: Path) -> None:
    """A state without them would begin them anew out of rounded weights; else they are lost."""
    saved("sums", "flush", tmp_path / "plain")
    saved("both", "flush", tmp_path / "masters")
    plan = pipelines.plan_of([4], [0, 0], "flush", M)
    with pytest.raises(InputError, match=r"has no 'master\."):
        named_state.load(tmp_path / "plain", 2, worker("both", plan, LocalTransport()))
    with pytest.raises(InputError, match=r"has 'master\..*Task\(master_weights=True\)"):
        named_state.load(tmp_path / "masters", 2, worker("sums", plan, LocalTransport()))


@pytest.mark.parametrize("semantics", MODES)
def test_state_dicts_of_pipelines(semantics: Semantics) -> None:
    """A state dict carries masters to another pipeline of the same task."""
    chain = launch_task.leveled(profile_task(narrow("both")[1], repeats=1, warmup=0))
    plan = launch_task.plan_of(chain, 2, semantics)

    def work(transport: Transport) -> tuple[dict[str, Any], dict[str, Any]]:
        with Pipeline(narrow("both")[1], plan, transport=transport) as pipeline:
            pipeline.run(2)
            kept = {key: _copied(value) for key, value in pipeline.state_dict().items()}
            pipeline.run(2)
            first = {key: _copied(value) for key, value in pipeline.state_dict().items()}
            pipeline.load_state_dict(kept)
            pipeline.run(2)
            return first, pipeline.state_dict()

    for first, second in run_ranks(2, work):
        assert first.keys() == second.keys()
        assert {first[k].dtype for k in first if k.startswith("master.")} == {torch.float32}
        for key, value in first.items():
            assert torch.equal(second[key], value) if isinstance(value, Tensor) else True, key


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def test_plans_with_and_without_are_told_apart() -> None:
    """Bytes differ, so the task digest does."""
    tasks = [half("mlp", kind) for kind in KINDS]
    tasks.append(replace(tasks[0], accumulate=None))
    assert len({split(task).digest() for task in tasks}) == 4


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"accumulate": torch.bfloat16}, r"accumulate: got torch\.bfloat16, need torch\.float32"),
        ({"accumulate": "float32"}, r"accumulate: got 'float32'"),
        ({"master_weights": 1}, "master_weights: got 1, need True or False"),
    ],
)
def test_what_makes_no_sense_is_refused(fields: dict[str, object], message: str) -> None:
    """The message says what there is."""
    with pytest.raises(InputError, match=message):
        split(replace(launch_task.task(0), **fields))
