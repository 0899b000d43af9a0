"""The Python API: the same bits as one process, whatever is called in between."""

from __future__ import annotations

import copy
import functools
import random
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from pipeplan import Pipeline
from pipeplan.capture import profile_task, split
from pipeplan.chain import Chain
from pipeplan.errors import InputError
from pipeplan.fitting import split_for
from pipeplan.memory_terms import MemoryReport
from pipeplan.plan import Semantics
from pipeplan.repeat import seed_all
from pipeplan.runtime.transport.base import Transport
from pipeplan.task import LossScale, Task
from pipeplan.testing import reference
from pipeplan.testing.in_process import run_ranks
from tests import grids, launch_task, odd_models, pipelines

M = launch_task.MICROBATCHES
Result = TypeVar("Result")


def on(
    ranks: int, semantics: Semantics, task: Task, work: Callable[[Pipeline], Result]
) -> list[Result]:
    """What `work` returns on each rank of a pipeline of `task`."""
    plan = launch_task.plan(ranks, semantics)
    if task.clip_norm or task.loss_scale:
        plan = launch_task.waiting(plan)

    def body(transport: Transport) -> Result:
        with Pipeline(task, plan, seed=3, transport=transport) as pipeline:
            return work(pipeline)

    return run_ranks(ranks, body)


def expected(semantics: Semantics, task: Task, steps: int, evaluate: int = 0) -> reference.Trained:
    """The one-process run, of a model of its own."""
    return reference.train(semantics, split(task), task, steps, M, 3, evaluate)


def weights(parts: list[dict[str, object]]) -> dict[str, Tensor]:
    """The newest weights out of the state dicts of all ranks."""
    merged = {key: value for part in parts for key, value in part.items()}
    return {k.removeprefix("model."): v for k, v in merged.items() if k.startswith("model.")}


def equal(got: dict[str, Tensor], trained: reference.Trained) -> bool:
    """Same names, same bits."""
    return got.keys() == trained.weights.keys() and all(
        torch.equal(got[name], trained.weights[name]) for name in got
    )


def means(losses: list[float]) -> list[float]:
    """Mean loss of each step."""
    return [sum(losses[i : i + M]) / M for i in range(0, len(losses), M)]


@grids.each_value(ranks=[1, 2, 4], semantics=["flush", "2bw"])
def test_steps_and_evaluation_equal_one_process(ranks: int, semantics: Semantics) -> None:
    """Evaluation between steps sees the newest weights and running statistics, changes nothing."""
    task = launch_task.task(0)
    trained = expected(semantics, task, 4, evaluate=3)

    def work(pipeline: Pipeline) -> tuple[list[float], float | None, float | None, dict]:
        losses = [pipeline.step()]
        early = pipeline.evaluate(numbers=[7])
        losses += pipeline.run(3)
        late = pipeline.evaluate(numbers=range(3))
        return [each for each in losses if each is not None], early, late, pipeline.state_dict()

    told = on(ranks, semantics, task, work)
    last = told[launch_task.plan(ranks, semantics).stages[-1].gpu]
    assert last[0] == means(trained.losses)
    assert last[1] is not None
    assert last[2] == sum(trained.evaluated) / 3
    assert [each[2] is None for each in told].count(False) == 1
    assert equal(weights([each[3] for each in told]), trained)


@pytest.mark.parametrize("semantics", ["flush", "2bw"])
def test_memory_is_measured_in_the_settled_step(semantics: Semantics) -> None:
    """Alike on all ranks: first the prediction alone, then each peak, as planned, to the byte."""
    plan = launch_task.plan(2, semantics)

    def work(pipeline: Pipeline) -> list[MemoryReport | None]:
        before = pipeline.memory()
        for _ in range(4):
            pipeline.step()
        return [before, pipeline.memory()]

    told = on(2, semantics, launch_task.task(0), work)
    assert told[0] == told[1]
    before, after = told[0]
    assert before is not None
    assert after is not None
    assert before.step is None
    assert after.step == (2 if semantics == "flush" else 4)
    assert [found and found.peak.size for found in after.measured] == [
        row.peak_bytes for row in plan.memory
    ]


