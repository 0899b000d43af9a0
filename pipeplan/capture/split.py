"""Cuts a task's model into the layers of its chain, and finds what passes between them.

Both `profile` and `launch` split the same task the same way, so the chain's layers are the
runtime's layers. The layers hold the user's own Parameter objects: nothing is copied.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from pipeplan.capture.boundary_trace import BoundaryTrace, spec_of, trace_boundaries
from pipeplan.capture.eager_modules.detection import (
    before_compile,
    eager_notes,
    is_compiled,
    uncompiled,
)
from pipeplan.capture.eager_modules.run_watch import OpaqueModule
from pipeplan.capture.graph.data_flow import DataFlow
from pipeplan.capture.graph.export_with_eager import graph_of
from pipeplan.capture.graph.transmitted import transmitting
from pipeplan.capture.partition.graph_cuts import Cut, coarsened_cuts, layer_cuts
from pipeplan.capture.partition.graph_layers import CutLayer, graph_layers
from pipeplan.capture.partition.sequential import (
    is_sequential,
    seeding_layers,
    sequential_eager,
    sequential_layers,
)
from pipeplan.capture.partition.shared_parameters import (
    sharing_layers,
    sharing_notes,
    takes_graph,
)
from pipeplan.capture.partition.shared_states import joined_notes, shared_states, starts_without
from pipeplan.capture.user_model.evaluation_mode import in_eval_mode
from pipeplan.capture.user_model.loss_state import restored_loss
from pipeplan.capture.user_model.model_call import check_call
from pipeplan.capture.user_model.own_memory import check_apart
from pipeplan.capture.user_model.weight_memory import memory_kept
from pipeplan.compiling import backend_of, check_compiler
from pipeplan.errors import InputError
from pipeplan.gradients import check_recorded, check_updates
from pipeplan.layout import is_repeated
from pipeplan.nested import LayerLoss, MicroBatch, ModelArguments, Structure, layer_loss, text_of
from pipeplan.precision import casting, check_autocast
from pipeplan.repeat import kept_generators
from pipeplan.split_model import SplitModel
from pipeplan.task import Task


def split(
    task: Task,
    max_layers: int | None = None,
    *,
    evaluates: bool = True,
    in_order: bool = False,
) -> SplitModel:
    """The layers of `task.model` and the boundaries between them.

    `nn.Sequential` and lists give one layer per module. Any other model is exported into a graph
    and cut where little passes; what a graph cannot hold stays a module, a layer of its own
    (`SplitModel.notes`). Layers that share what a forward changes are one: other micro-batches
    come between two stages. Whether the layers train as the model does is another question
    (`agreement`).
    Boundaries come from a pass over micro-batch 0 that computes nothing where the model allows.
    Random states are left as they were.

    Args:
        task: model, loss and data are used.
        max_layers: merges layers until there are no more than these; the ones that are cheap
            to lose first.
        evaluates: whether the layers run in eval mode, too, which takes a second export.
        in_order: whether the layers only ever run in the model's order, one micro-batch after
            the other; then they may share what a forward changes.

    Raises:
        InputError: if the model cannot be exported, a layer fails or returns something other
            than tensors, the loss is no scalar, or trains parameters of its own.
    """
    if max_layers is not None and max_layers < 1:
        raise InputError(f"split: max_layers: got {max_layers}, need at least 1")
    check_recorded("split")
    check_autocast(task.autocast)
    check_updates(task.accumulate, task.master_weights)
    backend = backend_of(task.compile)
    model = module_of(task)
    _check_made(model)
    _check_loss(task.loss)
    device = _device(model)
    check_compiler(backend, device)
    batch = MicroBatch.of(task, 0).mapped(lambda tensor: tensor.to(device))
    _check_input(batch)
    check_call(model, batch.arguments, own_loss=task.loss is None)
    with (
        memory_kept(model),
        restored_loss(task.loss),
        kept_generators(),
        uncompiled(model),
        casting(task.autocast, device),
    ):
        if is_sequential(model) and not takes_graph(task, model):
            kept = sequential_eager(model, batch.arguments)
            loss = layer_loss(task.loss, None)
            row = sequential_layers(model, loss, batch, max_layers, in_order=in_order)
            drawing = [model.get_submodule(name) for name in kept if kept[name].draws]
            eager = tuple(_eager_rows(model, row.layers, kept))
            found = _made(task, batch, seeding_layers(row.layers, drawing), row.traced, kept)
            found = replace(found, notes=(*found.notes, *row.notes))
        else:
            cutter = _graph_cutter(task, model, batch, evaluates=evaluates)
            found, eager = _by_graph(task, cutter, max_layers, in_order=in_order)
    return replace(
        found,
        compile=backend,
        eager=eager if backend else (),
        autocast=task.autocast,
        accumulate=task.accumulate,
        master_weights=task.master_weights,
    )


@dataclass(frozen=True, slots=True)
class _GraphCutter:
    """A model's graph, and what it takes to make layers of it."""

    model: nn.Module
    flow: DataFlow
    evaluation: DataFlow | None
    """In eval mode, if it has a graph there."""
    kept: Mapping[str, OpaqueModule]
    """Modules that stay eager."""
    loss: LayerLoss
    batch: MicroBatch

    def cut(self, cuts: Sequence[Cut]) -> _CutGraph:
        """The layers between `cuts`."""
        layers, entering = graph_layers(self.flow, cuts, self.evaluation, self.model)
        modules = {each.name: each.module for each in layers}
        fed = tuple(each.fed for each in layers)
        traced = trace_boundaries(modules, self.loss, self.batch, fed, entering)
        return _CutGraph(tuple(layers), entering, traced)

    def transmitting(self, parameters: Collection[nn.Parameter]) -> _GraphCutter | None:
        """One whose layers pass `parameters` on; None if none of them can pass."""
        flow = transmitting(self.flow, parameters)
        if flow is None:
            return None
        evaluation = self.evaluation and transmitting(self.evaluation, parameters)
        return replace(self, flow=flow, evaluation=evaluation or self.evaluation)


