"""The task: how a user names model, loss, optimizer and data. Data only; torch is not imported.

The function that a task reference (`taskref`) names returns one `Task`; `profile` and `launch`
load the same reference the same way.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args, runtime_checkable

from pipeplan import taskref
from pipeplan.callbacks import Callback
from pipeplan.errors import InputError
from pipeplan.taskref import task_function
from pipeplan.units import shown
from pipeplan.validation import Validation

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler


__all__ = ["Callback", "LossScale", "Task", "Tied", "Validation"]
__all__ += ["load", "load_named", "maker", "maker_named", "task_function"]

Tied = Literal["colocate", "synchronize", "transmit"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LossScale:
    """Dynamic loss scaling for fp16: gradients of scale * loss, divided by scale before use.

    A step with a gradient that is not finite is skipped by all ranks and lowers the scale;
    `interval` good steps on end raise it (Micikevicius et al. 2018, section 3.2; the defaults are
    those of torch.amp.GradScaler). Powers of two keep the division exact.

    Raises:
        InputError: if a field is no number that it can be.
    """

    initial: float = 2.0**16
    growth: float = 2.0
    backoff: float = 0.5
    interval: int = 2000

    def __post_init__(self) -> None:
        for name, fits, need in (
            ("initial", lambda scale: 0 < scale < math.inf, "a finite number above 0"),
            ("growth", lambda factor: 1 <= factor < math.inf, "a finite number, at least 1"),
            ("backoff", lambda factor: 0 < factor <= 1, "a number above 0, at most 1"),
            ("interval", lambda steps: steps >= 1 and steps % 1 == 0, "an integer above 0"),
        ):
            _check_number(f"task: loss_scale: {name}", getattr(self, name), fits, need)


def _check_number(what: str, value: Any, fits: Callable[[Any], bool], need: str) -> None:
    """Raises InputError unless `value` is a real number that `fits`."""
    if isinstance(value, bool) or not isinstance(value, Real) or not fits(value):
        raise InputError(f"{what}: got {shown(value)}, need {need}")


@runtime_checkable
class LoadsAhead(Protocol):
    """`Task.data` that may load what comes next."""

    def ahead(self, numbers: Iterator[int]) -> Iterator[Any] | None:
        """The micro-batches `numbers`, loaded before they are asked for; None: they are not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Everything training needs, small enough to write in a minute.

    model: any module; an `nn.Sequential` or a list gives its own layers.
    loss: (output, target) -> scalar tensor, the mean over the micro-batch. The output is the one
        tensor that the model returns, in whatever structure, or that structure where it has
        several. None: the model computes its loss itself, and returns it alone, first in a row,
        or as `loss` of a dict or object, as Hugging Face models do.
    optimizer: parameters -> any `torch.optim.Optimizer`; called once per layer.
    data: micro-batch number -> (input, target), or without a loss the input alone; the same number
        gives the same tensors, on every rank and in every process, so runs can be repeated and
        resumed. Either is a tensor, or tuples, lists and dicts of tensors; a tuple or list as
        input are the model's positional arguments, a dict its named ones. What is no tensor (None,
        numbers, texts) is the same in all micro-batches.
    """

    model: nn.Module | Sequence[nn.Module]
    loss: Callable[[Any, Any], Tensor] | None
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer]
    data: Callable[[int], Any]
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
    """Layers that share a parameter: on one GPU (`colocate`); each with a copy, and gradients
    exchanged once a step (`synchronize`); or the first one has it, and it passes to the others
    with each micro-batch, as activations do (`transmit`: the bits of a plain loop)."""
    weights: str | Path | Callable[[str], Tensor] | None = None
    """Where a run takes its first weights from, by the names they have in the model: a folder of
    safetensors or of torch.distributed.checkpoint, a file of either or of `torch.save`, or name ->
    tensor. Each rank reads what it hosts. None: as the model initialises itself."""
    validation: Validation | None = None
    """What `launch --validate-every` evaluates the newest weights on."""
    callbacks: Sequence[Callback] = ()
    """Hear of a run of `launch`, on one rank: the one with the losses, of the first replica."""

    def __post_init__(self) -> None:
        """Refuse what is made, or not made, where it has to be the other way round.

        Raises:
            InputError: if `model` or `loss` is a class, `optimizer` is one that exists already,
                `clip_norm` is no length, or `loss_scale` is no `LossScale`.
        """
        if self.clip_norm is not None:
            need = "a number above 0, or None to clip nothing"
            _check_number("task: clip_norm", self.clip_norm, lambda norm: norm > 0, need)
        if self.loss_scale is not None and not isinstance(self.loss_scale, LossScale):
            raise InputError(
                f"task: loss_scale: got {shown(self.loss_scale)}, need a LossScale:"
                " LossScale(initial=..)"
            )
        if self.tied not in get_args(Tied):
            need = ", ".join(map(repr, get_args(Tied)))
            raise InputError(f"task: tied: got {shown(self.tied)}, need one of {need}")
        for name, value in (("model", self.model), ("loss", self.loss)):
            if inspect.isclass(value):
                kind = value.__name__
                raise InputError(f"task: {name}: got the class {kind}, need one of it: {kind}(..)")
        if hasattr(self.optimizer, "param_groups") and not inspect.isclass(self.optimizer):
            kind = type(self.optimizer).__name__
            raise InputError(
                f"task: optimizer: got a {kind}, need a function that makes one of the parameters"
                f" of each layer: lambda parameters: {kind}(parameters, ..)"
            )

    @property
    def updates_wait(self) -> bool:
        """Whether each update needs the gradients of all stages: to clip them, or to scale."""
        return self.clip_norm is not None or self.loss_scale is not None

    def microbatch(self, number: int) -> tuple[Any, Any]:
        """(input, target) of micro-batch `number`, whose tensors are fresh copies without holes.

        Copies, because `data` may hand out views of a larger tensor or parts of a data set in
        memory: then the bytes that a stage keeps would not be those of its input. Without a loss
        the target is None.

        Raises:
            InputError: if `data` fails or does not return nested tensors.
        """
        if not callable(self.data):
            raise InputError(
                f"task: data: got a {type(self.data).__name__}, need a function: number of a"
                " micro-batch -> (input, target). pipeplan.batches(..) makes it of a data set or a"
                " DataLoader."
            )
        try:
            given = self.data(number)
        except (Exception, SystemExit) as error:
            said = f"{type(error).__name__}: {error}".rstrip(".: ") + taskref.users_line(error)
            ends = isinstance(error, IndexError | StopIteration) and number > 0
            step = f". {_ENDLESS}" if ends else ""
            raise InputError(f"task: data({number}) failed: {said}{step}") from error
        where = f"task: data({number})"
        if self.loss is None:
            return walked(_fresh, given, where), None
        if not _is_row(given) or len(given) != 2:
            kinds = (
                ", ".join(type(part).__name__ for part in given) if _is_row(given) else "no row"
            )
            raise InputError(
                f"{where}: got {type(given).__name__} ({kinds}), need a tuple (input, target)."
                " A model that computes its loss itself has loss=None and needs no target."
            )
        source, target = given
        return walked(_fresh, source, f"{where}: input"), walked(
            _fresh, target, f"{where}: target"
        )


_ENDLESS = (
    "Data must not end: take the number modulo that of your micro-batches. A run of S steps asks"
    " for S x micro-batches per step x replicas of them; it goes on with --resume."
)


def walked(of_tensor: Callable[[Any, str], Any], value: Any, where: str) -> Any:
    """Nested `value` in plain containers, dicts in the order of their own.

    Args:
        of_tensor: tensor, place -> what comes in its place.
        value: tensors in tuples, lists and mappings (the batches of a tokenizer among them).
        where: its place, for messages.

    Raises:
        InputError: if there is anything else in it than tensors, numbers, texts and None.
    """
    if _is_tensor(value):
        return of_tensor(value, where)
    if isinstance(value, Mapping):
        return {name: walked(of_tensor, value[name], f"{where}[{name!r}]") for name in value}
    if _is_row(value):
        parts = [walked(of_tensor, each, f"{where}[{i}]") for i, each in enumerate(value)]
        if hasattr(value, "_fields"):  # a namedtuple
            return type(value)(*parts)
        return parts if isinstance(value, list) else tuple(parts)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise InputError(
        f"{where}: got a {type(value).__name__}, need a tensor, or tuples, lists and dicts of"
        " tensors. Arrays become tensors with torch.as_tensor."
    )


def _fresh(tensor: Tensor, where: str) -> Tensor:
    if str(tensor.layout) != "torch.strided":
        raise InputError(
            f"{where}: got a tensor of layout {tensor.layout}, need a dense one: .to_dense(), or"
            " its indices and values as two tensors"
        )
    return tensor.detach().clone()


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


def load_named(
    reference: str, seed: int = 0, *, file: str, repeated: Callable[[str], str]
) -> Task:
    """The task that a file's `reference` names; arguments and errors as for `maker_named`."""
    return maker_named(reference, seed, file=file, repeated=repeated)()


