"""Sums of gradients that are wider than their weights, and what is stepped in place of weights.

Gradients of weights in 16 bits may add up in 32 (`Task.accumulate`), and an optimizer may step
copies in 32 bits, out of which the weights are cast anew (`Task.master_weights`). torch wants the
gradient of a leaf in the leaf's own type, so a wider sum lies beside it: a hook adds each
micro-batch's gradient and lets it go. `capture` measures with the sums and copies that `runtime`
trains with, hence this lies below both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from pipeplan import taskref
from pipeplan.errors import InputError
from pipeplan.precision import HALVES

WIDE = torch.float32
MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]
"""What a task gives: parameters -> their optimizer."""
MakeSchedule = Callable[[Optimizer], LRScheduler]
"""What a task may give: an optimizer -> the schedule of its learning rates."""


def check_updates(accumulate: object, master_weights: object) -> None:
    """Refuse what gradients cannot add up in.

    Raises:
        InputError: if `accumulate` is neither None nor float32, or `master_weights` no bool.
    """
    if accumulate is not None and accumulate is not WIDE:
        raise InputError(
            f"task: accumulate: got {accumulate!r}, need torch.float32, or None for sums of"
            " gradients in the types of their weights"
        )
    if not isinstance(master_weights, bool):
        raise InputError(f"task: master_weights: got {master_weights!r}, need True or False")


def check_recorded(where: str) -> None:
    """Refuse to train, or to look how a model trains, where autograd records nothing.

    Raises:
        InputError: inside of `torch.no_grad()` or `torch.inference_mode()`.
    """
    if torch.is_inference_mode_enabled() or not torch.is_grad_enabled():
        around = "inference_mode" if torch.is_inference_mode_enabled() else "no_grad"
        raise InputError(
            f"{where}: got a call inside of torch.{around}(), need one outside: there are no"
            " gradients in it, and nothing would be trained"
        )


def sum_dtype(parameter: Tensor, accumulate: torch.dtype | None) -> torch.dtype:
    """The type in which gradients of `parameter` add up."""
    return accumulate if accumulate and parameter.dtype in HALVES else parameter.dtype


class Adder:
    """Adds the gradient of each backward to a sum in another type."""

    __slots__ = ("total",)

    def __init__(self, total: Tensor) -> None:
        self.total = total

    def __call__(self, leaf: Tensor) -> None:
        """Takes the gradient away from `leaf`; a hook before this one may have done so."""
        if leaf.grad is not None:
            with torch.no_grad():
                self.total.add_(leaf.grad)
            leaf.grad = None


def give_sum(leaf: Tensor, total: Tensor) -> None:
    """Let gradients of `leaf` add up in `total`, which has its shape."""
    if total.dtype == leaf.dtype:
        leaf.grad = total
    else:
        leaf.register_post_accumulate_grad_hook(Adder(total))


def sum_of(leaf: Tensor) -> Tensor | None:
    """Where gradients of `leaf` add up; None if they do not."""
    adder = next((hook for _, hook in _adders(leaf)), None)
    return adder.total if adder else leaf.grad


def has_hooks(leaf: Tensor) -> bool:
    """Whether anything but a sum hears of gradients of `leaf`."""
    on_sum = leaf._post_accumulate_grad_hooks or {}  # noqa: SLF001 - torch has no public name
    return bool(leaf._backward_hooks) or len(on_sum) > len(_adders(leaf))  # noqa: SLF001


def take_sum(leaf: Tensor) -> Tensor | None:
    """The same, and gradients of `leaf` do not add up there any more."""
    total = sum_of(leaf)
    for name, _ in _adders(leaf):
        del leaf._post_accumulate_grad_hooks[name]  # noqa: SLF001
    leaf.grad = None
    return total


def _adders(leaf: Tensor) -> list[tuple[int, Adder]]:
    hooks = leaf._post_accumulate_grad_hooks or {}  # noqa: SLF001 - torch has no public name
    return [(name, hook) for name, hook in hooks.items() if isinstance(hook, Adder)]


def stepped(parameters: Sequence[nn.Parameter], *, master_weights: bool) -> list[nn.Parameter]:
    """What an optimizer steps for `parameters`: themselves, or wide copies of narrow ones."""
    return [
        _master(parameter) if master_weights and parameter.dtype in HALVES else parameter
        for parameter in parameters
    ]


def _master(parameter: nn.Parameter) -> nn.Parameter:
    """With the attributes of the user's parameter, which optimizers may look at."""
    master = nn.Parameter(parameter.detach().to(WIDE))
    vars(master).update(vars(parameter))
    return master


