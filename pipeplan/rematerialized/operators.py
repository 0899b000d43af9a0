"""`rematerialize` with the method `operators`: what is planned is single operators, not layers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

import torch
from torch import Tensor, nn

from pipeplan.errors import InfeasibleError, InputError
from pipeplan.livebytes import LiveBytes, storage_bytes
from pipeplan.operator_graph import OperatorGraph, StorageKind
from pipeplan.operators import UncapturableError, by_operators, capture
from pipeplan.rehearsal import check_agreement, measured
from pipeplan.remat.graph import Answer, Budget, GraphProblem, Option, solve
from pipeplan.remat.programs import judge, keep_all
from pipeplan.rematerialized.arguments import ALONE
from pipeplan.rematerialized.measured import Loss, Sample
from pipeplan.rematerialized.request import RematerializationRequest
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

    @property
    def method(self) -> str:
        """What found the program."""
        return self.option.method


def rematerialize_operators(
    request: RematerializationRequest[Module], brief: bool = False
) -> Module:
    """`request.module` in a form whose operators keep the budget, with an `OperatorPlan`.

    Args:
        request: of a module on one device.
        brief: whether a refusal need not name a budget that can be kept.

    Raises:
        UncapturableError: names what no graph of operators can hold, or that measuring it needs
            more memory than there is.
        InputError: if tensors are to wait on the host.
        InfeasibleError: if no program was found; names the least budget one was found for.
    """
    try:
        return _planned(request, brief)
    except torch.OutOfMemoryError as error:
        first = str(error).splitlines()[0]
        raise UncapturableError(
            f"measuring holds all that a plain step keeps, which is too much here: {first}"
        ) from None


def _planned(request: RematerializationRequest[Module], brief: bool) -> Module:
    module, taken, say = request.module, request.sample, request.say
    say("operators: capturing")
    captured = capture(module, taken.source)
    say(f"operators: measuring {len(captured.graph.operations)}")
    check_agreement(module, captured)
    captured = measured(module, captured, request.repeats)
    method = request.method if request.method in ALONE else "auto"
    asked = _Asked(captured.graph, request.limit, request.reserve + _beside(taken), 0, method)
    asked = replace(asked, around=_around_the_loss(request))
    say(f"operators: planning, at most {request.time_limit_s:g} s")
    answer = _plan(asked, request.time_limit_s)
    if answer.option is None:
        raise _refusal(asked, answer.proven, 0 if brief else request.time_limit_s)
    plan = OperatorPlan(asked.graph, answer.option, answer.proven, asked.beside)
    result = by_operators(module, captured, answer.option.program)
    object.__setattr__(result, "rematerialization", plan)
    return result


@dataclass(frozen=True)
class _Asked:
    """A graph and what is to be kept; bytes.

    Attributes:
        graph: timed.
        limit: of the device.
        beside: beside the judge's bytes.
        around: the most that the loss and its backward hold beside output and target.
        method: of `pipeplan.remat.graph.METHODS`.
    """

    graph: OperatorGraph
    limit: int
    beside: int
    around: int
    method: str

    def budget(self, limit: int) -> Budget:
        """What may be saved: beside it, the outputs and what the loss makes have room."""
        peak = limit - self.beside
        return Budget(peak, max(0, limit - self._beside_saved)) if self.around else Budget(peak)

    @property
    def _beside_saved(self) -> int:
        """What is there during the loss beside what is saved."""
        graph = self.graph
        inputs = [each for each in graph.storages if each.kind is StorageKind.INPUT]
        handed = [graph.storages[each] for each in graph.outputs]
        both = sum(each.bytes for each in (*inputs, *handed))
        return graph.static_bytes + both + self.around + self.beside

    @cached_property
    def keep_all(self) -> Option:
        """Every operation once."""
        program = keep_all(self.graph)
        return Option("keep-all", program, judge(self.graph, program))

    @property
    def high(self) -> int:
        """The least limit within which everything is kept."""
        found = self.keep_all.outcome
        behind = found.saved_bytes + self._beside_saved if self.around else 0
        return max(found.peak_bytes + self.beside, behind)


def _plan(asked: _Asked, seconds: float) -> Answer:
    graph, budget = asked.graph, asked.budget(asked.limit)
    if asked.keep_all.within(budget):
        return Answer(budget, asked.keep_all, graph.compute_ns, proven=True)
    (answer,) = solve(GraphProblem(graph), [budget], seconds, asked.method).answers
    return answer


def _refusal(asked: _Asked, proven: bool, seconds: float) -> InfeasibleError:
    """Names the least of a few larger budgets for which a program is found within `seconds`."""
    graph, limit = asked.graph, asked.limit
    static, least = graph.static_bytes + asked.beside, asked.high
    if seconds:
        low = max(static, limit)
        tried = [low + (least - low) * each // _TRIES for each in range(1, _TRIES + 1)]
        budgets = [asked.budget(each) for each in tried]
        found = solve(GraphProblem(graph), budgets, seconds, asked.method)
        pairs = zip(tried, found.answers, strict=True)
        least = min((at for at, each in pairs if each.option is not None), default=least)
    why = "there is no program that runs forwards at most twice" if proven else "found no program"
    error = InfeasibleError(
        f"rematerialize: budget: got {limit} bytes, {why} within it; need at least {least} bytes"
        f" ({static} of them all the time). Give more, or method 'layers',"
        " which runs whole layers again."
    )
    error.least_bytes = least
    return error


def _beside(taken: Sample) -> int:
    if taken.loss is None:
        return 0
    loss, target = taken.loss
    states = _states(loss)
    trained = [each for each in states if each.requires_grad]
    return storage_bytes([*states, target]) + storage_bytes(trained)


def _states(loss: Loss) -> list[Tensor]:
    return [*loss.parameters(), *loss.buffers()] if isinstance(loss, nn.Module) else []


def _around_the_loss(request: RematerializationRequest[Module]) -> int:
    """The most bytes that the loss and its backward hold beside output and target.

    The gradient of the output is among them.

    Raises:
        InputError: if the module returns no single tensor for the loss.
    """
    module, taken, touched = request.module, request.sample, request.touched
    if taken.loss is None:
        return 0
    loss, target = taken.loss
    with as_it_was(touched, request.place), gradients(touched[1:]):
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
