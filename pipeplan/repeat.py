"""What must come out the same every time and everywhere: a task's weights and its data.

Each rank makes the model and the data for itself. They are one training only where a seed gives
the same weights and a number the same micro-batch, in every process and at every call.
"""

from __future__ import annotations

import hashlib
import io
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from pipeplan.errors import InputError
from pipeplan.nested import tensors_in
from pipeplan.task import Task

Made = TypeVar("Made")

_LOOKED_AT = (0, 1)
"""Numbers of the micro-batches that are asked for twice."""


def seed_all(seed: int) -> None:
    """Seed what models are initialised from: the generators of torch, numpy and Python.

    Whoever makes a task calls it just before, so that the same seed gives the same weights.
    """
    seed_python(seed)
    if torch.accelerator.is_available():
        torch.manual_seed(seed)
    else:  # the same without notes, with stack traces, for devices that never begin
        torch.default_generator.manual_seed(seed)


def seed_python(seed: int) -> None:
    """Seed the generators of Python and numpy."""
    random.seed(seed)
    np.random.seed(seed % 2**32)


@contextmanager
def kept_generators(gpus: Sequence[int] | None = None) -> Iterator[None]:
    """Gives the generators of torch, Python and numpy their states back.

    Args:
        gpus: whose generators; None: those of all, where CUDA is in use: it is not begun here.
    """
    if gpus is None:
        gpus = range(torch.cuda.device_count() if torch.cuda.is_initialized() else 0)
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(gpus):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


def from_here(make: Callable[[], Made]) -> Callable[[], Made]:
    """`make` as a function that starts from the random state of this moment at every call."""
    state = random.getstate(), np.random.get_state(), torch.get_rng_state()
    gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []

    def anew() -> Made:
        random.setstate(state[0])
        np.random.set_state(state[1])
        torch.set_rng_state(state[2])
        if gpus:
            torch.cuda.set_rng_state_all(gpus)
        return make()

    return anew


def check_data(task: Task) -> str:
    """A fingerprint of the first micro-batches, each asked for twice with the other between.

    A second one that cannot be had is left out: a data set may have one micro-batch.

    Raises:
        InputError: if `data` fails for the first one, or gives other tensors the second time.
    """
    first = [_parts(task, number) for number in _LOOKED_AT]
    for number, before in zip(_LOOKED_AT, first, strict=True):
        again = _parts(task, number)
        for part, old, new in zip(("input", "target"), before, again, strict=False):
            if old != new:
                raise InputError(
                    f"task: data({number}): got another {part} at the second call, need the same"
                    " tensors for the same number, at every call and in every process: ranks call"
                    " it on their own, and runs are repeated and resumed by number. Take the"
                    " number as an index into batches made beforehand, or as the seed of a"
                    " generator of its own; or let pipeplan.batches(..) do so with a data set"
                    " or a DataLoader."
                )
    return "".join(part for parts in first for part in parts)


def _parts(task: Task, number: int) -> tuple[str, ...]:
    """Fingerprints of input and target; none where there is no second micro-batch."""
    try:
        pair = task.microbatch(number)
    except InputError:
        if number == _LOOKED_AT[0]:
            raise
        return ()
    return tuple(fingerprint(tensors_in(part)) for part in pair)


def fingerprint(tensors: Iterable[Tensor]) -> str:
    """A hash of shapes, dtypes and all bits, wherever the tensors are."""
    made = hashlib.sha256()
    for tensor in tensors:
        here = tensor.detach() if tensor.is_meta else tensor.detach().cpu()
        made.update(f"{tuple(here.shape)} {here.dtype};".encode())
        if not here.is_meta:
            made.update(_bytes(here))
    return made.hexdigest()[:16]


def _bytes(tensor: Tensor) -> memoryview:
    try:
        return tensor.contiguous().flatten().view(torch.uint8).numpy().data
    except RuntimeError:  # a layout or type of which there is no view as bytes
        file = io.BytesIO()
        torch.save(tensor, file)
        return file.getbuffer()