def maker(reference: str, seed: int = 0) -> Callable[[], Task]:
    """`load` as a function that makes the task anew at each call; its code is read now.

    Raises:
        InputError: if the reference names nothing; the function raises the rest.
    """
    parts = taskref.parsed(reference)
    return partial(_made, parts, taskref.found(parts), seed)


def maker_named(
    reference: str, seed: int = 0, *, file: str, repeated: Callable[[str], str]
) -> Callable[[], Task]:
    """`maker` for a task that a file's `reference` names, if a file may name it (`taskref`).

    Args:
        reference: what the file says.
        seed: as for `maker`.
        file: who says it, for people.
        repeated: the command that names a task, such as this one, by the user's own word.

    Raises:
        InputError: if the function is not marked, or as `maker` does.
    """
    parts = taskref.parsed(reference)
    function = taskref.found_marked(parts)
    if function is None and parts.place.endswith(".py") and not Path(parts.place).is_file():
        whole = Path(parts.place).is_absolute()
        name = Path(parts.place).name + reference.removeprefix(parts.place)
        command = repeated(f"/path/to/{name if whole else reference}")
        raise InputError(
            f"{file}: names the task {reference!r}, and there is no file {parts.place}"
            f"{'' if whole else ' from this directory'}. Start where the task was profiled, or"
            f" name it with its path, in place of /path/to: {command}"
        )
    if function is None:
        raise InputError(
            f"{file}: names the task {reference!r}, which a file may not: got no function marked"
            " with @pipeplan.task_function, below this directory or in an installed module."
            f" If you know it, name it yourself: {repeated(reference)}"
        )
    return partial(_made, parts, function, seed)


def _made(parts: taskref.Reference, function: Callable[..., object], seed: int) -> Task:
    arguments = dict(parts.arguments)
    signature = inspect.signature(function)
    if "seed" in signature.parameters:
        arguments = {"seed": seed, **arguments}
    try:
        signature.bind(**arguments)
    except TypeError as error:
        raise InputError(
            f"task {parts.text!r}: {parts.name}{signature}: {error}. Arguments are given behind"
            f" the name: {parts.place}:{parts.name}(name=value, ..)"
        ) from None
    try:
        task = function(**arguments)
    except InputError:
        raise
    except (Exception, SystemExit) as error:
        explained = f". {_EXPLAINED}" if f"{Task.__name__}.__init__" in str(error) else ""
        raise InputError(
            f"task {parts.text!r}: {parts.name}() failed: {taskref.error_line(error)}{explained}"
        ) from error
    if not isinstance(task, Task):
        raise InputError(
            f"task {parts.text!r}: got a {type(task).__name__}, need a pipeplan.Task. Let"
            f" {parts.name}() return Task(model=.., loss=.., optimizer=.., data=..). {_EXPLAINED}"
        )
    return task


_EXPLAINED = "`python -m pydoc pipeplan.Task` explains its arguments."
