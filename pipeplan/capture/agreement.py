"""Whether a model's layers train as the model does: outputs, gradients and buffers compared.

The model runs as the user wrote it, forward and backward; then its layers run as a pipeline runs
them, each cut off the graph of the one before. Micro-batches and seeds differ from pass to pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pipeplan.autograd_cut import Slot, enter_some
from pipeplan.capture.boundary_trace import alone, call_layer, check_loss, check_own
from pipeplan.capture.eager_modules.detection import uncompiled
from pipeplan.capture.eager_modules.eager_operation import seed_like_torch
from pipeplan.capture.layer_costs.device_clock import device_of
from pipeplan.capture.layer_costs.micro_batches import MicroBatches
from pipeplan.capture.partition.sequential import is_sequential
from pipeplan.capture.split import module_of
from pipeplan.capture.tensor_distance import (
    densified,
    largest_size,
    relative_difference,
    rounding_unit,
)
from pipeplan.capture.user_model.evaluation_mode import in_eval_mode
from pipeplan.capture.user_model.interception import OwnCall, intercepted_calls
from pipeplan.capture.user_model.loss_state import check_keeps_nothing, restored_loss
from pipeplan.capture.user_model.model_call import result_of, run_layers, told_of
from pipeplan.capture.user_model.module_attributes import restored
from pipeplan.chain import Agreement
from pipeplan.errors import InputError
from pipeplan.gradients import given, optimizer_of, without_gradients
from pipeplan.nested import MicroBatch, ModelArguments, layer_loss, returned, tensors_in
from pipeplan.precision import casting
from pipeplan.repeat import kept_generators, seed_all
from pipeplan.split_model import SplitModel
from pipeplan.task import Task

PASSES = 3
"""Micro-batches 0, 1, .. that are compared, with seeds 0, 1, .."""


def agreement(model: SplitModel, task: Task) -> Agreement:
    """How far the layers of `model` train as `task.model` does.

    The model is left as it was: parameters, gradients, buffers, attributes, random states; so is
    the loss, module or not.

    Args:
        model: what `task` was split into.
        task: its model is on the device where it is trained; its micro-batches are brought there.

    Raises:
        InputError: if they differ by more than rounding, a layer trains a parameter that is none
            of its own, a forward registers a buffer, or the optimizer would move a parameter that
            no gradient reaches in the model; if model, loss or a backward fails; if layers
            evaluate something else than the model.
    """
    whole = module_of(task)
    task = device_of(task.model).bring(task)
    parts = [whole, *([task.loss] if isinstance(task.loss, nn.Module) else [])]
    worst = unit = 0.0
    furthest = 0
    reached: set[str] = set()
    zeros: set[str] = set()
    with kept_generators(), uncompiled(whole), without_gradients(parts):
        batches = list(_batches_of(task, PASSES))
        for number, batch in enumerate(batches):
            there = dict(whole.named_buffers()).keys()
            with restored([whole]), restored_loss(task.loss):
                expected = _whole(whole, model, task, batch, number)
            _check_no_new(whole, sorted(expected.buffers.keys() - there))
            with restored([whole]), restored_loss(task.loss):
                got = _layers(whole, model, task, batch, number)
            unit = rounding_unit([*whole.parameters(), *expected.outputs, expected.loss], model)
            relative = _compared(whole, expected, got, number, unit)
            worst, furthest = max((worst, furthest), (relative, number))
            reached.update(expected.gradients)
            zeros.update(got.gradients)
            del expected, got  # as many bytes as the model has, twice
        repeats = (
            not worst
            or model.compile is not None
            or _repeats(whole, model, task, batches[furthest], furthest)
        )
        _check_evaluation(whole, model, batches[0], own_loss=task.loss is None)
        _check_unmoved(whole, task, sorted(zeros - reached))
    tolerance = unit**0.5 if model.compile else None
    return Agreement(
        microbatches=len(batches),
        largest_relative_difference=worst,
        tolerance=tolerance,
        repeats=repeats,
    )


def check_output(
    model: SplitModel, whole: nn.Module, arguments: ModelArguments, ran: Callable[[], None]
) -> None:
    """Refuse layers whose output is not that of `whole`; nothing is kept for a backward.

    Args:
        model: what `whole` was split into.
        whole: in training mode; left as it was.
        arguments: of one call.
        ran: called behind the run of `whole`, before its buffers are put back.

    Raises:
        InputError: if the outputs differ by more than rounding.
    """
    with torch.no_grad(), kept_generators():
        with restored([whole]):
            seed_all(0)
            outputs = tensors_in(result_of(whole, arguments.mapped(torch.clone)))
            ran()
        with restored([whole]):
            seed_all(0)
            made = tensors_in(run_layers(model, arguments.mapped(torch.clone).tensors))
    for expected, got in zip(outputs, made, strict=True):
        unit = torch.finfo(expected.dtype).eps if expected.is_floating_point() else 0.0
        _relative("the output", expected, got, 0.0, unit, whole, 0)


def _batches_of(task: Task, most: int) -> Iterator[MicroBatch]:
    """The first micro-batches, all alike: a data set may have fewer than `most`, not none."""
    alike = MicroBatches(task)
    for number in range(most):
        try:
            batch = alike.given(number)
        except InputError:
            return
        alike.check(number, batch)
        yield batch


@dataclass(frozen=True, slots=True)
class _Trained:
    """What one micro-batch gave."""

    outputs: Sequence[Tensor]
    loss: Tensor
    gradients: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]

    @classmethod
    def of(cls, model: nn.Module, outputs: Sequence[Tensor], loss: Tensor) -> _Trained:
        """Takes the gradients out of `model`."""
        gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        for parameter in model.parameters():
            parameter.grad = None
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        return cls([each.detach() for each in outputs], loss.detach(), gradients, buffers)


def _whole(
    whole: nn.Module,
    model: SplitModel,
    task: Task,
    batch: MicroBatch,
    seed: int,
) -> _Trained:
    """The user's own model; in a list of layers, nothing but one after the other."""
    what = f"model {type(whole).__name__}"
    batch = batch.mapped(torch.clone)
    drawing = {name: whole.get_submodule(name) for name in model.drawing}
    with intercepted_calls(drawing, _seeded):
        seed_all(seed)
        with casting(model.autocast, batch.inputs[0].device):
            is_list = isinstance(whole, nn.ModuleList)
            with told_of(f"{what}: its forward", seed):
                result: Any = (
                    run_layers(model, batch.inputs)
                    if is_list
                    else result_of(whole, batch.arguments)
                )
            outputs, structure = returned(result, own_loss=task.loss is None)
            given = result if structure else outputs[0]
            with told_of("loss", seed):
                if task.loss and not seed:
                    check_keeps_nothing(task.loss, given, batch.target)
                loss = check_loss(task.loss(given, batch.target) if task.loss else given)
        with told_of(f"{what}: its backward", seed):
            loss.backward()
    return _Trained.of(whole, outputs, loss)


