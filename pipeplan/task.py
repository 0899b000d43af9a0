"""The task: how a user names model, loss, optimizer and data. Data only; torch is not imported.

The function that a task reference (`taskref`) names returns one `Task`; `profile` and `launch`
load the same reference the same way.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pipeplan import taskref
from pipeplan.document import digest
from pipeplan.errors import InputError
from pipeplan.taskref import task_function

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler

__all__ = ["LossScale", "SplitModel", "Task", "TensorSpec", "Tied"]
__all__ += ["load", "load_named", "maker", "maker_named", "task_function"]

Tied = Literal["colocate", "synchronize"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LossScale:
    """Dynamic loss scaling for fp16: gradients of scale * loss, divided by scale before use.

    A step with a gradient that is not finite is skipped by all ranks and lowers the scale;
    `interval` good steps on end raise it (Micikevicius et al. 2018, section 3.2; the defaults are
    those of torch.amp.GradScaler). Powers of two keep the division exact.
    """

    initial: float = 2.0**16
    growth: float = 2.0
    backoff: float = 0.5
    interval: int = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Everything training needs, small enough to write in a minute.

    model: any module that returns one tensor; an `nn.Sequential` or a list gives its own layers.
    loss: (model output, target) -> scalar tensor, the mean over the micro-batch.
    optimizer: parameters -> any `torch.optim.Optimizer`; called once per layer.
    data: micro-batch number -> (input, target); the same number gives the same tensors, on every
        rank and in every process, so runs can be repeated and resumed.
    """

    model: nn.Module | Sequence[nn.Module]
    loss: Callable[[Tensor, Tensor], Tensor]
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer]
    data: Callable[[int], tuple[Tensor, Tensor]]
    unit: str = "sample"
    """What throughput counts, for people: `sample` or `token`."""
    units_per_microbatch: int | None = None
    """Units in one micro-batch; None counts the first dimension of the input."""
    scheduler: Callable[[Optimizer], LRScheduler] | None = None
    """Optimizer -> its learning-rate schedule, a function of the number of updates alone."""
    clip_norm: float | None = None
    """Gradients are scaled down to this norm, taken over the whole model."""
    loss_scale: LossScale | None = None
    """For fp16; None trains without scaling."""
    autocast: torch.dtype | None = None
    """Layers and loss run under `torch.autocast` to this type, backwards and updates do not."""
    accumulate: torch.dtype | None = None
    """`torch.float32`: sums for weights in 16 bits are in 32; None: in the weights' type."""
    master_weights: bool = False
    """Whether the optimizer steps copies in 32 bits of weights in 16, which are cast from them."""
    compile: bool | str = False
    """Whether layers run compiled, each by itself; or by which backend of `torch.compile`."""
    tied: Tied = "colocate"
    """Layers that share a parameter: on one GPU, or each with a copy and gradients exchanged."""
    weights: str | Path | Callable[[str], Tensor] | None = None
    """Where a run takes its first weights from, by the names they have in the model: a folder of
    safetensors or of torch.distributed.checkpoint, a file of either or of `torch.save`, or name ->
    tensor. Each rank reads what it hosts. None: as the model initialises itself."""

    def microbatch(self, number: int) -> tuple[Tensor, Tensor]:
        """(input, target) of micro-batch `number` as fresh contiguous copies.

        Copies, because `data` may hand out views of a larger tensor or parts of a data set in
        memory: then the bytes that a stage keeps would not be those of its input.

        Raises:
            InputError: if `data` fails or does not return two tensors.
        """
        try:
            pair = self.data(number)
        except Exception as error:
            raise InputError(
                f"task: data({number}) failed: {type(error).__name__}: {error}"
            ) from error
        if not isinstance(pair, tuple) or len(pair) != 2 or not all(map(_is_tensor, pair)):
            kinds = ", ".join(type(part).__name__ for part in pair) if _is_row(pair) else "no row"
            raise InputError(
                f"task: data({number}): got {type(pair).__name__} ({kinds}), need a tuple"
                " (input tensor, target tensor)"
            )
        source, target = (part.detach().contiguous().clone() for part in pair)
        return source, target


def _is_tensor(value: object) -> bool:
    return hasattr(value, "untyped_storage")


def _is_row(value: object) -> bool:
    return isinstance(value, tuple | list)


def load(reference: str, seed: int = 0) -> Task:
    """The task that the user's `reference` names.

    The caller seeds torch before, so weights repeat. A function with a parameter `seed` gets it.

    Raises:
        InputError: if the reference names nothing, or the function fails or returns no Task.
    """
    return maker(reference, seed)()


def load_named(reference: str, seed: int = 0, *, file: str, repeated: str) -> Task:
    """The task that a file's `reference` names; arguments and errors as for `maker_named`."""
    return maker_named(reference, seed, file=file, repeated=repeated)()


def maker(reference: str, seed: int = 0) -> Callable[[], Task]:
    """`load` as a function that makes the task anew at each call; its code is read now.

    Raises:
        InputError: if the reference names nothing; the function raises the rest.
    """
    parts = taskref.parsed(reference)
    return partial(_made, parts, taskref.found(parts), seed)