def test_memory_without_samples_is_the_prediction() -> None:
    """Nothing is counted, and the report says so."""
    plan = launch_task.plan(1, "flush")
    with Pipeline(launch_task.task(0), plan, sample_memory=False) as pipeline:
        pipeline.run(3)
        report = pipeline.memory()
    assert report is not None
    assert report.step is None
    assert [each.peak.size for each in report.predicted] == [plan.memory[0].peak_bytes]


def test_generators_are_left_alone() -> None:
    """Ranks seed for their own layers; a script that draws batches must draw the same on all."""
    layers = [odd_models.NumpyNoise(), odd_models.LayerDrop(), nn.Dropout(), nn.Linear(6, 3)]
    task = replace(launch_task.task(0), model=layers)
    chain = launch_task.leveled(profile_task(task, repeats=1, warmup=0))

    def drawn() -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), torch.rand(1).item()

    seed_all(5)
    wanted = [drawn() for _ in range(3)]
    seed_all(5)
    with Pipeline(task, launch_task.plan_of(chain, 1, "flush"), seed=3) as pipeline:
        found = [drawn()]
        pipeline.run(1)
        found.append(drawn())
        pipeline.evaluate(numbers=[0])
        found.append(drawn())
    assert found == wanted


def _by_graph() -> Task:
    """Cut as a graph, in which the mode of a module is a constant."""

    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.norm, self.two = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)

        def forward(self, rows: Tensor) -> Tensor:
            return self.two(self.norm(self.one(rows)))

    return replace(launch_task.task(0), model=Normed())


@functools.cache
def _chain_of(make: Callable[[], Task]) -> Chain:
    """Measured once: its model is nobody's."""
    return launch_task.leveled(profile_task(make(), repeats=1, warmup=0))


def _in_a_row() -> Task:
    """Its layers are the user's own modules."""
    return launch_task.task(0)


@pytest.mark.parametrize("semantics", ["flush", "2bw"])
@pytest.mark.parametrize(
    ("make", "change", "message"),
    [
        (_by_graph, lambda m: m.one.requires_grad_(False), "one.weight: got requires_grad=False"),
        (_by_graph, lambda m: m.norm.eval(), "norm: got training=False, need True"),
        (_in_a_row, lambda m: m[3].requires_grad_(False), "3.weight: got"),
    ],
)
def test_what_is_trained_cannot_change(
    semantics: Semantics,
    make: Callable[[], Task],
    change: Callable[[nn.Module], None],
    message: str,
) -> None:
    """Layers would obey now and then, or never; with the change undone, training goes on."""
    task = make()
    with Pipeline(task, launch_task.plan_of(_chain_of(make), 1, semantics)) as pipeline:
        pipeline.run(1)
        pipeline.evaluate(numbers=[0])
        change(task.model)
        with pytest.raises(InputError, match=message):
            pipeline.run(1)
        task.model.requires_grad_(True).train()
        assert len(pipeline.run(2)) == 2


@pytest.mark.parametrize("semantics", ["flush", "2bw"])
@pytest.mark.parametrize(
    ("make", "change", "message"),
    [
        (_by_graph, lambda m: setattr(m, "one", nn.Linear(6, 6)), "module 'one': got another"),
        (_by_graph, lambda m: setattr(m, "more", nn.ReLU()), "module 'more': got a new one"),
        (
            _in_a_row,
            lambda m: setattr(m[3], "weight", nn.Parameter(torch.zeros(6, 6))),
            "parameter '3.weight': got another",
        ),
        (_in_a_row, lambda m: m.pop(4), "module '4': got another"),
    ],
)
def test_modules_cannot_change(
    semantics: Semantics,
    make: Callable[[], Task],
    change: Callable[[nn.Module], None],
    message: str,
) -> None:
    """The former ones would be trained, and evaluated, in silence."""
    task = make()
    with Pipeline(task, launch_task.plan_of(_chain_of(make), 1, semantics)) as pipeline:
        pipeline.run(1)
        pipeline.evaluate(numbers=[0])
        pipeline.run(1)
        change(task.model)
        with pytest.raises(InputError, match=f"run: {message}"):
            pipeline.run(1)
        with pytest.raises(InputError, match=f"evaluate: {message}"):
            pipeline.evaluate(numbers=[0])


