"""`rematerialize`: a module within a budget of live bytes; which way it is planned."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch import Tensor, nn

from pipeplan.capture.layer_costs.device_clock import device_of
from pipeplan.errors import InputError
from pipeplan.rematerialized import arguments
from pipeplan.rematerialized.choice import rematerialize_fastest
from pipeplan.rematerialized.layers import rematerialize_layers
from pipeplan.rematerialized.measured import Loss
from pipeplan.rematerialized.operators import rematerialize_operators
from pipeplan.rematerialized.request import RematerializationRequest

Module = TypeVar("Module", bound=nn.Module)


def _silent(_: str) -> None:
    pass


def rematerialize(
    module: Module,
    sample: Tensor | tuple[Tensor, Tensor],
    budget: str | int,
    *,
    loss: Loss | None = None,
    offload: bool = False,
    host_bandwidth: str | None = None,
    reserve: str | int = 0,
    method: str = "auto",
    slots: int = 500,
    max_layers: int | None = None,
    repeats: int = 5,
    time_limit_s: float = 20.0,
    progress: Callable[[str], None] | None = None,
) -> Module:
    """`module` in a form that keeps a budget of live bytes in training, bit for bit the same.

    The result is called like `module` and shares its parameters, buffers and submodules. In its
    forward and backward some operators or layers run twice and, with `offload`, some tensors wait
    on the host; outputs, gradients, running statistics and the stream of random numbers (of
    torch's default generators) are the plain module's. Without gradients or in eval mode it is
    the plain module.

    Live bytes are those of weights, buffers, gradients, the input, the target, and all that
    layers and autograd hold. `module` is measured with `sample` and left as it was. The plan can
    be read from `rematerialization` of the result. Method `auto` plans single operators and whole
    layers, times a few steps of each and takes the faster one; `rematerialization_choice` of the
    result says what it took and, where there is no plan of operators, why.

    Args:
        module: in training mode, takes one tensor and returns one.
        sample: an input like those to come; or (input, target), with `loss`.
        budget: bytes, or a size such as `8GiB`.
        loss: (output, target) -> scalar; counted as the layer behind the module. Without it, what
            the loss holds is not counted. If it is a module, it is left as it was, too.
        offload: whether tensors may wait on the host; plans of layers alone do that.
        host_bandwidth: of the way there, such as `12GB/s`; measured where it is not given.
        reserve: bytes beyond those above that are taken all the time, such as optimizer states.
        method: `auto`; `operators` or `layers`, the best of all plans of these; `hiremate` or
            `join`, which plan operators; or a name in `pipeplan.remat.METHODS`, which plans
            layers. Plans of layers leave a `Rematerialization` in `rematerialization`, of
            operators an `OperatorPlan`.
        slots: memory units of the dynamic programs for layers.
        max_layers: merges layers until there are no more than these.
        repeats: times each layer and operator is timed, and a plan rehearsed.
        time_limit_s: seconds that the search for a program of operators may take.
        progress: gets a line of text when a part of the work begins.

    Raises:
        InputError: if the module can neither be cut into layers nor captured, a layer works in
            place on its input, the sample does not fit, or an argument is out of range.
        InfeasibleError: if no plan keeps the budget; names the smallest budget known to do.
    """
    arguments.check_counts(slots=slots, repeats=repeats)
    if max_layers is not None:
        arguments.check_counts(max_layers=max_layers)
    arguments.check_way(method, offload, host_bandwidth)
    arguments.check_seconds(time_limit_s)
    if method in arguments.OF_OPERATORS and max_layers is not None:
        raise InputError(
            f"rematerialize: max_layers: got it with method {method}, which has no layers. Leave"
            " it out."
        )
    limit = arguments.size(budget, "budget")
    extra = arguments.size(reserve, "reserve")
    taken = arguments.sample_of(sample, loss)
    arguments.check_module(module, taken.source)
    request = RematerializationRequest(
        module=module,
        sample=taken,
        place=device_of(module),
        limit=limit,
        reserve=extra,
        offload=offload,
        host_bandwidth=host_bandwidth,
        method="auto" if method == arguments.LAYERS else method,
        slots=slots,
        max_layers=max_layers,
        repeats=repeats,
        time_limit_s=time_limit_s,
        say=progress or _silent,
    )
    arguments.check_trainable(request.touched, taken)
    if method in arguments.OF_OPERATORS:
        return rematerialize_operators(request)
    if method == arguments.AUTO:
        return rematerialize_fastest(request)
    return rematerialize_layers(request)
