"""From a plan and a split model to what one rank executes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from pipeplan.compiling import compiled_layer
from pipeplan.host_copy import CopyEngine
from pipeplan.nested import layer_loss
from pipeplan.plan import LayerRanges, Plan
from pipeplan.plan import Stage as PlannedStage
from pipeplan.program import ActionKind, Pattern
from pipeplan.runtime.data.feed import Feed
from pipeplan.runtime.executor import Executor
from pipeplan.runtime.interfaces import Observer
from pipeplan.runtime.parameters.gradient_clipping import LossScaler, Nonfinite, StepDecisions
from pipeplan.runtime.parameters.gradient_norms import NormLayout
from pipeplan.runtime.parameters.host_update import runs_beside
from pipeplan.runtime.parameters.optimizer_factory import OptimizerFactory
from pipeplan.runtime.parameters.optimizer_steps import OptimizerSteps
from pipeplan.runtime.parameters.ownership import ParameterOwnership
from pipeplan.runtime.parameters.replicas import Replicas, Shard
from pipeplan.runtime.parameters.state_room import rooms_of
from pipeplan.runtime.parameters.step_reports import StepReports
from pipeplan.runtime.parameters.tied_gradients import TiedGradients
from pipeplan.runtime.parameters.tied_parameters import find_ties
from pipeplan.runtime.stages.compiling import compile_ahead
from pipeplan.runtime.stages.layer_programs import programs_of, with_programs
from pipeplan.runtime.stages.segment import Fed
from pipeplan.runtime.stages.stage import StageRunner, StageSpec
from pipeplan.runtime.supervision.run_ahead import RunAhead
from pipeplan.runtime.supervision.stop_consensus import NeverStop, StopConsensus
from pipeplan.runtime.transport.backend import device_of
from pipeplan.runtime.transport.base import Transport
from pipeplan.runtime.transport.endpoints import (
    StageEndpoints,
    endpoints,
    first_free_tag,
    first_tie_tag,
    report_tag,
)
from pipeplan.split_model import SplitModel
from pipeplan.task import Task


@dataclass(frozen=True, slots=True)
class Worker:
    """One rank, ready to run: its executor, the stages it hosts, its loss scale if it has one."""

    executor: Executor
    stages: dict[int, StageRunner]
    endpoints: dict[int, StageEndpoints]
    scaler: LossScaler | None
    tied: TiedGradients

    def scales(self, step: int) -> tuple[tuple[float, ...], int]:
        """Loss scales of the steps after `step`, and good steps on end, for a checkpoint."""
        return self.scaler.state(step) if self.scaler else ((), 0)


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
    consensus: StopConsensus | None = None,
    nonfinite: Nonfinite | None = None,
    replicas: Replicas | None = None,
    shard: Shard | None = None,
    ahead: RunAhead | None = None,
    reports: bool = False,
    uncounted: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Worker:
    """What `transport.rank` executes.

    Args:
        plan: gives stages and semantics.
        pattern: the lowered plan.
        split: the layers, each with modules of its own (`untie`); the hosted ones are taken over,
            the others are not touched.
        task: gives loss, optimizer and what else an update needs.
        feed: gives inputs and targets.
        transport: to the other ranks.
        observer: is told losses, backwards and updates.
        seed: of all random numbers drawn in layers.
        consensus: asked before each step; None: nobody stops.
        nonfinite: is told of gradients to clip that are not finite.
        replicas: averages gradients, where there are several.
        shard: which micro-batches of the data these are, for random numbers; None: all.
        ahead: how far the process may be ahead of its GPU; None: nobody can be gone.
        reports: whether the observer hears of whole steps (`Observer.stepped`).
        uncounted: around what no plan has bytes for.

    Raises:
        InputError: if layers on two GPUs share a parameter, the optimizer cannot work, or a layer
            cannot be compiled.
    """
    ties = find_ties(plan.stages, split)
    versions = 2 if plan.semantics == "2bw" else 1
    scaler = LossScaler(task.loss_scale, lag=versions) if task.loss_scale else None
    ownership = ParameterOwnership(
        ties,
        OptimizerFactory(
            task.optimizer,
            task.scheduler,
            task.accumulate,
            task.master_weights,
            split.originals,
            rooms_of(plan, split),
        ),
        versions=versions,
        microbatches=plan.microbatches,
        deferred=task.updates_wait,
    )
    scale = scaler.of if scaler else lambda _: 1.0
    number = (shard or Shard(plan.microbatches)).number
    device = device_of(split)
    ahead = ahead or RunAhead.of(device)
    host = _way_to_host(plan, device)
    maker = _StageBuilder(
        plan, pattern, split, task, feed, seed, scale, number, ownership, device, host
    )
    stages: dict[int, StageRunner] = {}
    for index in pattern.hosted[transport.rank]:
        stages[index] = maker.stage(index, stages.get(index - 1))
    links = {index: endpoints(plan.stages, split.boundaries, index, device) for index in stages}
    first_tag = first_free_tag(split.boundaries)
    tied = TiedGradients(ties, ownership.of, transport, first_tie_tag(split.boundaries))
    layout = NormLayout(plan.stages, split, task.accumulate)
    decisions = None
    if ownership.deferred:
        decisions = StepDecisions(
            layout,
            transport,
            task.clip_norm,
            scaler,
            first_tag,
            nonfinite=nonfinite,
            read=ahead.read,
            device=device if device.type == "cuda" else None,
        )
    reporting = None
    if reports:
        reporting = StepReports(
            layout,
            transport,
            len(stages),
            report_tag(split.boundaries),
            observer.stepped,
            last=len(plan.stages) - 1,
            teller=plan.stages[-1].gpu,
            lag=versions + (device.type != "cpu"),
            settle=ahead.settle,
            uncounted=uncounted,
        )
    updates = OptimizerSteps(
        stages, tied, decisions, observer, transport.rank, replicas, consensus, reporting
    )
    ends = pattern, stages, links, feed, transport, observer, consensus or NeverStop()
    executor = Executor(*ends, updates=updates, ahead=ahead)
    return Worker(executor, stages, links, scaler, tied)


@dataclass(frozen=True, slots=True)
class _StageBuilder:
    """Makes the stages of one rank, in chain order."""

    plan: Plan
    pattern: Pattern
    split: SplitModel
    task: Task
    feed: Feed
    seed: int
    scale: Callable[[int], float]
    number: Callable[[int], int]
    ownership: ParameterOwnership
    device: torch.device
    host: CopyEngine

    def stage(self, index: int, before: StageRunner | None) -> StageRunner:
        """Stage `index`; `before`: the one before, if the rank hosts that, too."""
        split, planned = self.split, self.plan.stages[index]
        last = index == len(self.plan.stages) - 1
        again, offload = _runs(planned)
        for begin, end in again:
            run = range(planned.first + begin, planned.first + end + 1)
            split.check_again(run, f"the plan's stage {index}")
        hosted = range(planned.first, planned.last + 1)
        layers, fqns = zip(*(compiled_layer(split, layer) for layer in hosted), strict=True)
        spec = StageSpec(
            index=index,
            first_layer=planned.first,
            layers=layers,
            fqns=fqns,
            boundaries=split.boundaries[planned.first : planned.last + 1],
            outputs=() if last else split.boundaries[planned.last + 1],
            loss=layer_loss(self.task.loss, split.returned) if last else None,
            seed=self.seed,
            scale=self.scale,
            number=self.number,
            fed=_fed(split, planned, self.feed),
            runs=again,
            offload=offload,
            offload_input=planned.remat is not None and planned.remat.offload_input,
            lends_output=_lends(self.plan, planned),
            device=self.device,
            autocast=self.task.autocast,
            host=self.host if planned.offloads else None,
            shared=self._shared(planned),
            split_backward=planned.split_backward,
        )
        spec = with_programs(spec, self.plan.chain, programs_of(planned, self.plan.chain))
        compile_ahead(spec)
        held = self.ownership.hold(
            spec.layers,
            planned.first,
            on_host=planned.states == "host",
            beside=runs_beside(self.plan, planned),
        )
        lender = before if before is not None and before.spec.lends_output else None
        return StageRunner(spec, self.plan.microbatches, held, lender)

    def _shared(self, planned: PlannedStage) -> frozenset[str]:
        """Names of what layers of other stages have, too, which run in another order."""
        own, found = self._names(planned), set[str]()
        for stage in self.plan.stages:
            common = own & self._names(stage) if stage is not planned else set[str]()
            if common and not self._in_order({stage.id, planned.id}, stage.gpu):
                found |= common
        return frozenset(found)

    def _names(self, planned: PlannedStage) -> set[str]:
        """Of parameters and buffers of a stage's layers, in the user's model."""
        rows = self.split.fqns[planned.first : planned.last + 1]
        return {name for fqns in rows for name in fqns.values()}

    def _in_order(self, stages: set[int], rank: int) -> bool:
        """Whether forwards of two stages come in the order of the model's loop, on one rank."""
        if not stages <= set(self.pattern.hosted[rank]):
            return False
        found = [
            (action.microbatch, action.stage)
            for action in self.pattern.actions(rank, 2 * self.pattern.microbatches)
            if action.kind is ActionKind.F and action.stage in stages
        ]
        return found == sorted(found)