def _repeats(
    whole: nn.Module, model: SplitModel, task: Task, batch: MicroBatch, seed: int
) -> bool:
    """Whether the model gives the same bits twice: kernels of a GPU may add up in any order."""

    def ran() -> _Trained:
        with restored([whole]), restored_loss(task.loss):
            return _whole(whole, model, task, batch, seed)

    pairs = _pairs(ran(), ran(), 0.0)
    return all(torch.equal(densified(one), densified(two)) for _, one, two, _ in pairs)


def _layers(
    whole: nn.Module,
    model: SplitModel,
    task: Task,
    batch: MicroBatch,
    seed: int,
) -> _Trained:
    """Its layers, each with a graph of its own, as stages of one layer would run them."""
    batch = batch.mapped(torch.clone)
    seed_all(seed)
    values = model.entry(batch.inputs)
    slots, made = [], []
    for index, (name, layer) in enumerate(zip(model.names, model.layers, strict=True)):
        slot = Slot()
        flags = [spec.differentiable and index > 0 for spec in model.boundaries[index]]
        fed = (batch.inputs[place].clone() for place in model.fed_to(index))
        outputs = call_layer(name, layer, (*enter_some(slot, values, flags), *fed), model.autocast)
        check_own(f"layer {name!r}", layer, outputs)
        slots.append(slot)
        made.append(outputs)
        values = tuple(output.detach() for output in outputs)
    with casting(model.autocast, values[0].device):
        judge = layer_loss(task.loss, model.returned)
        with told_of("loss", seed):
            loss = check_loss(judge(alone(made[-1]), batch.target))
    _backward(model, loss, slots, made, seed)
    return _Trained.of(whole, values, loss)


def _backward(
    model: SplitModel,
    loss: Tensor,
    slots: Sequence[Slot],
    made: Sequence[tuple[Tensor, ...]],
    number: int,
) -> None:
    """Layer by layer from the last one; `slots` and `made` are entries and outputs by layer."""
    with told_of(f"layer {model.names[-1]!r}: its backward", number):
        loss.backward()
    for index in range(len(made) - 1, 0, -1):
        pairs = zip(made[index - 1], model.boundaries[index], strict=True)
        roots = [output for output, spec in pairs if spec.differentiable]
        arrived = slots[index].take() or [torch.zeros_like(root) for root in roots]
        if roots:
            with told_of(f"layer {model.names[index - 1]!r}: its backward", number):
                torch.autograd.backward(roots, arrived)


def _check_evaluation(
    whole: nn.Module, model: SplitModel, batch: MicroBatch, *, own_loss: bool
) -> None:
    """Refuse layers that compute something else in eval mode than the model.

    Where one of both computes nothing then, `evaluate` says so when it is asked. Compiled layers
    are not run: they would be compiled once more.

    Raises:
        InputError: if the outputs differ by more than rounding.
    """
    if model.compile or isinstance(whole, nn.ModuleList):
        return
    drawing = {name: whole.get_submodule(name) for name in model.drawing}
    device = batch.inputs[0].device
    try:
        with _evaluating(whole, model, device), intercepted_calls(drawing, _seeded):
            arguments = batch.mapped(torch.clone).arguments  # a model may write into its input
            expected = returned(result_of(whole, arguments), own_loss=own_loss)[0]
        with _evaluating(nn.ModuleList(model.layers), model, device):
            got = tensors_in(run_layers(model, batch.mapped(torch.clone).inputs))
    except Exception:  # the user's own, or a graph that can be cut for training alone
        return
    unit = rounding_unit([*whole.parameters(), *expected], model)
    for number, pair in enumerate(zip(expected, got, strict=True)):
        _relative(f"output {number} in eval mode", *pair, 0.0, unit, whole, 0)


