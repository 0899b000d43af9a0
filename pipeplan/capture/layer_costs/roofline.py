"""Times of a layer that nothing runs, by the roofline model (Williams et al. 2009).

    time(op) = launch + max(flops / (peak of its type * compute_share),
                            bytes / (bandwidth * bandwidth_share))

bytes are what the operation reads and writes if it reads every input once and writes every output
once. Operations that only give a tensor another shape cost nothing. Source: S. Williams, A.
Waterman, D. Patterson, Roofline (CACM 2009); the launch term and the shares are ours.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import flop_registry

from pipeplan.capture.layer_costs.layer_run import LayerPass, LayerRun
from pipeplan.devices import Device

_aten = torch.ops.aten


def estimate_times(run: LayerRun, device: Device) -> tuple[int, int, int]:
    """(forward, backward, forward without autograd) ns of one layer on `device`.

    The loss is included in the last one's.

    The parameters need gradient buffers already: adding to them is part of the backward.
    """
    one = LayerPass(run)
    light, forward, backward = Roofline(device), Roofline(device), Roofline(device)
    bare = LayerPass(run)
    with torch.no_grad(), light:
        bare.forward()
    with forward:
        one.forward()
    one.receive_gradients()
    with backward:
        one.backward()
    return round(forward.ns), round(backward.ns), round(light.ns)


def estimate_weights(run: LayerRun, device: Device) -> int:
    """Of the backward's ns, those for gradients of weights; the backward can be split."""
    if not run.trains:
        return 0
    one, roofline = LayerPass(run, split=True), Roofline(device)
    one.forward()
    one.receive_gradients()
    one.backward()
    with roofline:
        one.weights()
    return round(roofline.ns)


class Roofline(TorchDispatchMode):
    """While entered, adds up what the operations would take on `device`."""

    def __init__(self, device: Device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ns = 0.0
        self.flops = 0
        """Of all operations that have a formula (matrix products, convolutions, attention)."""
        self._device = device

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Runs one operation and adds its cost."""
        given = kwargs or {}
        result = func(*args, **given)
        inputs, outputs = _tensors((args, given)), _tensors(result)
        if not _moves_nothing(func, inputs, outputs):
            flops = _flops(func, args, given, result)
            self.flops += flops
            self.ns += self._cost(flops, _traffic(func, inputs, outputs), outputs)
        return result

    def _cost(self, flops: int, traffic: int, outputs: list[Tensor]) -> float:
        device = self._device
        dtype = str(outputs[0].dtype) if outputs else "float32"
        compute = flops / (device.peak_flops(dtype) * device.compute_share)
        memory = traffic / (device.bandwidth_bytes_per_s * device.bandwidth_share)
        return device.launch_ns + max(compute, memory) * 1e9


def _tensors(values: Any) -> list[Tensor]:
    """The distinct tensors in `values`."""
    found = {id(value): value for value in tree_iter(values) if isinstance(value, Tensor)}
    return list(found.values())


def _moves_nothing(func: Any, inputs: list[Tensor], outputs: list[Tensor]) -> bool:
    """Whether `func` only asks, makes a view, or a tensor whose content is left open."""
    if func.overloadpacket in _EMPTY:
        return True
    if func._schema.is_mutable:  # noqa: SLF001 - torch has no other way to ask
        return False
    held = {id(tensor.untyped_storage()) for tensor in inputs}
    return all(id(tensor.untyped_storage()) in held for tensor in outputs)


_EMPTY = {_aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty}
_GATHERS = {_aten.embedding, _aten.index, _aten.index_select, _aten.gather}
"""These read no more of their first input than they write."""


def _traffic(func: Any, inputs: list[Tensor], outputs: list[Tensor]) -> int:
    """Bytes read and written: every input once, every output once; expanded ones as stored."""
    written = sum(map(_stored, outputs))
    read = [_stored(tensor) for tensor in inputs]
    if func.overloadpacket in _GATHERS and read:
        read[0] = min(read[0], written)
    return written + sum(read)


def _stored(tensor: Tensor) -> int:
    return min(tensor.nbytes, tensor.untyped_storage().nbytes())


def _flops(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    packet = func.overloadpacket
    formula = flop_registry.get(_SAME_FLOPS.get(packet, packet))
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=result))


_flash = "_scaled_dot_product_flash_attention"
_SAME_FLOPS = {
    getattr(_aten, f"{_flash}_for_cpu{ending}"): getattr(_aten, f"{_flash}{ending}")
    for ending in ("", "_backward")
}
"""The processor's attention, for which torch has no formula of its own."""