def optimizer_of(
    make: MakeOptimizer, parameters: Mapping[nn.Parameter, nn.Parameter]
) -> Optimizer:
    """The user's optimizer of what is stepped for `parameters`, by user's parameter.

    Users tell parameters apart by identity (those of a set, names in a dictionary), so they are
    given their own; these hold what is stepped meanwhile, as some optimizers make their state at
    once. Then what is stepped takes the places of the parameters.

    Raises:
        InputError: if the optimizer holds parameters that it was not given, or keeps parameters
            where they cannot be replaced.
    """
    others = {known: each for known, each in parameters.items() if known is not each}
    with holding(others):
        optimizer = make(list(parameters))
        _check_given(optimizer, parameters)
    for group in optimizer.param_groups if others else ():
        group["params"][:] = [others.get(each, each) for each in group["params"]]
    for known, each in others.items():
        if known in optimizer.state:
            optimizer.state[each] = optimizer.state.pop(known)
    if others and any(found in others for found in _tensors_within(vars(optimizer))):
        raise InputError(
            f"task: optimizer: {type(optimizer).__name__} keeps parameters outside of param_groups"
            " and state, where copies that are stepped in their place cannot replace them (master"
            " weights, states on the host, tied='synchronize'). Let step() read"
            " self.param_groups."
        )
    return optimizer


def own_tensors(optimizer: Optimizer) -> None:
    """Give its groups tensors of their own: one rate may be in many optimizers, for schedules."""
    for group in optimizer.param_groups:
        tensors = {name: value for name, value in group.items() if isinstance(value, Tensor)}
        group.update({name: value.clone() for name, value in tensors.items()})


def schedule_of(make: MakeSchedule, optimizer: Optimizer) -> LRScheduler:
    """The user's learning-rate schedule of one optimizer.

    Some change what the optimizer keeps: a one-cycle schedule gives SGD a momentum.

    Raises:
        InputError: if it cannot be made, or depends on more than the number of updates.
    """
    try:
        schedule = make(optimizer)
    except Exception as error:
        raise InputError(
            f"task: scheduler: failed on one layer's optimizer: {taskref.error_line(error)}. Give"
            " a function: optimizer -> a schedule of torch.optim.lr_scheduler"
        ) from error
    if isinstance(schedule, ReduceLROnPlateau) or not isinstance(schedule, LRScheduler):
        raise InputError(
            f"task: scheduler: got {type(schedule).__name__}, need a schedule of"
            " torch.optim.lr_scheduler that depends on the number of updates alone"
        )
    return schedule


def _check_given(optimizer: Optimizer, parameters: Mapping[nn.Parameter, nn.Parameter]) -> None:
    """Refuse an optimizer of other parameters: several would step the same one, on old values.

    Raises:
        InputError: if a group holds a parameter that is not among `parameters`.
    """
    for number, group in enumerate(optimizer.param_groups):
        for held in group["params"]:
            if held not in parameters:
                raise InputError(
                    f"task: optimizer: got {type(optimizer).__name__} whose param_groups[{number}]"
                    f" holds a parameter of shape {tuple(held.shape)} that it was not given, need"
                    " none but those it is called with: it is called once per layer, and the other"
                    " layers have optimizers of their own. Make it of its argument: lambda"
                    f" parameters: {type(optimizer).__name__}(parameters, ..)."
                )


@contextmanager
def holding(others: Mapping[nn.Parameter, nn.Parameter]) -> Iterator[None]:
    """Lets parameters hold the values, in their type and place, of what is stepped for them.

    One on `meta`, which has no values, stays there: it can hold nothing else.
    """
    kept = [(known, known.data) for known in others]
    try:
        for known, each in others.items():
            known.data = _meta_like(each) if known.is_meta else each.data
        yield
    finally:
        for known, data in kept:
            known.data = data


def _meta_like(tensor: Tensor) -> Tensor:
    shape = tensor.size(), tensor.stride()
    return torch.empty_strided(*shape, dtype=tensor.dtype, device="meta")


def _tensors_within(value: object) -> Iterator[Tensor]:
    """Those in nested containers, also as keys, and in optimizers that one is made of."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Optimizer):
        yield from _tensors_within(vars(value))
    elif isinstance(value, Mapping):
        for pair in value.items():
            yield from _tensors_within(pair)
    elif isinstance(value, (list, tuple, set, frozenset)):
        for each in value:
            yield from _tensors_within(each)


@contextmanager
def without_gradients(parts: Iterable[nn.Module]) -> Iterator[None]:
    """Takes gradients away inside, and puts them back."""
    parameters = [parameter for part in parts for parameter in part.parameters()]
    kept = [(parameter, parameter.grad) for parameter in parameters]
    try:
        for parameter, _ in kept:
            parameter.grad = None
        yield
    finally:
        for parameter, gradient in kept:
            parameter.grad = gradient


def cast_back(parameters: Sequence[Tensor], masters: Sequence[Tensor]) -> None:
    """Let `parameters` hold what was stepped for them, each in its own type."""
    for parameter, master in zip(parameters, masters, strict=True):
        if parameter.dtype != master.dtype:
            parameter.copy_(master)


@contextmanager
def given(parameters: Sequence[nn.Parameter], sums: Sequence[Tensor | None]) -> Iterator[None]:
    """Around one optimizer's step: its parameters have their gradients, cast to their types.

    Casts last no longer than the block. A sum is None where no gradient has come: the optimizer
    leaves such a parameter as it is, as in a loop that begins each step without gradients.
    """
    before = [parameter.grad for parameter in parameters]
    for parameter, total in zip(parameters, sums, strict=True):
        parameter.grad = None if total is None else total.to(parameter.dtype)
    try:
        yield
    finally:
        for parameter, kept in zip(parameters, before, strict=True):
            parameter.grad = kept