def maker_named(reference: str, seed: int = 0, *, file: str, repeated: str) -> Callable[[], Task]:
    """`maker` for a task that a file's `reference` names, if a file may name it (`taskref`).

    Args:
        reference: what the file says.
        seed: as for `maker`.
        file: who says it, for people.
        repeated: the command that names the same task by the user's own word.

    Raises:
        InputError: if the function is not marked, or as `maker` does.
    """
    parts = taskref.parsed(reference)
    function = taskref.found_marked(parts)
    if function is None:
        raise InputError(
            f"{file}: names the task {reference!r}, which a file may not: got no function marked"
            " with @pipeplan.task_function, below this directory or in an installed module."
            f" If you know it, name it yourself: {repeated}"
        )
    return partial(_made, parts, function, seed)


def _made(parts: taskref.Reference, function: Callable[..., object], seed: int) -> Task:
    arguments = dict(parts.arguments)
    try:
        if "seed" in inspect.signature(function).parameters:
            arguments = {"seed": seed, **arguments}
        task = function(**arguments)
    except InputError:
        raise
    except Exception as error:
        raise InputError(
            f"task {parts.text!r}: {parts.name}() failed: {taskref.error_line(error)}"
        ) from error
    if not isinstance(task, Task):
        raise InputError(f"task {parts.text!r}: got a {type(task).__name__}, need a pipeplan Task")
    return task


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape and dtype of one boundary tensor; `differentiable` ones get a gradient back."""

    shape: tuple[int, ...]
    dtype: str
    """As torch prints it: `torch.float32`."""
    differentiable: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitModel:
    """A model cut into the layers of its chain; made by `capture`, run by `runtime`.

    Layer l is called as `layers[l](*boundary)` with the tensors of boundary l and returns a
    tensor or a tuple, which is boundary l+1. Boundary 0 is the model's input. The loss applies
    to the last layer's output and counts as part of the last layer. A layer that needs the
    model's input later is fed it from the data: it gets `fed[l]` behind its boundary.
    """

    layers: tuple[nn.Module, ...]
    names: tuple[str, ...]
    fqns: tuple[dict[str, str], ...]
    """Per layer: parameter or buffer name inside the layer -> its name in the user's model."""
    boundaries: tuple[tuple[TensorSpec, ...], ...]
    """Boundary l is the input of layer l; one entry per layer."""
    microbatch_size: int
    fed: tuple[tuple[int, ...], ...] = ()
    """Per layer: which tensors of boundary 0 it gets behind its own; empty: none for any layer."""
    autocast: torch.dtype | None = None
    """What layers and loss run under: `Task.autocast`."""
    accumulate: torch.dtype | None = None
    """`Task.accumulate`, of which bytes depend."""
    master_weights: bool = False
    """`Task.master_weights`, likewise."""
    compile: str | None = None
    """The backend of torch.compile that layers are compiled by: `Task.compile`."""
    eager: tuple[int, ...] = ()
    """Layers that run as they are though others are compiled; known where `compile` is given."""
    notes: tuple[str, ...] = ()
    """What the user should know of how the model was cut, a line each."""
    drawing: tuple[str, ...] = ()
    """Modules of the model that draw from Python's or numpy's generator, by name."""
    counting: tuple[int, ...] = ()
    """Layers that change Python attributes in their forward: computed again, they count twice."""

    device: str = "cpu"
    """Where the layers are, if they have no tensor that says it."""

    def fed_to(self, layer: int) -> tuple[int, ...]:
        """Which tensors of boundary 0 `layer` (0-based) gets behind its boundary."""
        return self.fed[layer] if self.fed else ()

    def check_again(self, layers: Iterable[int], where: str) -> None:
        """Refuse to compute layers again that would count twice.

        Args:
            layers: 0-based.
            where: what wants to, for the message.

        Raises:
            InputError: if one of `layers` changes Python attributes in its forward.
        """
        for layer in layers:
            if layer in self.counting:
                raise InputError(
                    f"{where}: computes layer {self.names[layer]!r} again, which changes Python"
                    " attributes in its forward, need one whose second forward changes nothing."
                    " Keep what it counts in a buffer, or keep the layer: --recompute off."
                )

    def digest(self) -> str:
        """What `task_digest` is: names, shapes and dtypes of all that a plan depends on."""
        fed = {"fed": [list(indices) for indices in self.fed]} if any(self.fed) else {}
        names = ("autocast", "accumulate", "master_weights", "compile")
        given = {name: str(value) for name in names if (value := getattr(self, name))}
        return digest(
            fed
            | given
            | {
                "microbatch_size": self.microbatch_size,
                "boundaries": [
                    [[list(spec.shape), spec.dtype] for spec in boundary]
                    for boundary in self.boundaries
                ],
                "layers": [
                    {
                        "name": name,
                        "parameters": [
                            [fqns[local], list(value.shape), str(value.dtype)]
                            for local, value in layer.named_parameters()
                        ],
                    }
                    for name, layer, fqns in zip(self.names, self.layers, self.fqns, strict=True)
                ],
            }
        )
