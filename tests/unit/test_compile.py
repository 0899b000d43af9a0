"""Compiled layers train as the model does within a tolerance, and are compiled once."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch._inductor import config as inductor

from pipeplan import Pipeline, lowering
from pipeplan.capture import agreement, profile_task, split
from pipeplan.capture.estimation.task_estimate import estimate_task
from pipeplan.capture.layer_costs.allocator_record import recorded
from pipeplan.capture.measurement.fused_stages import measure_stages
from pipeplan.chain import Chain
from pipeplan.compiling import Compiled, compiled
from pipeplan.devices import find_device
from pipeplan.errors import InputError
from pipeplan.launch.checks import prepare
from pipeplan.launch.options import parse
from pipeplan.livebytes import storage_bytes
from pipeplan.plan import Semantics
from pipeplan.runtime.build import build
from pipeplan.runtime.data.feed import TaskFeed, Uses
from pipeplan.runtime.instrument import states
from pipeplan.runtime.parameters.tied_parameters import untie
from pipeplan.runtime.transport.base import Transport
from pipeplan.split_model import SplitModel
from pipeplan.task import Task
from pipeplan.testing import reference
from pipeplan.testing.in_process import run_ranks
from pipeplan.testing.plans import random_plan
from tests import capture_tasks, grids, launch_task, models, odd_models, pipelines
from tests.captured import lasting
from tests.unit.capture.test_odd_models import Build, task_of
from tests.unit.launch.test_files import ALONE
from tests.unit.runtime.test_memory import planned
from tests.unit.runtime.test_offload_runs import drawn as offloading
from tests.unit.runtime.test_offload_runs import offloads
from tests.unit.runtime.test_updates import MAPS, STEPS, M

LIGHT = "aot_eager"
"""A backend that traces and partitions as inductor does, and needs no compiler."""
MODES: list[Semantics] = ["flush", "2bw"]
SHAPES = {"one rank": MAPS["one rank"], "there and back": MAPS["there and back"]}
SCRATCH = 64
"""Bytes that the allocator sees inside single operations of a loss or an update."""
CLOSE = 1e-4
"""Of values of size 1, after some steps of SGD."""


def close(got: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """The same names, and equal within the tolerance."""
    assert got.keys() == expected.keys()
    for name, value in got.items():
        torch.testing.assert_close(value, expected[name], rtol=CLOSE, atol=CLOSE, msg=name)


def toy() -> tuple[SplitModel, Task]:
    """The eight layers of the runtime's tests: dropout, in place, batch norm, a skip."""
    model, task = pipelines.toy()
    return replace(model, compile=LIGHT), replace(task, compile=LIGHT)


@pytest.fixture(autouse=True)
def compiled_once(caplog: pytest.LogCaptureFixture) -> None:
    """Collects warnings, for `no_more`."""
    torch.compiler.reset()
    caplog.set_level(logging.WARNING)


def no_more(caplog: pytest.LogCaptureFixture) -> None:
    """Nothing was compiled in a schedule, and torch gave nothing up."""
    assert "compiled again" not in caplog.text
    assert "at its first micro-batch" not in caplog.text
    assert "recompile_limit" not in caplog.text


