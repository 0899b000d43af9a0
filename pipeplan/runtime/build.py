"""From a plan and a split model to what one rank executes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn

from pipeplan.errors import InputError
from pipeplan.plan import Plan
from pipeplan.plan import Stage as PlannedStage
from pipeplan.program import Pattern
from pipeplan.runtime.executor import Executor, Feed, Observer
from pipeplan.runtime.gate import Gate
from pipeplan.runtime.stage import Stage, StageSpec
from pipeplan.runtime.transport import Transport
from pipeplan.runtime.weights import Weights
from pipeplan.runtime.wiring import wires
from pipeplan.task import SplitModel, Task


@dataclass(frozen=True, slots=True)
class Worker:
    """One rank, ready to run: its executor and the stages it hosts."""

    executor: Executor
    stages: dict[int, Stage]


def refuse_split_ties(plan: Plan, split: SplitModel) -> None:
    """Refuse parameters shared in a way the runtime does not keep equal.

    Under flush the stages that share may be different ones of one rank: gradients add up in one
    buffer. Under 2bw they must be one stage, since each stage switches versions at its own time.

    Raises:
        InputError: names the layers and the stages.
    """
    stage_of = {
        layer: stage for stage in plan.stages for layer in range(stage.first, stage.last + 1)
    }
    seen: dict[nn.Parameter, int] = {}
    for layer, module in enumerate(split.layers):
        for parameter in module.parameters():
            other = seen.setdefault(parameter, layer)
            one, two = stage_of[other], stage_of[layer]
            where = f"layers {split.names[other]!r} and {split.names[layer]!r} share a parameter"
            if one.gpu != two.gpu:
                raise InputError(
                    f"plan: {where} but sit on GPUs {one.gpu} and {two.gpu}; need one GPU."
                    " Plan again from a chain that names the shared parameter in both layers."
                )
            if plan.semantics == "2bw" and one.id != two.id and parameter.requires_grad:
                raise InputError(
                    f"plan: {where} but belong to stages {one.id} and {two.id}; 2bw needs one"
                    " stage for both. Plan with --semantics flush, or untie the weights."
                )


def build(
    plan: Plan,
    pattern: Pattern,
    split: SplitModel,
    task: Task,
    feed: Feed,
    transport: Transport,
    observer: Observer,
    *,
    seed: int,
    wants_stop: Callable[[], bool] = lambda: False,
) -> Worker:
    """What `transport.rank` executes.

    Args:
        plan: gives stages and semantics.
        pattern: the lowered plan.
        split: the layers; the hosted ones are taken over, the others are not touched.
        task: gives loss and optimizer.
        feed: gives inputs and targets.
        transport: to the other ranks.
        observer: is told losses, backwards and updates.
        seed: of all random numbers drawn in layers.
        wants_stop: whether this rank wants all ranks to stop at a step boundary.
    """
    stages: dict[int, Stage] = {}
    owned: list[nn.Parameter] = []
    for index in pattern.hosted[transport.rank]:
        stages[index] = _stage(plan, split, task, index, seed, owned, feed)
        owned.extend(stages[index].weights.parameters)
    links = {index: wires(plan.stages, split.boundaries, index) for index in stages}
    gate = Gate(transport, plan.semantics, wants_stop)
    return Worker(Executor(pattern, stages, links, feed, transport, observer, gate), stages)


def _stage(
    plan: Plan,
    split: SplitModel,
    task: Task,
    index: int,
    seed: int,
    owned: list[nn.Parameter],
    feed: Feed,
) -> Stage:
    planned = plan.stages[index]
    last = index == len(plan.stages) - 1
    spec = StageSpec(
        index=index,
        first_layer=planned.first,
        layers=split.layers[planned.first : planned.last + 1],
        fqns=split.fqns[planned.first : planned.last + 1],
        inputs=split.boundaries[planned.first],
        outputs=() if last else split.boundaries[planned.last + 1],
        loss=task.loss if last else None,
        seed=seed,
        fed=_fed(split, planned, feed),
    )
    weights = Weights(
        spec.layers,
        task.optimizer,
        versions=2 if plan.semantics == "2bw" else 1,
        microbatches=plan.microbatches,
        owned_elsewhere=owned,
    )
    return Stage(spec, weights, plan.microbatches)


def _fed(
    split: SplitModel, planned: PlannedStage, feed: Feed
) -> dict[int, Callable[[int], list[Tensor]]]:
    """What layers of the stage get from the data behind their boundary."""

    def chosen(indices: tuple[int, ...]) -> Callable[[int], list[Tensor]]:
        def fetch(microbatch: int) -> list[Tensor]:
            tensors = feed.input(microbatch)
            return [tensors[index] for index in indices]

        return fetch

    layers = range(planned.first, planned.last + 1)
    return {n: chosen(split.fed_to(x)) for n, x in enumerate(layers) if split.fed_to(x)}