def test_a_mode_that_layers_ask_for_may_change() -> None:
    """In a row the modules are the user's own: they run in the mode that they are in."""
    task = launch_task.task(0)
    with Pipeline(task, launch_task.plan(1, "flush")) as pipeline:
        pipeline.run(1)
        task.model[6].eval()
        before = task.model[6].running_mean.clone()
        pipeline.run(1)
        assert torch.equal(task.model[6].running_mean, before)


class _Twice(nn.Module):
    """Reads its input at both ends, so its last layers are fed it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.then, self.last = (nn.Linear(6, 6) for _ in range(3))

    def forward(self, rows: Tensor) -> Tensor:
        hidden = torch.tanh(self.then(torch.tanh(self.first(rows))))
        logits: Tensor = self.last(hidden * rows)[:, :3]
        return logits


def test_evaluation_of_layers_that_are_fed() -> None:
    """A layer that gets the input behind its boundary gets that of the evaluated micro-batch."""
    torch.manual_seed(0)
    task = replace(launch_task.task(0), model=_Twice())
    assert any(split(task).fed), "the test needs a layer that is fed"
    with torch.no_grad():
        losses = {
            n: task.loss(task.model(x), y) for n, (x, y) in ((n, task.data(n)) for n in (0, 7))
        }
    assert losses[0] != losses[7]
    chain = launch_task.leveled(profile_task(task, repeats=1, warmup=0))
    plan = launch_task.plan_of(chain, 2, "flush")
    pairs = [task.data(7)]

    def body(transport: Transport) -> list[float | None]:
        with Pipeline(task, plan, transport=transport) as pipeline:
            return [pipeline.evaluate(numbers=[7]), pipeline.evaluate(*pairs[0])]

    told = run_ranks(2, body)[plan.stages[-1].gpu]
    assert told == [losses[7].item()] * 2


@pytest.mark.parametrize("semantics", ["flush", "2bw"])
def test_batches_from_outside(semantics: Semantics) -> None:
    """A batch handed to `step` is cut into the micro-batches that the task would have given."""
    task = launch_task.task(0)
    trained = expected(semantics, task, 2)

    def work(pipeline: Pipeline) -> dict[str, object]:
        for step in range(2):
            pairs = [pipelines.data(n) for n in range(step * M, (step + 1) * M)]
            inputs, target = (torch.cat(part) for part in zip(*pairs, strict=True))
            pipeline.step(inputs, target if pipeline.has_loss else None)
        return pipeline.state_dict()

    assert equal(weights(on(2, semantics, task, work)), trained)


@pytest.mark.parametrize("semantics", ["flush", "2bw"])
def test_state_dict_goes_on_elsewhere(semantics: Semantics) -> None:
    """Two steps on four ranks, the state on two ranks, two more: schedule and scale go on too."""
    options = {
        "clip_norm": 0.5,
        "loss_scale": LossScale(initial=8.0, interval=2),
        "scheduler": lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.7),
    }
    trained = expected(semantics, replace(launch_task.task(0), **options), 4)

    def begin(pipeline: Pipeline) -> dict[str, object]:
        pipeline.run(2)
        state = pipeline.state_dict()
        return {k: v.clone() if isinstance(v, Tensor) else v for k, v in state.items()}

    parts = on(4, semantics, replace(launch_task.task(0), **options), begin)
    state = {key: value for part in parts for key, value in part.items()}

    def go_on(pipeline: Pipeline) -> dict[str, object]:
        pipeline.run(1)  # to be forgotten
        pipeline.load_state_dict(state)
        assert pipeline.steps == 2
        pipeline.run(2)
        return pipeline.state_dict()

    parts = on(2, semantics, replace(launch_task.task(0), **options), go_on)
    assert equal(weights(parts), trained)
    assert parts[0]["scales"] == (32.0,) if semantics == "flush" else (16.0, 32.0)


def test_a_state_without_drawn_goes_on() -> None:
    """One replica draws a step's micro-batches per step, so the next step's data are the same."""
    with Pipeline(launch_task.task(0), launch_task.plan(1, "flush"), seed=3) as pipeline:
        pipeline.run(2)
        state = {k: v for k, v in pipeline.state_dict().items() if k != "drawn"}
        pipeline.load_state_dict(state)
        assert pipeline.state_dict()["drawn"] == 2 * M


@pytest.mark.parametrize("name", ["step", "scales", "good_steps"])
def test_a_state_without_its_progress_is_refused(name: str) -> None:
    """It is named before any weight is overwritten."""
    with Pipeline(launch_task.task(0), launch_task.plan(1, "flush"), seed=3) as pipeline:
        pipeline.run(1)
        kept = {k: v for k, v in pipeline.state_dict().items() if k != name}
        lacking = {k: torch.zeros_like(v) if isinstance(v, Tensor) else v for k, v in kept.items()}
        with pytest.raises(InputError, match=f"without '{name}'"):
            pipeline.load_state_dict(lacking)
        assert any(bool(v.any()) for v in weights([pipeline.state_dict()]).values())


@pytest.mark.parametrize("steps", [0, 1])
def test_a_given_batch_is_for_its_step_alone(steps: int) -> None:
    """Behind a state of an earlier step the task's data are used, not the batch of that step."""
    task = launch_task.task(0)
    trained = expected("flush", launch_task.task(0), steps + 1)
    with Pipeline(task, launch_task.plan(1, "flush"), seed=3) as pipeline:
        pipeline.run(steps)
        state = pipeline.state_dict()
        state = {k: v.clone() if isinstance(v, Tensor) else v for k, v in state.items()}
        pipeline.step(torch.ones(M * 5, 6), torch.zeros(M * 5, dtype=torch.int64))
        pipeline.load_state_dict(state)
        pipeline.run(1)
        assert equal(weights([pipeline.state_dict()]), trained)


