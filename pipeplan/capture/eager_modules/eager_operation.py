"""Modules that stay eager: one opaque operation in a graph, the module itself in a layer.

What a graph of operations cannot hold (a custom backward, hooks, checkpointing, compiled code,
Python's own state or randomness) is kept by keeping the module. While the model is exported, each
of its calls is an operation `pipeplan::eager` whose results have the shapes that were seen before;
a layer made of the graph calls the module.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from pipeplan.capture.user_model.interception import (
    FunctionKind,
    FunctionModule,
    InsteadOfCall,
    OwnCall,
    intercepted_calls,
    intercepted_functions,
)
from pipeplan.capture.user_model.user_code import names_by_identity, running_module
from pipeplan.nested import Structure
from pipeplan.repeat import seed_python


@dataclass(frozen=True, slots=True)
class EagerCall:
    """One call of a module that stays eager."""

    path: str
    """The module's name in the model; of a Function, one that no module has."""
    module: nn.Module
    arguments: Structure
    """(positional, named)."""
    result: Structure
    blanks: tuple[tuple[torch.Size, tuple[int, ...], torch.dtype], ...]
    """Shape, strides and dtype of each tensor of the result."""
    draws: bool
    """Whether it draws from Python's or numpy's generator."""

    @property
    def work(self) -> int:
        """Floating-point operations as if each parameter were multiplied once per position."""
        shape = self.blanks[0][0]
        weights = sum(parameter.numel() for parameter in self.module.parameters())
        return 2 * weights * math.prod(shape[:-1])


class UnfitError(Exception):
    """A module that cannot be one operation of a graph."""

    def __init__(self, path: str, why: str) -> None:
        super().__init__(why)
        self.path, self.why = path, why


