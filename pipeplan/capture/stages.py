"""Measures the stages of a plan fused, each as the one piece that a rank runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from pipeplan.capture.measured import measure
from pipeplan.capture.split import split
from pipeplan.chain import Chain, Layer
from pipeplan.errors import InputError
from pipeplan.plan import Plan, Stage
from pipeplan.stages import StageMeasure, StageProfile
from pipeplan.task import SplitModel, Task
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
    model = split(task)
    _check_digest(model, plan)
    fused = measure(fuse(model, plan.stages), task, repeats=repeats, warmup=warmup, say=say)
    return StageProfile(
        source=fused.source,
        task=plan.chain.task,
        task_digest=model.digest(),
        device=fused.device,
        stages=tuple(_measured(plan, fused, index) for index in range(len(plan.stages))),
    )


def fuse(model: SplitModel, stages: Sequence[Stage]) -> SplitModel:
    """`model` with one layer for each of `stages`."""
    return SplitModel(
        layers=tuple(_Fused(model.layers[stage.first : stage.last + 1]) for stage in stages),
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
    )


class _Fused(nn.Module):
    """Layers in a row; each tensor dies when the next layer has taken it."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(layers)

    def forward(self, *boundary: Tensor) -> Tensor | tuple[Tensor, ...]:
        value: Any = boundary
        del boundary
        for part in self.parts:
            value = part(*value) if isinstance(value, tuple) else part(value)
        result: Tensor | tuple[Tensor, ...] = value
        return result


def _check_digest(model: SplitModel, plan: Plan) -> None:
    got, need = model.digest(), plan.task_digest
    if len(model.layers) != len(plan.chain.layers) or need not in (None, got):
        raise InputError(
            f"profile: the plan is not for this task: got {len(model.layers)} layers and task"
            f" digest {got[:12]}.., need {len(plan.chain.layers)} layers and"
            f" {(need or 'any')[:12]}.. Profile and plan again."
        )


def _measured(plan: Plan, fused: Chain, index: int) -> StageMeasure:
    layer = fused.layers[index]
    predicted = stage_bytes.exact(_apart(plan), index)
    kept = layer.saved_input_bytes + layer.saved_bytes + layer.saved_output_bytes
    gradients = layer.gradient_of_output_bytes + fused.gradient_of_input(index)
    return StageMeasure(
        layers=plan.stages[index].layers,
        forward_ns=layer.forward_ns,
        backward_ns=layer.backward_ns,
        optimizer_ns=layer.optimizer_ns,
        kept_bytes=kept,
        forward_peak_bytes=_forward_peak(fused, index, layer),
        backward_peak_bytes=kept + layer.backward_workspace_bytes + gradients,
        predicted_forward_peak_bytes=predicted.forward,
        predicted_backward_peak_bytes=predicted.backward,
    )


def _forward_peak(fused: Chain, index: int, layer: Layer) -> int:
    running = layer.saved_bytes + layer.forward_workspace_bytes + layer.output_bytes
    return fused.input_of(index) + running


def _apart(plan: Plan) -> Plan:
    """`plan` with every stage on a GPU of its own and nothing recomputed, as they are measured."""
    stages = tuple(
        stage.model_copy(update={"gpu": index, "remat": None})
        for index, stage in enumerate(plan.stages)
    )
    return plan.model_copy(update={"stages": stages})