@grids.each_value(shape=SHAPES, semantics=MODES)
def test_runs_equal_a_plain_loop(
    shape: tuple[Sequence[int], Sequence[int]],
    semantics: Semantics,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """On one rank and several, with one weight version and two; compiled before step 0 alone."""
    model, task = toy()
    cuts, gpus = shape
    plan = pipelines.plan_of(cuts, gpus, semantics, M)
    expected = reference.train(semantics, *pipelines.toy(), STEPS, M, seed=3)
    outcome = pipelines.train(plan, pipelines.pattern_of(plan, 3), model, task, STEPS)
    assert outcome.losses == pytest.approx(expected.losses, rel=CLOSE)
    close(outcome.weights, expected.weights)
    no_more(caplog)


@grids.first(1, seed=range(2))
def test_layers_computed_again(seed: int, caplog: pytest.LogCaptureFixture) -> None:
    """Both forwards are compiled ahead: the one without autograd, too."""
    while True:
        plan = pipelines.without_first_in_place(random_plan(seed, layers=8))
        if any(stage.remat and stage.remat.recompute for stage in plan.stages):
            break
        seed += 2
    model, task = toy()
    expected = reference.train(plan.semantics, *pipelines.toy(), 3, plan.microbatches, seed=3)
    outcome = pipelines.train(plan, lowering.lower(plan), model, task, 3)
    assert outcome.losses == pytest.approx(expected.losses, rel=CLOSE)
    close(outcome.weights, expected.weights)
    no_more(caplog)


@grids.first(1, semantics=MODES[::-1])
def test_what_they_saved_goes_to_the_host_and_back(
    semantics: Semantics, caplog: pytest.LogCaptureFixture
) -> None:
    """Tensors that compiled code keeps leave and return as others do."""
    plan = offloading(3, 2, 1, semantics)
    assert offloads(plan)
    model, task = toy()
    expected = reference.train(semantics, *pipelines.toy(), 3, plan.microbatches, seed=3)
    outcome = pipelines.train(plan, lowering.lower(plan), model, task, 3)
    assert outcome.losses == pytest.approx(expected.losses, rel=CLOSE)
    close(outcome.weights, expected.weights)
    no_more(caplog)


FAMILIES = ["T5", "ResNet", "GPT-2, tied"]
"""Ties, layers that are fed, batch norm. Not ViT: of what lies transposed in memory torch's
dropout has a backward with other strides than aot_eager assumes (torch 2.13)."""

REPEATED = {"T5": (2, 5), "ResNet": (2, 3, 4), "GPT-2, tied": (2, 3, 4)}
"""Layers that stay eager, since others like them are compiled."""


@grids.first(2, family=FAMILIES)
def test_families(family: str, caplog: pytest.LogCaptureFixture) -> None:
    """Kinds of models, among them ties and layers that are fed, on two ranks under 2bw."""
    model, task = models.make(family)
    task = replace(task, optimizer=pipelines.OPTIMIZERS["sgd"])
    expected = reference.train("2bw", model, task, 3, 4, seed=3)
    again, _ = models.make(family)
    plan = pipelines.plan_of([3, 5], [0, 1, 0], "2bw", 4, layers=len(model.layers))
    ready = untie(replace(again, compile=LIGHT, eager=REPEATED[family]), task.tied)
    outcome = pipelines.train(plan, pipelines.pattern_of(plan, 3), ready, task, 3)
    assert outcome.losses == pytest.approx(expected.losses, rel=CLOSE)
    close(outcome.weights, expected.weights)
    no_more(caplog)


def tiny() -> Task:
    """Three layers, one of them with dropout and batch norm; the others make no kernels."""
    torch.manual_seed(5)
    middle = nn.Sequential(nn.Dropout(0.2), nn.BatchNorm1d(16))
    return Task(
        model=nn.Sequential(nn.Linear(6, 16, bias=False), middle, nn.Linear(16, 3, bias=False)),
        loss=nn.functional.cross_entropy,
        optimizer=pipelines.OPTIMIZERS["sgd"],
        data=pipelines.data,
        compile=True,
    )


def trained(task: Task, chain: Chain, ranks: int, semantics: Semantics) -> list[float]:
    """Losses of three steps and of an evaluation."""
    plan = launch_task.plan_of(launch_task.leveled(chain), ranks, semantics)

    def work(transport: Transport) -> list[float]:
        with Pipeline(task, plan, seed=3, transport=transport) as pipeline:
            losses = pipeline.run(3)
            score = pipeline.evaluate(numbers=range(2))
            return losses if score is None else [*losses, score]

    return next(losses for losses in run_ranks(ranks, work) if losses)


def test_inductor_on_one_rank_and_on_two(caplog: pytest.LogCaptureFixture) -> None:
    """Machine code draws the same random numbers, and trains within the tolerance."""
    task = tiny()
    with inductor.patch({"cpp.vec_isa_ok": True}):  # torch compiles six probes to find out
        chain = profile_task(task, repeats=1, warmup=0)
    found = chain.agreement
    assert found is not None
    assert found.tolerance is not None
    assert found.largest_relative_difference <= found.tolerance == 2.0**-11.5
    assert chain.device["compile"] == "inductor"
    for ranks, semantics in zip((1, 2), MODES, strict=True):
        plain = replace(tiny(), compile=False)
        model = split(plain)
        many = launch_task.MICROBATCHES
        expected = reference.train(semantics, model, plain, 3, many, 3, evaluate=2)
        rows = [sum(expected.losses[i : i + many]) / many for i in range(0, 3 * many, many)]
        rows.append(sum(expected.evaluated) / 2)
        assert trained(tiny(), chain, ranks, semantics) == pytest.approx(rows, rel=CLOSE)
    found_peak, most = peak(chain, tiny(), "flush")
    assert abs(found_peak - most) <= SCRATCH
    no_more(caplog)


def mlp() -> Task:
    """Linear, ReLU, dropout, linear, GELU."""
    return capture_tasks.mlp(times=1)


@functools.cache
def profiled(make: Callable[[], Task]) -> tuple[Chain, list[str]]:
    """Its chain by the backend that needs no compiler, and what was said."""
    told: list[str] = []
    task = replace(make(), compile=LIGHT)
    return profile_task(task, repeats=1, warmup=0, progress=told.append), told


def test_a_profile_tells_the_tolerance_and_counts_compiled_bytes() -> None:
    """ReLU and dropout keep a mask of one byte where the processor's eager code keeps floats."""
    eager = profile_task(mlp(), repeats=1, warmup=0)
    chain, told = profiled(mlp)
    assert chain.agreement is not None
    assert not chain.agreement.is_exact
    assert "not bit for bit" in (chain.doubt or "")
    assert "torch's allocator recorded" in (chain.doubt or "")
    assert "compiling layer 5 of 5: 4:GELU" in told
    assert any("compiled one by one" in line for line in told)
    index = chain.layers.index(next(x for x in chain.layers if "Dropout" in x.name))
    assert (eager.layers[index].saved_bytes, chain.layers[index].saved_bytes) == (
        4 * 32 * 128,
        32 * 128,
    )
    same = ("weight_bytes", "gradient_bytes", "optimizer_bytes", "output_bytes", "parameters")
    for one, other in zip(chain.layers, eager.layers, strict=True):
        assert all(getattr(one, name) == getattr(other, name) for name in same)
    assert chain.task_digest != eager.task_digest
    assert Chain.model_validate_json(chain.to_json()) == chain


def peak(chain: Chain, task: Task, semantics: Semantics) -> tuple[int, int]:
    """The most that the allocator of one rank recorded over three steps, and the plan's peak."""
    plan = planned(lasting(chain), 1, semantics, 1, 0)
    model, pattern = split(task), lowering.lower(plan)

    def work(transport: Transport) -> int:
        feed = TaskFeed(task, model, Uses.of(plan, model, transport.rank))
        worker = build(plan, pattern, model, task, feed, transport, pipelines.Listener(), seed=0)
        before = storage_bytes(states(worker))
        with recorded(torch.device("cpu")) as taken:
            worker.executor.run(0, 3)
            return before + taken.peak

    (found,) = run_ranks(1, work)
    return found, plan.memory[0].peak_bytes


@grids.each_value(make={"mlp": mlp, "transformer": capture_tasks.transformer}, semantics=MODES)
def test_the_allocator_holds_what_is_planned(
    make: Callable[[], Task], semantics: Semantics
) -> None:
    """Stages of compiled layers, several micro-batches in flight: but for some numbers alone."""
    chain, _ = profiled(make)
    found, most = peak(chain, replace(make(), compile=LIGHT), semantics)
    assert abs(found - most) <= SCRATCH


def test_stages_are_measured_compiled() -> None:
    """As a run has them: layer by layer."""
    task = tiny_light()
    chain = launch_task.leveled(profile_task(task, repeats=1, warmup=0))
    found = measure_stages(task, launch_task.plan_of(chain, 2, "flush"), repeats=1, warmup=0)
    assert found.device["compile"] == LIGHT
    assert found.task_digest == chain.task_digest
    predicted = sum(stage.predicted_backward_peak_bytes for stage in found.stages)
    assert sum(stage.backward_peak_bytes for stage in found.stages) <= predicted


def tiny_light() -> Task:
    """The small task by the backend that needs no compiler."""
    return replace(tiny(), compile=LIGHT)


def test_more_layers_of_one_class_than_torch_compiles() -> None:
    """Each has code of its own: torch gives code up that it has compiled eight times."""
    layers = [nn.Linear(6 + i, 7 + i) for i in range(10)]
    model, task = pipelines.split_by_hand(layers, "sgd", loss=lambda made, _: made.square().mean())
    model = replace(model, compile=LIGHT)
    plan = pipelines.plan_of([6], [0, 0], "flush", 2, layers=10)
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    pipelines.train(plan, pipelines.pattern_of(plan, 3), model, task, 2)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] - before == 10


