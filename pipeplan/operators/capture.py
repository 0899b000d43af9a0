"""From a call of a module to operations, storages and how to run them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from pipeplan.operator_graph import Operation, OperatorGraph, Phase, Storage, StorageKind
from pipeplan.operators.builder import Builder, OperationDraft
from pipeplan.operators.captured import Captured, Gradient
from pipeplan.operators.flat_module import Arguments, is_hooked, states_of
from pipeplan.operators.joint_graph import (
    Argument,
    Given,
    Handed,
    JointGraph,
    Result,
    joint_graph,
)
from pipeplan.operators.refusals import UncapturableError
from pipeplan.operators.simplify import is_random, simplify
from pipeplan.precision import around

_BATCH_NORM = torch.ops.aten._native_batch_norm_legit_functional.default  # noqa: SLF001


def capture(module: nn.Module, *args: Any, **kwargs: Any) -> Captured:
    """The operations of a forward of `module` and its backward; times are zero.

    Nothing is computed, and the module is left as it was. Its tensors and the arguments may be
    fake: then the graph can be planned, not run. Views belong to the storage that they show.

    Args:
        module: in the mode that it trains in, on one device.
        args: of the call; input tensors that require a gradient get one.
        kwargs: of the call.

    Raises:
        UncapturableError: names what in the call no graph can hold; whole layers may be planned.
    """
    _check_hooks(module)
    joint = joint_graph(module, args, kwargs)
    simplify(joint.module)
    return _Assembly(module, joint, Arguments(args, kwargs)).captured()


def _check_hooks(module: nn.Module) -> None:
    for name, parameter in module.named_parameters():
        if is_hooked(parameter):
            raise UncapturableError(f"{name} has hooks on its gradient, which would not run")
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    if any(getattr(module, kind, None) for kind in kinds):
        raise UncapturableError(
            f"{type(module).__name__}: the module itself has hooks, which would run in the graph"
            " and around it; register them behind planning"
        )


class _Assembly:
    """Puts the parts of a captured call together."""

    def __init__(self, module: nn.Module, joint: JointGraph, arguments: Arguments) -> None:
        self._module, self._joint, self._arguments = module, joint, arguments
        self._build = Builder()
        self._given: dict[Given, dict[Any, int]] = defaultdict(dict)
        for argument in joint.arguments:
            self._given[argument.kind][_name(argument)] = self._build.argument(argument)
        for node in joint.module.graph.nodes:
            if node.op == "get_attr":
                self._build.constant(node, joint.module)
            elif node.op == "call_function":
                self._build.call(node)
        self._build.drafts.sort(key=lambda draft: draft.backward)

    def captured(self) -> Captured:
        """All of it."""
        outputs = self._handed(Handed.OUTPUT)
        self._check_outputs(outputs)
        added = self._added()
        joint, build, given = self._joint, self._build, self._given
        inputs = len(self._arguments.facts)
        tangents = tuple(given[Given.TANGENT].get(place) for place in range(len(outputs)))
        gradients = self._handed(Handed.INPUT_GRADIENT)
        device = self._device()
        return Captured(
            graph=self._graph(outputs, gradients),
            values=tuple(build.values),
            computations=tuple(draft.computation for draft in build.drafts),
            parameters=given[Given.PARAMETER],
            buffers=given[Given.BUFFER],
            constants=tuple(build.constants),
            inputs=tuple(given[Given.INPUT].get(place) for place in range(inputs)),
            input_gradients=tuple(gradients.get(place) for place in range(inputs)),
            outputs=tuple(outputs[place] for place in sorted(outputs)),
            tangents=tangents,
            layouts=self._layouts(len(outputs)),
            added=added,
            arguments=self._arguments,
            form=joint.form,
            device=device,
            cast=around(device),
            training=tuple(part.training for part in self._module.modules()),
        )

    def _device(self) -> torch.device:
        parameters, buffers = states_of(self._module)
        tensors = [*parameters.values(), *buffers.values(), *self._arguments.tensors]
        if not tensors:
            raise UncapturableError("there is no tensor in the call, need at least one")
        return tensors[0].device

    def _handed(self, kind: Handed) -> dict[int, int]:
        """Place to value."""
        results = (each for each in self._joint.results if each.kind is kind)
        return {each.place: self._build.value(each.node) for each in results}

    def _check_outputs(self, outputs: dict[int, int]) -> None:
        """Where outputs show an input or each other, torch leaves gradients out of the graph."""
        joint, tangents = self._joint, self._given[Given.TANGENT]
        for place in range(joint.form.count):
            if place not in outputs or (place in joint.differentiable) != (place in tangents):
                raise UncapturableError(f"output {place} shows an input or another output")

    def _layouts(
        self, count: int
    ) -> tuple[tuple[tuple[int, ...], tuple[int, ...], torch.dtype] | None, ...]:
        found = {
            each.place: each.node.meta["val"]
            for each in self._joint.arguments
            if each.kind is Given.TANGENT
        }
        return tuple(
            (tuple(found[place].shape), found[place].stride(), found[place].dtype)
            if place in found
            else None
            for place in range(count)
        )

    def _added(self) -> dict[int, tuple[Gradient, ...]]:
        """Gives weight gradients and new buffers their kinds and targets."""
        found: dict[int, list[Gradient]] = defaultdict(list)
        kinds: dict[int, StorageKind] = {}
        read = {storage for draft in self._build.drafts for storage in draft.reads}
        returned = {
            self._build.values[value].storage
            for value in self._handed(Handed.INPUT_GRADIENT).values()
        }
        for result in self._joint.results:
            if result.kind not in (Handed.WEIGHT_GRADIENT, Handed.NEW_BUFFER):
                continue
            value = self._build.value(result.node)
            storage = self._build.values[value].storage
            found[storage].append(Gradient(result.name, value))
            kinds[storage] = self._kind(storage, result, storage in read | returned)
        for storage, parts in found.items():
            changes = {"kind": kinds[storage], "targets": tuple(part.name for part in parts)}
            self._build.storages[storage] = self._build.storages[storage].model_copy(
                update=changes
            )
        return {storage: tuple(parts) for storage, parts in found.items()}

    def _kind(self, storage: int, result: Result, used: bool) -> StorageKind:
        kind = self._build.storages[storage].kind
        if result.kind is Handed.NEW_BUFFER and kind is StorageKind.ACTIVATION:
            return StorageKind.NEW_BUFFER
        if result.kind is Handed.WEIGHT_GRADIENT:
            if kind is StorageKind.GRADIENT:
                return kind if used else StorageKind.WEIGHT_GRADIENT
            if kind is StorageKind.TANGENT or kind is StorageKind.WEIGHT_GRADIENT:
                return kind
        raise UncapturableError(f"the {result.kind} of {result.name} shows a storage of {kind}")

    def _graph(self, outputs: dict[int, int], gradients: dict[int, int]) -> OperatorGraph:
        build = self._build
        storages = tuple(build.storages)
        returned = _distinct(build.values[value].storage for value in gradients.values())
        phases = _phases(build.drafts, set(returned))
        updated = {
            index
            for index, each in enumerate(storages)
            if each.kind is StorageKind.BUFFER and _is_target(each, storages)
        }
        pairs = zip(build.drafts, phases, strict=True)
        parameters = dict(self._module.named_parameters())
        targets = {
            result.name for result in self._joint.results if result.kind is Handed.WEIGHT_GRADIENT
        }
        return OperatorGraph(
            name=type(self._module).__name__,
            storages=storages,
            operations=tuple(_operation(draft, phase, updated) for draft, phase in pairs),
            outputs=_distinct(build.values[value].storage for value in outputs.values()),
            input_gradients=returned,
            gradient_bytes=sum(parameters[name].nbytes for name in targets),
        )


def _name(argument: Argument) -> Any:
    named = argument.kind in (Given.PARAMETER, Given.BUFFER)
    return argument.name if named else argument.place


def _distinct(items: Iterable[int]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(items))


def _is_target(buffer: Storage, storages: tuple[Storage, ...]) -> bool:
    return any(
        buffer.name in each.targets for each in storages if each.kind is StorageKind.NEW_BUFFER
    )


def _phases(drafts: list[OperationDraft], returned: set[int]) -> list[Phase]:
    """F, and behind it I for what a gradient of an input depends on, W for the rest."""
    needed = set(returned)
    found = []
    for draft in reversed(drafts):
        if not draft.backward:
            found.append(Phase.FORWARD)
        elif needed.isdisjoint(draft.writes):
            found.append(Phase.WEIGHT_GRADIENT)
        else:
            needed.update(draft.reads)
            found.append(Phase.INPUT_GRADIENT)
    return found[::-1]


def _operation(draft: OperationDraft, phase: Phase, updated: set[int]) -> Operation:
    old = updated.intersection(draft.reads)
    return Operation(
        name=draft.node.name,
        phase=phase,
        reads=draft.reads,
        writes=draft.writes,
        time_ns=0,
        random=is_random(draft.node),
        # A batch norm in training reads its statistics only to update them.
        once=bool(old) and not (draft.node.target is _BATCH_NORM and draft.node.args[5] is True),
    )
