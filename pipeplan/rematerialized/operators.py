"""`rematerialize` with the method `operators`: what is planned is single operators, not layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn

from pipeplan.capture.layer_costs.device_clock import ModelDevice
from pipeplan.errors import InfeasibleError, InputError
from pipeplan.livebytes import LiveBytes, storage_bytes
from pipeplan.operator_graph import OperatorGraph, StorageKind
from pipeplan.operators import by_operators, capture, check_agreement, measured
from pipeplan.remat.graph import Answer, Budget, GraphProblem, Option, solve
from pipeplan.remat.programs import judge, keep_all
from pipeplan.rematerialized.measured import Loss, Sample
from pipeplan.rematerialized.untouched import as_it_was, gradients

Module = TypeVar("Module", bound=nn.Module)
_TRIES = 8
"""Larger budgets that are tried where none is found for the one that was asked."""


@dataclass(frozen=True)
class OperatorPlan:
    """What a module keeps its budget with; times in ns, sizes in bytes.

    Attributes:
        graph: the operators of the module's forward and backward.
        option: the program, the method that found it, and what the judge says of it.
        proven: whether no program of the method's class is faster.
        beside_bytes: what is counted beside the judge's bytes: `reserve`, the target, the loss's
            own parameters.
    """

    graph: OperatorGraph
    option: Option
    proven: bool
    beside_bytes: int

    @property
    def peak_bytes(self) -> int:
        """The most bytes."""
        return self.option.outcome.peak_bytes + self.beside_bytes


def rematerialize_operators(
    module: Module, taken: Sample, limit: int, reserve: int, repeats: int, place: ModelDevice
) -> Module:
    """`module` in a form whose operators keep `limit`, with an `OperatorPlan`.

    Args:
        module: in training mode.
        taken: the sample.
        limit: bytes.
        reserve: bytes that are taken all the time.
        repeats: times each operator is timed.
        place: where the module is.

    Raises:
        UncapturableError: names what no graph of operators can hold.
        InfeasibleError: if no program was found; names the least budget one was found for.
    """
    captured = capture(module, taken.source)
    check_agreement(module, captured)
    captured = measured(module, captured, repeats)
    graph = captured.graph
    beside = reserve + _beside(taken)
    around = _around_the_loss(module, taken, place)
    budget = _budget(graph, limit - beside, around)
    answer = _plan(graph, budget)
    if answer.option is None:
        raise InfeasibleError(_refusal(graph, limit, beside, around, answer.proven))
    plan = OperatorPlan(graph, answer.option, answer.proven, beside)
    result = by_operators(module, captured, answer.option.program)
    object.__setattr__(result, "rematerialization", plan)
    return result


def _budget(graph: OperatorGraph, peak: int, around: int) -> Budget:
    """What may be saved: beside it, the outputs and what the loss makes have room."""
    given = sum(graph.storages[each].bytes for each in _inputs(graph))
    outputs = sum(graph.storages[each].bytes for each in graph.outputs)
    saved = peak - graph.static_bytes - given - outputs - around
    return Budget(peak, max(0, saved)) if around else Budget(peak)


def _inputs(graph: OperatorGraph) -> list[int]:
    return [index for index, each in enumerate(graph.storages) if each.kind is StorageKind.INPUT]


def _plan(graph: OperatorGraph, budget: Budget) -> Answer:
    everything = keep_all(graph)
    option = Option("keep-all", everything, judge(graph, everything))
    if option.within(budget):
        return Answer(budget, option, graph.compute_ns, proven=True)
    (answer,) = solve(GraphProblem(graph), [budget]).answers
    return answer


def _refusal(graph: OperatorGraph, limit: int, beside: int, around: int, proven: bool) -> str:
    high = judge(graph, keep_all(graph)).peak_bytes
    low = min(high, limit - beside)
    tried = [low + (high - low) * each // _TRIES for each in range(1, _TRIES + 1)]
    answers = solve(GraphProblem(graph), [_budget(graph, each, around) for each in tried]).answers
    found = [each.option.outcome for each in answers if each.option is not None]
    least = min((each.peak_bytes for each in found), default=high) + beside
    why = "there is no program that runs forwards at most twice" if proven else "found no program"
    return (
        f"rematerialize: budget: got {limit} bytes, {why} within it; need at least {least} bytes"
        f" ({graph.static_bytes + beside} of them all the time). Give more, or method 'auto',"
        " which runs whole layers again."
    )


def _beside(taken: Sample) -> int:
    if taken.loss is None:
        return 0
    loss, target = taken.loss
    states = _states(loss)
    trained = [each for each in states if each.requires_grad]
    return storage_bytes([*states, target]) + storage_bytes(trained)


def _states(loss: Loss) -> list[Tensor]:
    return [*loss.parameters(), *loss.buffers()] if isinstance(loss, nn.Module) else []


def _around_the_loss(module: nn.Module, taken: Sample, place: ModelDevice) -> int:
    """The most bytes that the loss and its backward hold beside output and target.

    The gradient of the output is among them.

    Raises:
        InputError: if the module returns no single tensor for the loss.
    """
    if taken.loss is None:
        return 0
    loss, target = taken.loss
    touched = [module, *([loss] if isinstance(loss, nn.Module) else [])]
    with as_it_was(touched, place), gradients(touched[1:]):
        with torch.no_grad():
            output = module(taken.source)
        if not isinstance(output, Tensor):
            raise InputError(
                f"rematerialize: loss: got an output of type {type(output).__name__}, need a"
                " tensor. Give the sample without a loss."
            )
        source = output.detach().requires_grad_()
        states = _states(loss)
        made = [each.grad for each in states if each.grad is not None]
        live = LiveBytes([source, target, *states, *made])
        before = live.live
        with live:
            loss(source, target).backward()
        return live.peak - before