@dataclass(frozen=True, slots=True)
class _CutGraph:
    """Layers of a graph."""

    layers: tuple[CutLayer, ...]
    entering: tuple[int, ...]
    """Which of the model's inputs the first one takes."""
    traced: BoundaryTrace

    @property
    def modules(self) -> dict[str, nn.Module]:
        """The layers by name."""
        return {each.name: each.module for each in self.layers}


def _graph_cutter(
    task: Task, model: nn.Module, batch: MicroBatch, *, evaluates: bool
) -> _GraphCutter:
    """The exported model."""
    own_loss = task.loss is None
    flow, kept = graph_of(model, batch.arguments, own_loss=own_loss)
    evaluation = _in_eval_mode(model, batch.arguments, kept, own_loss) if evaluates else None
    loss = layer_loss(task.loss, flow.exported.returned)
    return _GraphCutter(model, flow, evaluation, kept, loss, batch)


def _by_graph(
    task: Task, cutter: _GraphCutter, max_layers: int | None, *, in_order: bool
) -> tuple[SplitModel, tuple[int, ...]]:
    """The model cut, and which of its layers stay eager."""
    cuts = layer_cuts(cutter.flow)
    graph, joined = cutter.cut(cuts), tuple[str, ...]()
    while task.tied == "transmit":
        passing = cutter.transmitting(sharing_layers(graph.modules))
        if passing is None:
            break
        cutter, cuts = passing, layer_cuts(passing.flow)
        graph = cutter.cut(cuts)
    flow, batch = cutter.flow, cutter.batch
    parts = list(graph.modules.values())
    if not in_order and (states := shared_states(parts, graph.traced.changes)):
        joined = tuple(joined_notes(states, graph.modules, cutter.model))
        cuts = [cuts[start - 1] for start in starts_without(states, len(parts))[1:]]
        graph = cutter.cut(cuts)
    if max_layers is not None and len(cuts) >= max_layers:
        graph = cutter.cut(coarsened_cuts(flow, cuts, max_layers))
    fed = tuple(each.fed for each in graph.layers)
    found = _made(task, batch, graph.modules, graph.traced, cutter.kept, fed)
    exported = flow.exported
    found = replace(
        found,
        returned=exported.returned,
        notes=(*found.notes, *joined, *([exported.note] if exported.note else [])),
        modules=tuple(each.modules for each in graph.layers),
        transmits=bool(exported.copies),
    )
    if len(graph.entering) < len(batch.inputs):
        specs = tuple(map(spec_of, batch.inputs))
        found = replace(found, inputs=specs, entering=graph.entering)
    return found, tuple(index for index, each in enumerate(graph.layers) if each.is_eager)