STAY = {
    name: odd_models.EXACT[name]
    for name in ("gradient reversal", "compiled module", "forward hook", "counter in a list")
}


@pytest.mark.parametrize("build", STAY.values(), ids=STAY)
def test_modules_that_a_graph_cannot_hold_stay_eager(build: Build) -> None:
    """In an exported model and in a row; the other layers are compiled."""
    task = replace(task_of(build), compile=LIGHT)
    model = split(task)
    assert 0 < len(model.eager) < len(model.layers)
    found = agreement(compiled(model), task)
    assert found.largest_relative_difference <= found.tolerance


def test_a_changed_shape_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """What is compiled after a run began is a warning, with the layer named."""
    layer = Compiled(nn.Linear(3, 3), "0:Linear", LIGHT)
    layer(torch.ones(2, 3)).sum().backward()
    layer.is_settled = True
    layer(torch.ones(2, 3)).sum().backward()
    no_more(caplog)
    layer(torch.ones(5, 3))
    assert "layer 0:Linear is compiled again" in caplog.text
    assert layer.graphs == 2


@pytest.mark.parametrize("wrong", ["nothing", 1, None])
def test_other_backends_are_refused(wrong: object) -> None:
    """The message lists what there is."""
    with pytest.raises(InputError, match=r"task: compile: got .*, need True, False or a backend"):
        split(replace(tiny(), compile=wrong))


