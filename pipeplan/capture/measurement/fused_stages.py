"""Measures the stages of a plan, each fused into the one layer that a rank runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pipeplan.capture.layer_costs.chain_layers import LayerCost
from pipeplan.capture.layer_costs.device_clock import device_of
from pipeplan.capture.layer_costs.layer_run import FusedLayers
from pipeplan.capture.measurement.task_profile import SOURCE, measure_layers, ready
from pipeplan.capture.split import split
from pipeplan.errors import InputError
from pipeplan.plan import Plan, Stage
from pipeplan.repeat import check_data
from pipeplan.split_model import SplitModel
from pipeplan.stage_profile import StageMeasure, StageProfile
from pipeplan.task import Task
from pipeplan.verifier import stage_bytes

Progress = Callable[[str], None]


def measure_stages(
    task: Task, plan: Plan, *, repeats: int = 20, warmup: int = 3, progress: Progress | None = None
) -> StageProfile:
    """What each stage of `plan` takes and holds when its layers run back to back.

    Stages run without recomputing, whatever the plan says: a recompute is its layers' forward.

    Raises:
        InputError: if the plan is not for this task, or the task cannot be split or run.
    """
    say = progress or (lambda _: None)
    place = device_of(task.model)
    check_data(task)
    task = place.bring(task)
    model = split(task, len(plan.chain.layers) if plan.task_digest else None, evaluates=False)
    _check(model, plan)
    fused = fuse_stages(ready(model, say), plan.stages)
    found = measure_layers(fused, task, repeats=repeats, warmup=warmup, say=say)
    return StageProfile(
        source=SOURCE,
        task=plan.chain.task,
        task_digest=model.digest(),
        device=found.device,
        stages=tuple(_measured(plan, index, cost) for index, cost in enumerate(found.costs)),
    )


def fuse_stages(model: SplitModel, stages: Sequence[Stage]) -> SplitModel:
    """`model` with one layer for each of `stages`."""
    return SplitModel(
        layers=tuple(_row(model, stage) for stage in stages),
        names=tuple(f"{stage.first}-{stage.last}" for stage in stages),
        fqns=tuple(
            {
                f"parts.{place}.{local}": name
                for place, fqns in enumerate(model.fqns[stage.first : stage.last + 1])
                for local, name in fqns.items()
            }
            for stage in stages
        ),
        boundaries=tuple(model.boundaries[stage.first] for stage in stages),
        microbatch_size=model.microbatch_size,
        fed=tuple(_fed(model, stage) for stage in stages),
        inputs=model.inputs,
        entering=model.entering,
        arguments=model.arguments,
        returned=model.returned,
        autocast=model.autocast,
        accumulate=model.accumulate,
        master_weights=model.master_weights,
        compile=model.compile,
    )


def _fed(model: SplitModel, stage: Stage) -> tuple[int, ...]:
    """Which tensors of the model's input the stage's layers get, each once."""
    layers = range(stage.first, stage.last + 1)
    return tuple(sorted({place for layer in layers for place in model.fed_to(layer)}))


def _row(model: SplitModel, stage: Stage) -> FusedLayers:
    places = _fed(model, stage)
    return FusedLayers(
        model.layers[stage.first : stage.last + 1],
        len(model.boundaries[stage.first]),
        [
            tuple(places.index(place) for place in model.fed_to(layer))
            for layer in range(stage.first, stage.last + 1)
        ],
    )


def _check(model: SplitModel, plan: Plan) -> None:
    got, need = model.digest(), plan.task_digest
    layers = len(plan.chain.layers)
    if len(model.layers) != layers or need not in (None, got):
        raise InputError(
            f"profile: the plan is not for this task: got {len(model.layers)} layers and task"
            f" digest {got[:12]}.., need {layers} layers and {(need or 'any')[:12]}.. Profile and"
            " plan again."
        )
    covered = [layer for stage in plan.stages for layer in range(stage.first, stage.last + 1)]
    if covered != list(range(layers)):
        raise InputError(
            f"profile: the plan's stages are not its {layers} layers in order."
            " Run pipeplan verify on it."
        )


def _measured(plan: Plan, index: int, cost: LayerCost) -> StageMeasure:
    predicted = stage_bytes.exact(_apart(plan), index)
    return StageMeasure(
        layers=plan.stages[index].layers,
        forward_ns=cost.forward_ns,
        backward_ns=cost.backward_ns,
        optimizer_ns=cost.step.step_ns,
        kept_bytes=cost.size.kept,
        forward_peak_bytes=cost.size.forward_peak,
        backward_peak_bytes=cost.size.backward_peak,
        predicted_forward_peak_bytes=predicted.forward,
        predicted_backward_peak_bytes=predicted.backward,
    )


def _apart(plan: Plan) -> Plan:
    """`plan` with every stage on a GPU of its own and nothing recomputed, as they are measured."""
    stages = tuple(
        stage.model_copy(update={"gpu": index, "remat": None})
        for index, stage in enumerate(plan.stages)
    )
    return plan.model_copy(update={"stages": stages})