def _eager_rows(
    model: nn.Module, layers: Mapping[str, nn.Module], kept: Mapping[str, OpaqueModule]
) -> Iterator[int]:
    """Layers of a row that draw, count, or that the user has compiled."""
    wanted = {model.get_submodule(name) for name in kept}
    for index, layer in enumerate(layers.values()):
        if any(module in wanted or is_compiled(module) for module in layer.modules()):
            yield index


def _in_eval_mode(
    model: nn.Module, arguments: ModelArguments, kept: Mapping[str, OpaqueModule], own_loss: bool
) -> DataFlow | None:
    """The flow of `model` when it is evaluated; None if that has no graph."""
    try:
        with in_eval_mode(model):
            return graph_of(model, arguments, kept, own_loss=own_loss)[0]
    except InputError:
        return None


def _told(
    task: Task, layers: Mapping[str, nn.Module], kept: Mapping[str, OpaqueModule]
) -> tuple[str, ...]:
    whole = isinstance(task.model, nn.Module) and is_compiled(task.model)
    said = "the model is compiled as a whole: its layers run as they were before" if whole else ""
    if task.compile:
        said = "layers are compiled one by one, but for modules that run as they are; not the loss"
    return (
        *([said] if said else []),
        *eager_notes(kept),
        *sharing_notes(layers),
        *_hooked(layers),
        *_sparse(module_of(task)),
    )


def _sparse(model: nn.Module) -> Iterator[str]:
    """Tables whose gradients a plain loop adds up row by row."""
    tables = (nn.Embedding, nn.EmbeddingBag)
    for name, module in model.named_modules():
        if isinstance(module, tables) and module.sparse and module.weight.requires_grad:
            yield (
                f"module {name or type(module).__name__!r} makes sparse gradients: they add up in"
                " dense sums, which the optimizer steps, so its last bits may differ from those of"
                " a plain loop"
            )


def _hooked(layers: Mapping[str, nn.Module]) -> Iterator[str]:
    """What hooks of parameters are given."""
    names = [
        f"{name}.{inner}"
        for name, layer in layers.items()
        for inner, parameter in layer.named_parameters()
        if parameter._backward_hooks  # noqa: SLF001 - torch has no public name for them
    ]
    if names:
        several = f" ({len(names)} parameters have some)" if len(names) > 1 else ""
        yield (
            f"hooks of parameter {names[0]!r}{several} are given the gradient of one micro-batch,"
            " which is not divided by their number yet: one that clips by value clips more than in"
            " a loop that divides losses"
        )


def _counting(
    model: nn.Module, layers: Mapping[str, nn.Module], kept: Mapping[str, OpaqueModule]
) -> tuple[int, ...]:
    wanted = {model.get_submodule(name) for name, opaque in kept.items() if opaque.counts}
    rows = enumerate(layers.values())
    return tuple(index for index, layer in rows if wanted.intersection(layer.modules()))


