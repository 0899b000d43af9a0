"""What `rematerialize` is given: refused where nothing can be done with it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from pipeplan.capture.layer_costs.device_clock import device_of
from pipeplan.errors import InputError
from pipeplan.remat import METHODS, OFFLOADING
from pipeplan.rematerialized.measured import Loss, Sample
from pipeplan.units import parse_bytes

AUTO = "auto"
"""The method that plans operators and layers and takes the faster plan."""
OPERATORS = "operators"
"""The method that plans single operators, not layers."""
ALONE = ("hiremate", "join")
"""Those that plan them by one method alone."""
OF_OPERATORS = (OPERATORS, *ALONE)
LAYERS = "layers"
"""The best of the methods that plan layers."""


def size(value: str | int, what: str) -> int:
    """Bytes."""
    if isinstance(value, str):
        return parse_bytes(value, what)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise InputError(f"rematerialize: {what}: got {value!r}, need bytes or a size like 8GiB")
    return value


def sample_of(sample: Tensor | tuple[Tensor, Tensor], loss: Loss | None) -> Sample:
    """The parts of what the caller gave."""
    need = "a tensor, or (input, target) and a loss"
    parts: Sequence[object] = sample if isinstance(sample, tuple | list) else (sample,)
    tensors = [part for part in parts if isinstance(part, Tensor)]
    if len(tensors) != len(parts) or len(parts) != (1 if loss is None else 2):
        kinds = ", ".join(type(part).__name__ for part in parts)
        told = "no loss" if loss is None else "a loss"
        raise InputError(f"rematerialize: sample: got ({kinds}) and {told}, need {need}")
    if loss is None:
        return Sample(source=tensors[0], loss=None)
    # A leaf of its own: what measuring adds up there is not the caller's.
    target = tensors[1].detach().requires_grad_(tensors[1].requires_grad)
    return Sample(source=tensors[0], loss=(loss, target))


def check_module(module: nn.Module, source: Tensor) -> None:
    """Refuse what is no module in training, and a sample elsewhere."""
    if not isinstance(module, nn.Module):
        raise InputError(f"rematerialize: got a {type(module).__name__}, need an nn.Module")
    if not module.training:
        raise InputError(
            "rematerialize: got a module in eval mode, need training mode. Call train() first."
        )
    trained = any(parameter.requires_grad for parameter in module.parameters())
    if not trained and not source.requires_grad:
        raise InputError("rematerialize: got a module without gradients, need one to train")
    device = device_of(module).device
    if source.device != device:
        raise InputError(
            f"rematerialize: sample: got a tensor on {source.device}, need it on {device}, where"
            " the module is"
        )


def check_trainable(modules: Sequence[nn.Module], taken: Sample) -> None:
    """Refuse what cannot be measured with a backward and left as it was."""
    if not torch.is_grad_enabled() or torch.is_inference_mode_enabled():
        raise InputError(
            "rematerialize: got gradients switched off, need them on to measure backwards. Call it"
            " outside of no_grad and inference_mode."
        )
    named = [pair for each in modules for pair in each.named_parameters()]
    states = [*named, *(pair for each in modules for pair in each.named_buffers())]
    data = [("input", taken.source), *([("target", taken.loss[1])] if taken.loss else [])]
    made = next((name for name, tensor in [*data, *states] if tensor.is_inference()), None)
    if made is not None:
        raise InputError(
            f"rematerialize: {made}: got a tensor of inference mode, need one that can be trained"
            " with. Clone it outside of inference mode."
        )
    hooked = next((name for name, each in named if _hooked(each)), None)
    if hooked is not None:
        raise InputError(
            f"rematerialize: parameter {hooked}: has a hook behind its gradient, which would run"
            " while it is measured; need none. Call register_post_accumulate_grad_hook behind"
            " rematerialize."
        )


def _hooked(parameter: Tensor) -> bool:
    """Whether something runs behind its gradient, such as a step; torch has no public name."""
    return bool(parameter._post_accumulate_grad_hooks)  # noqa: SLF001


def check_counts(**counts: int) -> None:
    """Refuse what is no count."""
    for name, count in counts.items():
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise InputError(
                f"rematerialize: {name}: got {count!r}, need a whole number from 1 on"
            )


def check_seconds(value: float) -> None:
    """Refuse what is no time for a search."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 < value < float("inf"):
        raise InputError(
            f"rematerialize: time_limit_s: got {value!r}, need seconds, more than 0, such as 20"
        )


def check_way(method: str, offload: bool, host_bandwidth: str | None) -> None:
    """Refuse unknown methods, and what only means something with a way to the host."""
    if method not in (AUTO, *OF_OPERATORS, LAYERS) and method not in METHODS:
        known = ", ".join(METHODS)
        raise InputError(
            f"rematerialize: method: got {method!r}, need auto, {', '.join(OF_OPERATORS)},"
            f" layers or one of {known}"
        )
    if method in OF_OPERATORS and (offload or host_bandwidth is not None):
        raise InputError(
            f"rematerialize: offload: got it with method {method}, which recomputes alone. Give"
            " method 'auto' or offload=False."
        )
    if host_bandwidth is not None and not isinstance(host_bandwidth, str):
        raise InputError(
            f"rematerialize: host_bandwidth: got {host_bandwidth!r}, need a text like 12GB/s"
        )
    if offload:
        return
    if host_bandwidth is not None:
        raise InputError("rematerialize: got host_bandwidth alone, need offload=True with it")
    if method in OFFLOADING:
        raise InputError(f"rematerialize: got method {method} alone, need offload=True with it")
