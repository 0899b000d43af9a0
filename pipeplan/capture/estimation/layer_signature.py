"""Fingerprint of a layer's forward, by which repeated layers are known to cost the same.

Models repeat blocks. Two layers whose forward runs the same operations on tensors of the same
shapes, with the same data flow, that leave the same graph and keep the same bytes, have the same
backward, bytes and estimated times; so one of them needs to be measured.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from pipeplan.capture.boundary_trace import call_layer
from pipeplan.capture.layer_costs.layer_run import LayerRun
from pipeplan.livebytes import LiveBytes

LayerSignature = tuple[object, ...]


def layer_signature(run: LayerRun) -> tuple[LayerSignature, tuple[Tensor, ...]]:
    """The fingerprint of a layer (without its loss), and what the layer returned.

    Raises:
        InputError: if the layer fails.
    """
    pairs = zip(run.inputs, run.differentiable, strict=True)
    # Clones of leaves are no leaves, so the layer may work in place.
    inputs = (value.detach().requires_grad_(flag).clone() for value, flag in pairs)
    values = (*inputs, *(value.clone() for value in run.fed))
    states = [*run.layer.parameters(), *run.layer.buffers()]
    live = LiveBytes([*states, *values])
    before = live.live
    with live, _Recorder() as recorder:
        begin = [recorder.describe(tensor) for tensor in (*values, *states)]
        outputs = call_layer(run.name, run.layer, values, run.autocast)
        end = [recorder.describe(tensor) for tensor in outputs]
    graph = _graph((output.grad_fn for output in outputs), recorder)
    return (*begin, *recorder.done, *end, live.live - before, *graph), outputs


class _Recorder(TorchDispatchMode):
    """Writes down operations; a storage is known by the order in which it first appears."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.done: list[object] = []
        self._seen = 0
        self._numbers: dict[int, int] = {}
        """Of the storages that live: the recorder keeps none, so that what is kept can be seen."""

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Runs one operation and writes it down."""
        result = func(*args, **(kwargs or {}))
        values, form = tree_flatten((args, kwargs, result))
        self.done.append((str(func), str(form), *map(self.describe, values)))
        return result

    def describe(self, value: object) -> object:
        """A tensor by storage, shape and type; anything else by its text."""
        if not isinstance(value, Tensor):
            return repr(value)
        storage = value.untyped_storage()
        name = id(storage)
        if name not in self._numbers:
            self._numbers[name] = self._seen
            self._seen += 1
            weakref.finalize(storage, self._numbers.pop, name).atexit = False
        place = self._numbers[name], value.storage_offset()
        flag = value.requires_grad
        return (*place, tuple(value.shape), value.stride(), str(value.dtype), flag)


def _graph(roots: Iterable[Any], recorder: _Recorder) -> list[object]:
    """Names and edges of the autograd graph behind `roots`, and which parameter each leaf is."""
    order: dict[Any, int] = {}
    waiting = [root for root in roots if root is not None]
    found: list[object] = []
    while waiting:
        node = waiting.pop()
        if node in order:
            continue
        order[node] = len(order)
        leaf = recorder.describe(getattr(node, "variable", None))
        edges = [(following, index) for following, index in node.next_functions if following]
        found.append((node.name(), leaf, *((order.get(one), index) for one, index in edges)))
        waiting.extend(one for one, _ in edges)
    return found
