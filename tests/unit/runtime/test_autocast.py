"""Under autocast a pipeline trains as a plain loop does, on the bytes that were planned."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from random import Random

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
from pipeplan.runtime.transport.base import Transport
from pipeplan.task import LossScale, Task
from pipeplan.testing import plans, reference
from pipeplan.testing.in_process import run_ranks
from tests import capture_tasks, grids, launch_task, pipelines
from tests.captured import chain_of, lasting
from tests.unit.runtime.test_hooks import recomputing
from tests.unit.runtime.test_memory import measured_of, planned
from tests.unit.runtime.test_updates import MAPS, STEPS, M, check, same

MODES = ["flush", "2bw"]
N = launch_task.MICROBATCHES
"""Per step of plans of the launch tests' task."""
SHAPES = {"one rank": MAPS["one rank"], "looped": MAPS["looped"]}


class Twice(nn.Module):
    """Uses one weight twice: a loop adds both gradients in 16 bits, behind one cast."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, value: Tensor) -> Tensor:
        return self.linear(torch.tanh(self.linear(value)))


def layers() -> list[nn.Module]:
    """Eight layers: products in 16 bits, norms in 32, one weight used twice, dropout."""
    return [
        nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.1)),
        nn.LayerNorm(6),
        Twice(),
        nn.GELU(),
        nn.Sequential(nn.Linear(6, 6), nn.Softmax(-1)),
        nn.BatchNorm1d(6),
        Twice(),
        nn.Linear(6, 3),
    ]


def task(dtype: torch.dtype = torch.bfloat16, optimizer: str = "sgd") -> Task:
    """The layers under autocast, with initial weights that are always the same."""
    torch.manual_seed(7)
    return Task(
        model=layers(),
        loss=nn.functional.cross_entropy,
        optimizer=pipelines.OPTIMIZERS[optimizer],
        data=pipelines.data,
        autocast=dtype,
        loss_scale=LossScale(initial=256.0, interval=2) if dtype is torch.float16 else None,
        clip_norm=0.5 if dtype is torch.float16 else None,
    )


@grids.each_pair(
    dtype={"bfloat16": torch.bfloat16, "float16": torch.float16}, shape=SHAPES, semantics=MODES
)
def test_equals_a_loop_under_autocast(
    dtype: torch.dtype, shape: tuple[Sequence[int], Sequence[int]], semantics: Semantics
) -> None:
    """Losses and weights of a loop with `with autocast: loss = ..` and `loss.backward()`."""
    one = task(dtype)
    model = split(one)
    assert {str(dtype), "torch.float32"} <= {s.dtype for row in model.boundaries for s in row}
    expected = check(shape, semantics, model, one)
    plain = replace(one, autocast=None)
    free = reference.train(semantics, split(plain), plain, STEPS, M, seed=3)
    assert any(not torch.equal(free.weights[n], v) for n, v in expected.weights.items())


@pytest.mark.parametrize("semantics", MODES)
def test_layers_computed_again_are_cast_again(semantics: Semantics) -> None:
    """Recomputed layers run under the same autocast, and their second forward has gradients."""
    one = task()
    model = split(one)
    expected = reference.train(semantics, model, one, STEPS, M, seed=3)
    plan = recomputing(semantics)
    same(pipelines.train(plan, pipelines.pattern_of(plan, 3), model, one, STEPS), expected)


def of_launch() -> Task:
    """The task of the launch tests, under autocast."""
    return replace(launch_task.task(0), autocast=torch.bfloat16)


@functools.cache
def launched(ranks: int, semantics: Semantics) -> Plan:
    """A plan of it."""
    chain = launch_task.leveled(profile_task(of_launch(), repeats=1, warmup=0))
    return launch_task.plan_of(chain, ranks, semantics)


@grids.each_value(ranks=[1, 2], semantics=MODES)
def test_evaluation_is_cast_too(ranks: int, semantics: Semantics) -> None:
    """Losses in eval mode are those of a plain evaluation under autocast."""
    one = of_launch()
    trained = reference.train(semantics, split(one), one, 2, N, 3, evaluate=3)

    def work(transport: Transport) -> float | None:
        with Pipeline(one, launched(ranks, semantics), seed=3, transport=transport) as pipeline:
            pipeline.run(2)
            return pipeline.evaluate(numbers=range(3))

    told = [each for each in run_ranks(ranks, work) if each is not None]
    assert told == [sum(trained.evaluated) / 3]


def test_plans_with_and_without_are_told_apart() -> None:
    """A plan that was profiled without autocast is none for a task with it, and the other way."""
    plain = launch_task.task(0)
    digests = {
        split(replace(plain, autocast=dtype)).digest()
        for dtype in (None, torch.bfloat16, torch.float16)
    }
    assert len(digests) == 3
    with pytest.raises(InputError, match="not the one the plan was made for"):
        Pipeline(of_launch(), launch_task.plan(1, "flush"))
    with pytest.raises(InputError, match="not the one the plan was made for"):
        Pipeline(plain, launched(1, "flush"))


@pytest.mark.parametrize("wrong", [torch.float32, "bfloat16", True])
def test_other_types_are_refused(wrong: object) -> None:
    """The message says what there is."""
    with pytest.raises(
        InputError, match=r"autocast: got .*, need torch\.bfloat16, torch\.float16"
    ):
        split(replace(launch_task.task(0), autocast=wrong))


@pytest.mark.parametrize("semantics", MODES)
def test_a_block_around_the_run_learns(semantics: Semantics) -> None:
    """Casts that torch keeps for the whole block are made anew for every forward of a layer."""
    one = launch_task.task(0)
    plan = launch_task.plan(1, semantics)
    cast = of_launch()
    expected = reference.train(semantics, split(cast), cast, STEPS, N, 3, evaluate=2)
    with Pipeline(one, plan, seed=3) as pipeline, torch.autocast("cpu", torch.bfloat16):
        before = pipeline.evaluate(numbers=range(2))
        losses = pipeline.run(STEPS)
        after = pipeline.evaluate(numbers=range(2))
    assert losses == [sum(expected.losses[i : i + N]) / N for i in range(0, STEPS * N, N)]
    assert after == sum(expected.evaluated) / 2 != before


def test_a_block_around_a_run_of_several_ranks_is_refused() -> None:
    """Boundaries would be of other types than planned; after the block all goes on."""

    def work(transport: Transport) -> list[float]:
        one = launch_task.task(0)
        with Pipeline(one, launch_task.plan(2, "2bw"), seed=3, transport=transport) as pipeline:
            for call in (lambda: pipeline.run(1), lambda: pipeline.evaluate(numbers=[0])):
                with (
                    torch.autocast("cpu", torch.bfloat16),
                    pytest.raises(InputError, match=r"Task\(autocast=torch\.bfloat16\)"),
                ):
                    call()
            return pipeline.run(2)

    expected = reference.train("2bw", split(launch_task.task(0)), launch_task.task(0), 2, N, 3)
    losses = next(each for each in run_ranks(2, work) if each)
    assert losses == [sum(expected.losses[i : i + N]) / N for i in range(0, 2 * N, N)]


def exported() -> Task:
    """A model whose layers are found by export."""
    torch.manual_seed(0)
    return replace(capture_tasks.gpt2(dropout=0.0, blocks=1), autocast=torch.bfloat16)


@functools.cache
def exported_chain() -> Chain:
    """Its chain."""
    return launch_task.leveled(profile_task(exported(), repeats=1, warmup=0))


@grids.each_value(ranks=[1, 2], semantics=MODES)
def test_exported_models(ranks: int, semantics: Semantics) -> None:
    """The model itself under autocast, in a plain loop: the pipeline of its layers equals it."""
    one = exported()
    plan = launch_task.plan_of(exported_chain(), ranks, semantics)
    plain = exported()
    weights = list(plain.model.parameters())
    optimizer = plain.optimizer(weights)
    losses, previous = [], [w.detach().clone() for w in weights]
    for step in range(3):
        newest = [w.detach().clone() for w in weights]
        _fill(weights, previous if semantics == "2bw" else newest)
        optimizer.zero_grad()
        for number in range(step * N, (step + 1) * N):
            source, target = plain.data(number)
            with torch.autocast("cpu", torch.bfloat16):
                loss = plain.loss(plain.model(source).logits, target)
            loss.backward()
            losses.append(loss.item())
        _fill(weights, newest)
        for weight in weights:
            weight.grad /= N
        optimizer.step()
        previous = newest

    def work(transport: Transport) -> tuple[list[float], dict[str, Tensor]]:
        with Pipeline(one, plan, transport=transport) as pipeline:
            heard = pipeline.run(3)
            state = pipeline.state_dict()
            return heard, {k: v.clone() for k, v in state.items() if k.startswith("model.")}

    told = run_ranks(ranks, work)
    heard = next(losses for losses, _ in told if losses)
    assert heard == [sum(losses[i : i + N]) / N for i in range(0, len(losses), N)]
    got = {name: value for _, state in told for name, value in state.items()}
    for name, weight in plain.model.named_parameters():
        assert torch.equal(got[f"model.{name}"], weight), name


def _fill(weights: list[nn.Parameter], values: list[Tensor]) -> None:
    with torch.no_grad():
        for weight, value in zip(weights, values, strict=True):
            weight.copy_(value)


TASKS = {
    "mlp": capture_tasks.mlp,
    "conv": capture_tasks.conv,
    "transformer": capture_tasks.transformer,
    "gpt2": partial(capture_tasks.gpt2, blocks=2),
}


def cast(name: str) -> Task:
    """A task of the capture tests under autocast."""
    return replace(TASKS[name](), autocast=torch.bfloat16, optimizer=capture_tasks.sgd)


@functools.cache
def profiled(name: str) -> Chain:
    """Its chain, with times that make every op last."""
    return lasting(chain_of(cast, name))


@grids.first(2, name=["transformer", "conv", "mlp", "gpt2"])
def test_both_profiles_count_the_same_bytes(name: str) -> None:
    """Measured and fake chains have the same bytes, which are not those without autocast."""

    def sizes(chain: Chain) -> list[dict[str, object]]:
        rows = [layer.model_dump() for layer in chain.layers]
        return [{k: v for k, v in row.items() if not k.endswith("_ns")} for row in rows]

    plain = replace(cast(name), autocast=None)
    assert sizes(estimate_task(cast(name), find_device("h100"))) == sizes(profiled(name))
    assert sizes(profile_task(plain, repeats=1, warmup=0)) != sizes(profiled(name))


@grids.each_value(
    name=list(TASKS), shape=[(1, 1, 0), (2, 1, 1), (3, 2, 2)], semantics=["2bw", "flush"]
)
def test_peak_is_as_planned(name: str, shape: tuple[int, int, int], semantics: Semantics) -> None:
    """Every rank's measured peak equals `peak_bytes`, to the byte; with recomputing, none more."""
    gpus, k, seed = shape
    plan = planned(profiled(name), gpus, semantics, k, seed)
    assert measured_of(plan, cast, name) == [row.peak_bytes for row in plan.memory]
    rng = Random(seed)
    stages = tuple(plans.recomputing(rng, stage) for stage in plan.stages)
    again = planned(profiled(name), gpus, semantics, k, seed, stages)
    peaks = measured_of(again, cast, name)
    most = [row.peak_bytes for row in again.memory]
    assert all(peak <= limit for peak, limit in zip(peaks, most, strict=True))
    assert sum(most) - sum(peaks) <= 0.03 * sum(most)