class EagerCalls:
    """The calls of all modules that stay eager, by module in the order of the program."""

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        drawing: frozenset[str] = frozenset(),
        counting: frozenset[str] = frozenset(),
        functions_of: nn.Module | None = None,
    ) -> None:
        """Takes the modules that stay eager.

        Args:
            modules: by name.
            drawing: names of those that draw from Python's or numpy's generator.
            counting: names of those that change their attributes, so that all of their calls must
                be in one layer.
            functions_of: the model, if Functions applied in its own forward stay, too.
        """
        self.modules = modules
        self._drawing, self._counting = drawing, counting
        self._targets = dict(modules)
        self._keys = {path: key for key, path in enumerate(modules)}
        self._model = functions_of
        self._found: dict[tuple[int, int], EagerCall] = {}

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Inside, calls are made and written down.

        Raises:
            UnfitError: if arguments or results of a call do not fit into a graph.
        """
        self._found = {}
        seen: Counter[int] = Counter()

        def call(path: str, real: OwnCall, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
            key = self._keys[path]
            if seen[key] and path in self._counting:
                raise UnfitError(path, "is called several times and counts")
            result, found = self._noted(path, real, given, named)
            self._found[key, seen[key]] = found
            seen[key] += 1
            return result

        with intercepted_calls(self.modules, call), self._functions(call):
            yield

    @contextmanager
    def _functions(self, call: InsteadOfCall) -> Iterator[None]:
        """Inside, Functions that the model's own forward applies are answered by `call`."""
        if self._model is None:
            yield
            return
        names = names_by_identity(self._model)

        def answer(kind: FunctionKind, real: OwnCall, given: tuple[Any, ...]) -> Any:
            if running_module(names)[0]:
                return real(*given)
            path = f"{kind.__name__}_apply"
            if path not in self._targets:
                self._targets[path] = FunctionModule(kind)
                self._keys[path] = len(self._keys)
            return call(path, real, given, {})

        with intercepted_functions(answer):
            yield

    def _noted(
        self, path: str, real: OwnCall, given: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[Any, EagerCall]:
        arguments, tensors = Structure.of((given, named))
        before = [_version(tensor) for tensor in tensors]
        result = real(*given, **named)
        tree, made = Structure.of(result)
        if before != [_version(tensor) for tensor in tensors]:
            raise UnfitError(path, "changes its input in place")
        if odd := arguments.odd or tree.odd:
            raise UnfitError(path, f"takes or returns a {odd}")
        if not made:
            raise UnfitError(path, "returns no tensor")
        blanks = tuple((one.shape, one.stride(), one.dtype) for one in made)
        draws = path in self._drawing
        return result, EagerCall(path, self._targets[path], arguments, tree, blanks, draws)

    @contextmanager
    def exported(self) -> Iterator[None]:
        """Inside, each call is an operation `pipeplan::eager`.

        Raises:
            UnfitError: if a call differs from those written down.
        """
        seen: Counter[int] = Counter()

        def call(path: str, _: OwnCall, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
            key = self._keys[path]
            number, seen[key] = seen[key], seen[key] + 1
            arguments, tensors = Structure.of((given, named))
            found = self._found.get((key, number))
            if any(isinstance(leaf, _SYMBOLS) for leaf in arguments.leaves):
                raise UnfitError(path, "is told a number or a choice that depends on values")
            if found is None or found.arguments != arguments:
                raise UnfitError(path, "is called in another way each time")
            _SHAPES[key, number] = found.blanks
            return found.result.filled(torch.ops.pipeplan.eager(tensors, key, number))

        try:
            with intercepted_calls(self.modules, call), self._functions(call):
                yield
        finally:
            _SHAPES.clear()

    def of(self, node: fx.Node) -> EagerCall | None:
        """The call that `node` of an exported graph is; None for any other operation."""
        if not is_eager(node):
            return None
        _, key, number = node.args
        return self._found[key, number]  # type: ignore[index]


def is_eager(node: fx.Node) -> bool:
    """Whether `node` is a call of a module that stays eager."""
    return node.target is torch.ops.pipeplan.eager.default


def eager_inputs(node: fx.Node) -> list[fx.Node]:
    """The tensors among the arguments of the call that `node` is."""
    return list(node.args[0])  # type: ignore[arg-type]


def copied_call(graph: fx.Graph, call: EagerCall, path: str, values: Sequence[fx.Node]) -> fx.Node:
    """The call of the module itself in `graph`, whose tensors come as a tuple.

    Args:
        graph: of a layer.
        call: what to call.
        path: where the graph's module has it.
        values: the tensors among its arguments.
    """
    if call.draws:
        graph.call_function(seed_like_torch)
    given, named = call.arguments.filled(values)
    result = graph.call_module(path, given, named)
    return graph.call_function(output_tensors, (result,))


def output_tensors(result: object) -> tuple[Tensor, ...]:
    """The tensors that a module returned, however nested."""
    return tuple(Structure.of(result)[1])


def seed_like_torch() -> None:
    """Seed the generators of Python and numpy with what torch's was seeded with last.

    The runtime seeds torch's before each layer (`pipeplan.runtime.stages.random_state`), so what a
    layer draws depends on layer and micro-batch alone, in whichever order layers run, and again in
    a recomputation.
    """
    seed_python(torch.initial_seed())


def _version(tensor: Tensor) -> int:
    """How often `tensor` has been written into, by torch's own count."""
    return tensor._version  # noqa: SLF001


_SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)
"""Plain values that torch does not know while it exports."""
_SHAPES: dict[tuple[int, int], tuple[tuple[torch.Size, tuple[int, ...], torch.dtype], ...]] = {}
"""What the operation returns, by module and call; filled while a model is exported."""
_LIBRARY = torch.library.Library("pipeplan", "FRAGMENT")
_LIBRARY.define("eager(Tensor[] values, int key, int number) -> Tensor[]")


@torch.library.register_fake("pipeplan::eager", lib=_LIBRARY)  # type: ignore[untyped-decorator]
def _blank(values: Sequence[Tensor], key: int, number: int) -> list[Tensor]:
    device = values[0].device if values else torch.device("cpu")
    return [
        torch.empty_strided(shape, strides, dtype=dtype, device=device)
        for shape, strides, dtype in _SHAPES[key, number]
    ]