@contextmanager
def _evaluating(part: nn.Module, model: SplitModel, device: torch.device) -> Iterator[None]:
    with torch.no_grad(), in_eval_mode(part), casting(model.autocast, device):
        seed_all(0)
        yield


def _check_unmoved(whole: nn.Module, task: Task, names: Sequence[str]) -> None:
    """Refuse an optimizer that moves parameters which get gradients in the layers alone.

    These are zeros: what a later layer detaches comes back over the boundary as zeros, and nobody
    there can tell. A plain loop leaves such parameters as they are.

    Raises:
        InputError: if there is one.
    """
    if not names:
        return
    parameters = [whole.get_parameter(name) for name in names]
    stepped = [nn.Parameter(parameter.detach().clone()) for parameter in parameters]
    optimizer = optimizer_of(task.optimizer, dict(zip(parameters, stepped, strict=True)))
    with given(stepped, [torch.zeros_like(each) for each in stepped]):
        optimizer.step()
    for name, parameter, moved in zip(names, parameters, stepped, strict=True):
        if not torch.equal(parameter, moved):
            raise InputError(
                f"task: parameter {name!r}: no gradient reaches it in the model, so a loop leaves"
                " it as it is, but what a later layer detaches comes back to its layer as zeros,"
                f" by which {type(optimizer).__name__} would move it (weight decay). Freeze it"
                " (requires_grad_(False)), or detach in the layer that uses it."
            )


def _seeded(_: str, real: OwnCall, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
    seed_like_torch()
    return real(*given, **named)


def _check_no_new(whole: nn.Module, names: Sequence[str]) -> None:
    """Refuse buffers that come into being in a forward: a checkpoint has no place for them."""
    if names:
        raise InputError(
            f"task: model {type(whole).__name__}: buffer {names[0]!r} has no tensor before the"
            " first forward, need one from the beginning on, of the same shape: a run that goes on"
            " from a checkpoint could not put it there. Register zeros, and a flag that they are"
            " to be filled as a second buffer."
        )


def _compared(
    whole: nn.Module, expected: _Trained, got: _Trained, number: int, unit: float
) -> float:
    """The largest difference, relative to the largest number of its tensor; 0 if there is none.

    Of gradients that are no more than rounding, relative to the largest gradient.

    Raises:
        InputError: if it is more than rounding explains.
    """
    steepest = max(map(largest_size, expected.gradients.values()), default=0.0)
    pairs = _pairs(expected, got, steepest)
    return max((_relative(*pair, unit, whole, number) for pair in pairs), default=0.0)


def _relative(
    what: str, one: Tensor, other: Tensor, scale: float, unit: float, whole: nn.Module, number: int
) -> float:
    """How far `other` is from `one`, as `relative_difference` says.

    Raises:
        InputError: if it is more than rounding explains.
    """
    relative = relative_difference(one, other, unit, scale)
    if relative > unit**0.5:
        raise InputError(
            f"task: model {type(whole).__name__}: its layers do not train as the model does:"
            f" {what} differs by {relative:.2%} on data({number}), need the same but for"
            f" rounding. {_advice(whole)}"
        )
    return relative


def _advice(whole: nn.Module) -> str:
    """What may be the matter with a model that differs from its layers, and what to do."""
    if is_sequential(whole):
        return (
            "A layer may draw from a generator of its own (let it draw from torch's, without"
            " generator=), or write into a tensor that is a plain attribute (register_buffer it),"
            " or keep state where nobody finds it, as in a global variable."
        )
    return (
        "It may use random numbers other than torch's, or state outside of parameters and buffers"
        " (register_buffer a tensor that it writes into), or see that it is exported. Put what"
        " does so into an nn.Module of its own, or give the model's layers as a Python list."
    )


def _pairs(
    expected: _Trained, got: _Trained, steepest: float
) -> Iterator[tuple[str, Tensor, Tensor, float]]:
    """What is compared, both tensors, and a size beside which a difference may be rounding."""
    for number, (one, other) in enumerate(zip(expected.outputs, got.outputs, strict=True)):
        name = f"output {number}" if len(expected.outputs) > 1 else "the output"
        yield name, one, other, 0.0
    yield "the loss", expected.loss, got.loss, 0.0
    for name in expected.gradients.keys() | got.gradients.keys():
        want, found = expected.gradients.get(name), got.gradients.get(name)
        want = torch.zeros_like(found) if want is None and found is not None else want
        found = torch.zeros_like(want) if found is None and want is not None else found
        assert want is not None
        assert found is not None
        yield f"the gradient of {name!r}", want, found, steepest
    for name, buffer in expected.buffers.items():
        yield f"buffer {name!r}", buffer, got.buffers[name], 0.0
