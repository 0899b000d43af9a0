"""What a forward changes of the tensors that layers hold, seen while it runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pipeplan.livebytes import storages


def states_of(layer: nn.Module) -> list[Tensor]:
    """The tensors of `layer` that no optimizer steps: buffers and frozen parameters."""
    return [*layer.buffers(), *(each for each in layer.parameters() if not each.requires_grad)]


class StateWrites:
    """Notes which states a layer's forward writes into, or replaces."""

    def __init__(self, wanted: frozenset[int]) -> None:
        """Looks at states with the storages `wanted` alone; at none of them for nothing."""
        self._wanted = wanted

    @contextmanager
    def of(self, layer: nn.Module) -> Iterator[set[int]]:
        """Around a forward of `layer`; what is given has the storages it changed, afterwards."""
        found: set[int] = set()
        states = [each for each in states_of(layer) if storages([each]) & self._wanted]
        if not states:
            yield found
            return
        versions = [_version(each) for each in states]
        with _Writes(storages(states)) as writes:
            yield found
        there = set(map(id, states_of(layer)))
        for state, version in zip(states, versions, strict=True):
            if id(state) not in there or _version(state) != version:
                found |= storages([state])
        found |= writes.found


class _Writes(TorchDispatchMode):
    """Sees into which storages operations write.

    A view of a tensor that is not fake is fake in a fake mode, with a storage of its own. Norms
    change the statistics that they are given without saying so.
    """

    supports_higher_order_operators = True

    def __init__(self, wanted: Iterable[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: set[int] = set()
        self._bases = {storage: storage for storage in wanted}
        """Storage of a view -> the one that it shows."""
        self._views: list[Any] = []
        """Kept, so that no other storage gets their keys."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        result = func(*args, **given)
        if isinstance(func, OpOverload):
            read, written = _aliased(func, args, given)
            self.found |= self._shown(written)
            for base in self._shown(read):
                self._views.append(result)
                self._bases |= {each: base for each in storages(_tensors(result))}
        return result

    def _shown(self, arguments: Sequence[Any]) -> set[int]:
        return {self._bases[each] for each in storages(_tensors(arguments)) if each in self._bases}


def _tensors(values: Any) -> list[Tensor]:
    return [each for each in tree_leaves(values) if isinstance(each, Tensor)]


def _aliased(
    func: OpOverload, args: Sequence[Any], given: Mapping[str, Any]
) -> tuple[list[Any], list[Any]]:
    """The arguments that an operation returns views of, and those that it writes into."""
    schema = func._schema.arguments  # noqa: SLF001
    values = {each.name: given.get(each.name) for each in schema}
    values |= {each.name: value for each, value in zip(schema, args, strict=False)}
    only_reads = any(values.get(flag) is False for flag in ("training", "use_input_stats"))
    silent = () if only_reads else ("running_mean", "running_var")
    viewed: list[Any] = []
    written = [values[name] for name in silent if name in values]
    for each in schema:
        if each.alias_info is not None:
            (written if each.alias_info.is_write else viewed).append(values[each.name])
    return viewed, written


def _version(tensor: Tensor) -> int:
    """How often `tensor` has been written into, by torch's own count."""
    return tensor._version  # noqa: SLF001