def _made(
    task: Task,
    batch: MicroBatch,
    layers: dict[str, nn.Module],
    traced: BoundaryTrace,
    kept: Mapping[str, OpaqueModule],
    fed: tuple[tuple[int, ...], ...] = (),
) -> SplitModel:
    model = module_of(task)
    first = next(tensor for tensor in batch.inputs if tensor.numel())
    names = _tensor_names(model)
    return SplitModel(
        layers=tuple(layers.values()),
        names=tuple(layers),
        fqns=tuple(_fqns(layer, names) for layer in layers.values()),
        parameter_order=tuple(name for name, _ in model.named_parameters()),
        boundaries=traced.boundaries,
        microbatch_size=first.shape[0] if first.dim() else 1,
        arguments=batch.arguments.structure,
        target=Structure.of(batch.target)[0],
        fed=fed if any(fed) else (),
        notes=_told(task, layers, kept),
        drawing=tuple(name for name, opaque in kept.items() if opaque.draws),
        counting=_counting(model, layers, kept),
    )


def module_of(task: Task) -> nn.Module:
    """The task's model as one module whose parameter names are the user's, without compilation.

    Raises:
        InputError: if it is neither a module nor a list of modules.
    """
    model: object = task.model
    if isinstance(model, nn.Module):
        return before_compile(model)
    if not isinstance(model, Sequence) or isinstance(model, str):
        raise InputError(
            f"task: model: got a {type(model).__name__}, need an nn.Module or a list of modules"
        )
    for index, layer in enumerate(model):
        if not isinstance(layer, nn.Module):
            raise InputError(
                f"task: model[{index}]: got a {type(layer).__name__}, need an nn.Module"
            )
    return nn.ModuleList(model)


def _check_input(batch: MicroBatch) -> None:
    """Refuse a model that is called without tensors."""
    if not batch.inputs:
        got = text_of(batch.arguments.structure, is_call=True)
        raise InputError(
            f"task: data(0): got the input {got}, need a tensor in it: what is no tensor belongs"
            " to the model and is the same in every micro-batch. Make tensors of it in data: of a"
            " text its token ids, and let the model take those."
        )


def _check_made(model: nn.Module) -> None:
    """Refuse a model whose parameters have no shape yet, or whose tensors share memory."""
    for name, value in [*model.named_parameters(), *model.named_buffers()]:
        if is_lazy(value):
            raise InputError(
                f"task: model {type(model).__name__}: {name}: is lazy, need a shape. Call the"
                " model once on data(0)[0] before the task is returned."
            )
        if is_repeated(value):
            raise InputError(
                f"task: model {type(model).__name__}: {name}: got an expanded tensor (shape"
                f" {list(value.shape)}, strides {list(value.stride())}), need memory for each of"
                " its numbers: nothing can be loaded into it, or put back. Register"
                " .expand(..).contiguous() instead."
            )
    check_apart(model)


def _check_loss(loss: object) -> None:
    """Refuse a loss with parameters: optimizers get those of the model alone."""
    own = loss.named_parameters() if isinstance(loss, nn.Module) else iter(())
    trained = next((name for name, parameter in own if parameter.requires_grad), None)
    if trained is not None:
        raise InputError(
            f"task: loss {type(loss).__name__}: {trained}: got a parameter that the loss would"
            " train, need all of them in the model. Let the model compute its loss itself"
            " (Task(loss=None), the target among its inputs), or freeze it:"
            " requires_grad_(False)."
        )


def _device(model: nn.Module) -> torch.device:
    """Where the model is; a model without tensors is on the processor."""
    state = next((tensor for tensor in [*model.parameters(), *model.buffers()]), None)
    return torch.device("cpu") if state is None else state.device


def _tensor_names(model: nn.Module) -> dict[int, str]:
    """Name of each parameter and buffer by identity: the first name, where it has several."""
    named = [*model.named_parameters(), *model.named_buffers()]
    return {id(tensor): name for name, tensor in named}


def _fqns(layer: nn.Module, names: dict[int, str]) -> dict[str, str]:
    """Constants of an exported model have no other name than the one in the layer."""
    parameters = layer.named_parameters(remove_duplicate=False)
    buffers = layer.named_buffers(remove_duplicate=False)
    return {local: names.get(id(tensor), local) for local, tensor in [*parameters, *buffers]}