def test_a_machine_without_a_compiler_is_told() -> None:
    """Before anything is compiled: what lacks, and what else could be done."""
    text = r"for cpu: got no C\+\+ compiler .*need g\+\+ or clang\+\+.*aot_eager"
    with inductor.patch({"cpp.cxx": ("no-such-compiler",)}):
        with pytest.raises(InputError, match=text):
            split(tiny())
        split(tiny_light())


def test_counting_the_bytes_of_a_run_is_refused(tmp_path: Path) -> None:
    """Before ranks meet, with the way to the allocator's own figure; a run without is none."""
    path = tmp_path / "plan.json"
    digest = split(launch_task.compiled(0)).digest()
    chain = launch_task.chain().model_copy(update={"task_digest": digest})
    path.write_text(launch_task.plan_of(chain, 1, "flush").to_json())
    words = ["--plan", str(path), "--task", "tests.launch_task:compiled"]
    assert prepare(parse(words), ALONE).split.compile == LIGHT
    with pytest.raises(InputError, match=r"--instrument: got a task that is compiled"):
        prepare(parse([*words, "--instrument", "--out", str(tmp_path / "run")]), ALONE)


def test_an_estimate_is_refused() -> None:
    """Nothing is known of code that has not been made."""
    with pytest.raises(InputError, match=r"mode fake: got Task\(compile=True\)"):
        estimate_task(tiny(), find_device("h100"))


def test_plans_with_and_without_are_told_apart() -> None:
    """A plan of eager layers is none for compiled ones, and backends differ."""
    digests = {split(replace(tiny(), compile=how)).digest() for how in (False, True, LIGHT)}
    assert len(digests) == 3
    with pytest.raises(InputError, match="not the one the plan was made for"):
        Pipeline(replace(launch_task.task(0), compile=LIGHT), launch_task.plan(1, "flush"))