def _runs(planned: PlannedStage) -> tuple[LayerRanges, LayerRanges]:
    """What the plan lets the stage compute again, and offload; counted from its first layer."""
    if planned.remat is None:
        return (), ()

    def within(runs: LayerRanges) -> LayerRanges:
        return tuple((first - planned.first, last - planned.first) for first, last in runs)

    return within(planned.remat.recompute), within(planned.remat.offload)


def _lends(plan: Plan, planned: PlannedStage) -> bool:
    """Whether autograd may save the stage's output, and the next stage sends it away (H1)."""
    if planned.id + 1 == len(plan.stages):
        return False
    behind, own = plan.stages[planned.id + 1], planned.remat
    stored = own is None or not (
        any(last == planned.last for _, last in own.recompute)
        or any(layer == planned.last for layer, _ in own.programs)
    )
    takes = behind.remat is not None and behind.remat.offload_input
    return stored and takes and behind.gpu == planned.gpu


def _way_to_host(plan: Plan, device: torch.device) -> CopyEngine:
    """One for all stages of the rank: their copies take turns."""
    host = plan.cluster.host
    return CopyEngine(device, duplex=host is not None and host.duplex == "full")


def _fed(split: SplitModel, planned: PlannedStage, feed: Feed) -> dict[int, Fed]:
    """What layers of the stage get from the data behind their boundary."""

    def chosen(indices: tuple[int, ...]) -> Fed:
        def fetch(microbatch: int) -> list[Tensor]:
            return feed.fed(microbatch, indices)

        return Fed(tuple(split.input_specs[index] for index in indices), fetch)

    layers = range(planned.first, planned.last + 1)
    return {n: chosen(split.fed_to(x)) for n, x in enumerate(layers) if split.fed_to(x)}
