"""The task: how a user names model, loss, optimizer and data. Data only; torch is not imported.

A task reference is `package.module:function` or `path/to/file.py:function`, with or without
arguments as in `pipeplan.tasks:gpt2(size='small', batch=4)`; the function returns one `Task`.
`profile` and `launch` load the same reference the same way.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal
from urllib.error import URLError

from pipeplan.document import digest
from pipeplan.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler

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
    optimizer: parameters -> any `torch.optim.Optimizer`; called once per stage.
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
    tied: Tied = "colocate"
    """Layers that share a parameter: on one GPU, or each with a copy and gradients exchanged."""

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
    """The task that `reference` names. The caller seeds torch before, so weights repeat.

    A function with a parameter `seed` gets it.

    Raises:
        InputError: if the reference names nothing, or the function fails or returns no Task.
    """
    place, name, arguments = _parsed(reference)
    function = getattr(_module(place, reference), name, None)
    if not callable(function):
        raise InputError(f"task {reference!r}: {place} has no function {name!r}")
    if "seed" in inspect.signature(function).parameters:
        arguments = {"seed": seed, **arguments}
    try:
        task = function(**arguments)
    except InputError:
        raise
    except Exception as error:
        raise InputError(f"task {reference!r}: {name}() failed: {_told(error)}") from error
    if not isinstance(task, Task):
        raise InputError(f"task {reference!r}: got a {type(task).__name__}, need a pipeplan Task")
    return task


def _parsed(reference: str) -> tuple[str, str, dict[str, object]]:
    """Place, function and keyword arguments, which are Python literals.

    Raises:
        InputError: if the reference has another form.
    """
    found = re.fullmatch(r"(?P<place>.+?):(?P<name>[^\W\d]\w*)(?P<arguments>\(.*\))?", reference)
    arguments = _literals(found["arguments"] or "()") if found else None
    if found is None or arguments is None:
        raise InputError(
            f"task: got {reference!r}, need package.module:function or path/to/file.py:function,"
            " where arguments are given as function(name=value, ...) with plain values"
        )
    return found["place"], found["name"], arguments


def _literals(text: str) -> dict[str, object] | None:
    """What stands in `(name=value, ...)`; None if it is anything else."""
    try:
        call = ast.parse(f"f{text}", mode="eval").body
        if not isinstance(call, ast.Call) or call.args or not isinstance(call.func, ast.Name):
            return None
        return {str(word.arg): ast.literal_eval(word.value) for word in call.keywords if word.arg}
    except (SyntaxError, ValueError):
        return None


_FOLDERS: set[Path] = set()
"""Where task files of this process lie."""


def _module(place: str, reference: str) -> object:
    try:
        if not place.endswith(".py"):
            if "" not in sys.path and str(Path.cwd()) not in sys.path:
                sys.path.insert(0, str(Path.cwd()))
            return importlib.import_module(place)
        path = Path(place).resolve()
        if not path.is_file():
            raise InputError(f"task {reference!r}: no file {place}. Check the path.")
        spec = importlib.util.spec_from_file_location(f"pipeplan_task_{path.stem}", path)
        if spec is None or spec.loader is None:
            raise InputError(f"task {reference!r}: {place} is no Python file")
        module = importlib.util.module_from_spec(spec)
        _look_beside(path.parent)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        return module
    except InputError:
        raise
    except Exception as error:
        raise InputError(
            f"task {reference!r}: importing {place} failed: {_told(error)}"
        ) from error


def _look_beside(folder: Path) -> None:
    """Let a task file find the modules beside it first, as `python file.py` does.

    A module of the same name that lies beside another task file is forgotten, or it would be taken
    for this one.
    """
    beside = {each.stem if each.suffix == ".py" else each.name for each in folder.iterdir()}
    for name, module in tuple(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if not file or name.partition(".")[0] not in beside or Path(file).is_relative_to(folder):
            continue
        if any(Path(file).is_relative_to(other) for other in _FOLDERS):
            del sys.modules[name]
    if str(folder) in sys.path:
        sys.path.remove(str(folder))
    sys.path.insert(0, str(folder))
    _FOLDERS.add(folder)


def _told(error: Exception) -> str:
    """`error` in one line, with a next step where it comes from a download that failed."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    chain: list[BaseException] = [error]
    while (before := chain[-1].__cause__ or chain[-1].__context__) and before not in chain:
        chain.append(before)
    if not any(map(_is_download, chain)):
        return text
    return (
        f"{text.rstrip('.')}. It needs a download, which failed: fetch the files beforehand, or"
        " build the model from a configuration, with random weights."
    )


def _is_download(error: BaseException) -> bool:
    library = type(error).__module__.partition(".")[0]
    return isinstance(error, ConnectionError | URLError) or library in _DOWNLOADERS


_DOWNLOADERS = {"huggingface_hub", "requests", "httpx", "urllib3", "aiohttp"}
"""Libraries whose errors come from downloads."""


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

    def fed_to(self, layer: int) -> tuple[int, ...]:
        """Which tensors of boundary 0 `layer` (0-based) gets behind its boundary."""
        return self.fed[layer] if self.fed else ()

    def digest(self) -> str:
        """What `task_digest` is: names, shapes and dtypes of all that a plan depends on."""
        fed = {"fed": [list(indices) for indices in self.fed]} if any(self.fed) else {}
        return digest(
            fed
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