def test_a_plain_model_gets_its_weights_back() -> None:
    """No task at all: model, loss, optimizer, sample; after the block the model is trained."""
    task = launch_task.task(0)
    trained = expected("2bw", task, 1)
    plan = launch_task.plan(1, "2bw")
    pairs = [pipelines.data(n) for n in range(M)]
    inputs, target = (torch.cat(part) for part in zip(*pairs, strict=True))
    model = task.model
    options = {"loss": task.loss, "optimizer": task.optimizer, "sample": pairs[0]}
    with Pipeline(model, plan, seed=3, **options) as pipeline:
        pipeline.step(inputs, target)
    assert isinstance(model, nn.Module)
    assert equal({k: v for k, v in model.state_dict().items()}, trained)


@pytest.mark.parametrize(
    ("rows", "message"),
    [(M * 5 - 1, r"got \[29\] rows, need 6 micro-batches of 5"), (0, "need 6 micro-batches")],
)
def test_smaller_last_batch(rows: int, message: str) -> None:
    """A batch that does not fill all micro-batches is refused before anything runs."""
    with Pipeline(launch_task.task(0), launch_task.plan(1, "flush")) as pipeline:
        with pytest.raises(InputError, match=message):
            pipeline.step(torch.zeros(rows, 6))
        with pytest.raises(InputError, match="need"):
            pipeline.step(torch.zeros(M * 5, 7), torch.zeros(M * 5, dtype=torch.int64))
        with pytest.raises(InputError, match="neither"):
            pipeline.evaluate()


@pytest.mark.parametrize(
    "other", [torch.zeros(1, 6), torch.zeros(6, 6, dtype=torch.float64), torch.zeros(6), None]
)
def test_a_state_of_another_shape_is_refused(other: Tensor | None) -> None:
    """It is neither spread nor rounded to fit, and nothing is overwritten."""
    with Pipeline(launch_task.task(0), launch_task.plan(1, "2bw")) as pipeline:
        pipeline.run(1)
        state = {key: copy.deepcopy(value) for key, value in pipeline.state_dict().items()}
        pipeline.run(1)
        expected = {key: copy.deepcopy(value) for key, value in pipeline.state_dict().items()}
        name = next(key for key, v in state.items() if isinstance(v, Tensor) and v.shape == (6, 6))
        with pytest.raises(InputError, match="state_dict: .*" + name):
            pipeline.load_state_dict({**state, name: other})
        kept = pipeline.state_dict()
        assert all(
            torch.equal(kept[k], v) if isinstance(v, Tensor) else kept[k] == v
            for k, v in expected.items()
        )


