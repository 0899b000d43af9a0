"""The one door to torch's tracer of joint graphs, which is private: forward and backward as one.

`aot_export_joint_with_descriptors` runs the module and autograd on tensors
without memory and writes down every operator, without decompositions, so that the kernels of the
tensors' own device remain. What its arguments and results mean is told by descriptors.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Set
from contextlib import ExitStack
from dataclasses import dataclass
from enum import StrEnum
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn
from torch._functorch._aot_autograd import descriptors as described
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch.fx import GraphModule, Node

from pipeplan.operators.eager_operators import as_in_eager
from pipeplan.operators.flat_module import Arguments, FlatModule, TensorTree
from pipeplan.operators.other_generators import not_drawn_from
from pipeplan.operators.refusals import UncapturableError

_TRACING = Lock()
"""torch's tables and Python's generators are another's while one call is traced: one at a time."""


class Given(StrEnum):
    """What an argument of a joint graph is."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    INPUT = "input"
    TANGENT = "tangent"


class Handed(StrEnum):
    """What a result of a joint graph is."""

    OUTPUT = "output"
    NEW_BUFFER = "new buffer"
    WEIGHT_GRADIENT = "weight gradient"
    INPUT_GRADIENT = "input gradient"


@dataclass(frozen=True, slots=True)
class Argument:
    """One placeholder; `place` counts inputs, and outputs for tangents."""

    node: Node
    kind: Given
    name: str = ""
    place: int = 0


@dataclass(frozen=True, slots=True)
class Result:
    """One result; `name` is that of a parameter or buffer, `place` that of an output or input."""

    node: Node
    kind: Handed
    name: str = ""
    place: int = 0


@dataclass(frozen=True)
class JointGraph:
    """One forward and its backward, operator by operator."""

    module: GraphModule
    arguments: tuple[Argument, ...]
    results: tuple[Result, ...]
    form: TensorTree
    """Of what the module returns."""
    differentiable: frozenset[int]
    """Places of outputs that require a gradient in a run."""

    @property
    def nodes(self) -> list[Node]:
        """What is called, in order."""
        return [node for node in self.module.graph.nodes if node.op == "call_function"]


def is_backward(node: Node) -> bool:
    """Whether the tracer saw `node` in the backward."""
    return node.meta.get("partitioner_tag") == "is_backward"


def joint_graph(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> JointGraph:
    """The joint graph of a call; nothing is computed and nothing changed.

    Args:
        module: in the mode that it trains in; its tensors may be fake.
        args: of the call; tensors that require a gradient get one.
        kwargs: of the call.

    Raises:
        UncapturableError: if torch cannot trace the call, or it does what the graph cannot hold.
    """
    flat = FlatModule(module, Arguments(args, kwargs))
    flat.train(module.training)
    tensors = tuple(_as_leaf(each) for each in Arguments(args, kwargs).tensors)
    try:
        with (
            _TRACING,
            ExitStack() as stack,
            warnings.catch_warnings(),
            torch.enable_grad(),
            as_in_eager(),
            not_drawn_from(),
        ):
            warnings.simplefilter("ignore")
            found = aot_export_joint_with_descriptors(stack, flat, tensors)
            traced = found.graph_module
    except UncapturableError:
        raise
    except Exception as error:
        raise UncapturableError(_why(error)) from error
    assert flat.results is not None
    _hand_on(traced, flat.passed)
    return JointGraph(
        traced,
        _arguments(traced, flat),
        _results(traced, flat),
        flat.results,
        frozenset(flat.differentiable),
    )


def _hand_on(traced: GraphModule, passed: Set[int]) -> None:
    """Lets outputs that are inputs be these, not the copies of them that were traced."""
    end = next(node for node in traced.graph.nodes if node.op == "output")
    results = list(end.args[0])
    for number, told in enumerate(end.meta["desc"]):
        if isinstance(told, described.PlainAOTOutput) and told.idx in passed:
            assert results[number].target is torch.ops.aten.clone.default
            results[number] = results[number].args[0]
    end.args = (tuple(results),)


def _as_leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _why(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    first = lines[0].rstrip(".") if lines else "no message"
    return f"torch cannot trace the call: {type(error).__name__}: {first[:300]}"


def _arguments(traced: GraphModule, flat: FlatModule) -> tuple[Argument, ...]:
    nodes = [node for node in traced.graph.nodes if node.op == "placeholder"]
    return tuple(_argument(node, node.meta["desc"], flat) for node in nodes)


def _argument(node: Node, told: Any, flat: FlatModule) -> Argument:
    if isinstance(told, described.ParamAOTInput):
        return Argument(node, Given.PARAMETER, flat.name(told.target))
    if isinstance(told, described.BufferAOTInput):
        return Argument(node, Given.BUFFER, flat.name(told.target))
    if isinstance(told, described.PlainAOTInput):
        return Argument(node, Given.INPUT, place=told.idx)
    if isinstance(told, described.TangentAOTInput):
        output = told.output
        if isinstance(output, described.PlainAOTOutput):
            return Argument(node, Given.TANGENT, place=output.idx)
        raise UncapturableError(f"the gradient of {_described(output)} is needed")
    raise UncapturableError(f"the graph takes {_described(told)}")


def _results(traced: GraphModule, flat: FlatModule) -> tuple[Result, ...]:
    end = next(node for node in traced.graph.nodes if node.op == "output")
    pairs = zip(end.args[0], end.meta["desc"], strict=True)
    return tuple(_result(node, told, flat) for node, told in pairs if isinstance(node, Node))


def _result(node: Node, told: Any, flat: FlatModule) -> Result:
    if isinstance(told, described.PlainAOTOutput):
        return Result(node, Handed.OUTPUT, place=told.idx)
    if isinstance(told, described.InputMutationAOTOutput):
        changed = told.mutated_input
        if isinstance(changed, described.BufferAOTInput):
            return Result(node, Handed.NEW_BUFFER, flat.name(changed.target))
        raise UncapturableError(f"the forward works in place on {_described(changed)}")
    if isinstance(told, described.GradAOTOutput):
        of = told.grad_of
        if isinstance(of, described.ParamAOTInput):
            return Result(node, Handed.WEIGHT_GRADIENT, flat.name(of.target))
        if isinstance(of, described.PlainAOTInput):
            return Result(node, Handed.INPUT_GRADIENT, place=of.idx)
        raise UncapturableError(f"{_described(of)} gets a gradient")
    raise UncapturableError(f"the graph returns {_described(told)}")


def _described(told: Any) -> str:
    """A descriptor in words; for what this package has none, as torch names it."""
    if isinstance(told, described.PlainAOTInput):
        return f"input {told.idx}"
    if isinstance(told, (described.ParamAOTInput, described.BufferAOTInput)):
        return f"{told.target}"
    return type(told).__name__