@pytest.mark.parametrize("semantics", ["flush", "2bw"])
def test_nothing_goes_on_from_the_middle_of_a_step(semantics: Semantics) -> None:
    """A run that failed has added some gradients already: a second try would add them twice."""
    task = launch_task.task(0)
    broken = True

    def data(number: int) -> tuple[Tensor, Tensor]:
        if number == M + 2 and broken:
            raise OSError("gone for a moment")
        return task.data(number)

    with Pipeline(replace(task, data=data), launch_task.plan(1, semantics), seed=3) as pipeline:
        state = {key: copy.deepcopy(value) for key, value in pipeline.state_dict().items()}
        with pytest.raises(InputError, match="gone for a moment"):
            pipeline.run(3)
        broken = False
        for call in (
            lambda: pipeline.run(3),
            lambda: pipeline.step(),
            lambda: pipeline.evaluate(numbers=[0]),
            lambda: pipeline.state_dict(),
            lambda: pipeline.load_state_dict(state),
        ):
            with pytest.raises(InputError, match="in its middle"):
                call()
    with Pipeline(launch_task.task(0), launch_task.plan(1, semantics), seed=3) as pipeline:
        pipeline.load_state_dict(state)
        pipeline.run(3)
        assert equal(weights([pipeline.state_dict()]), expected(semantics, launch_task.task(0), 3))
        with pytest.raises(InputError, match="steps: got -1, need"):
            pipeline.run(-1)


def test_ties_kept_otherwise_than_planned() -> None:
    """Bytes were counted for one way of keeping ties: a task that says the other is refused."""

    def tied() -> Task:
        torch.manual_seed(0)
        layers = [nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)]
        layers[2].weight = layers[0].weight
        return replace(launch_task.task(0), model=nn.Sequential(*layers))

    chain = profile_task(tied(), repeats=1, warmup=0)
    plan = pipelines.plan_of([], [0], "flush", M, layers=3)
    plan = plan.model_copy(update={"chain": chain, "task_digest": chain.task_digest})
    assert split_for(plan, tied()).layers
    with pytest.raises(InputError, match="tied='synchronize', the plan's chain 'colocate'"):
        split_for(plan, replace(tied(), tied="synchronize"))


def test_missing_parts_are_named() -> None:
    """A batch without a target, a model without a loss, a state of another semantics."""
    plan = launch_task.plan(1, "2bw")
    with pytest.raises(InputError, match="need optimizer and sample"):
        Pipeline(nn.Linear(1, 1), plan)
    with pytest.raises(InputError, match="one or the other"):
        Pipeline(launch_task.task(0), plan, clip_norm=1.0)
    with pytest.raises(InputError, match="got 1 rank, need 2"):
        Pipeline(launch_task.task(0), launch_task.plan(2, "flush"))
    with Pipeline(launch_task.task(0), launch_task.plan(1, "flush")) as pipeline:
        state = pipeline.state_dict()
        with pytest.raises(InputError, match="no target"):
            pipeline.evaluate(torch.zeros(5, 6))
    with Pipeline(launch_task.task(0), plan) as pipeline, pytest.raises(InputError, match="prev"):
        pipeline.load_state_dict(state)


@pytest.mark.parametrize("more", [{"clip_norm": 1.0}, {"loss_scale": LossScale()}])
def test_updates_that_begin_to_wait_are_refused(more: dict[str, object]) -> None:
    """The chain was profiled without clipping and scaling: no bytes for gradients that wait."""
    plan, task = launch_task.plan(2, "2bw"), launch_task.task(0)
    assert split_for(plan, task).layers
    with pytest.raises(InputError, match="Profile and plan again"):
        split_for(plan, replace(task, **more))
    assert split_for(launch_task.waiting(plan), replace(task, **more)).layers
    assert split_for(launch_task.plan(2, "flush"), replace(task, **more)).layers
