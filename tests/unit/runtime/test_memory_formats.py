"""Tensors lie in memory behind a boundary as they do before it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn, optim

from pipeplan.capture import profile_task, split
from pipeplan.layout import arrived, is_dense, kept, passing_order, travelling
from pipeplan.plan import Semantics
from pipeplan.runtime.transport.endpoints import empty, gradient_specs
from pipeplan.runtime.transport.send_queue import raw_bytes
from pipeplan.task import Task
from tests.captured import lasting
from tests.unit.runtime import test_memory
from tests.zoo import trial
from tests.zoo.catalog import ARCHITECTURES

LAST = torch.channels_last


def images(number: int) -> tuple[Tensor, Tensor]:
    """Four images whose channels lie side by side, and their classes."""
    source = torch.Generator().manual_seed(number)
    made = torch.randn(4, 3, 16, 16, generator=source)
    return made.to(memory_format=LAST), torch.randint(5, (4,), generator=source)


def convolutions(form: torch.memory_format = LAST) -> Task:
    """A row of layers, so that no graph says how what passes lies in memory."""
    layers = [nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, 1, 1)]
    behind = [nn.ReLU(), nn.Conv2d(8, 8, 3, 2, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return Task(
        model=nn.Sequential(*layers, *behind, nn.Linear(8, 5)).to(memory_format=form),
        loss=nn.functional.cross_entropy,
        optimizer=lambda parameters: optim.SGD(parameters, lr=0.1, momentum=0.9),
        data=lambda n: (images(n)[0].contiguous(memory_format=form), images(n)[1]),
    )


MADE: dict[str, Callable[[], Tensor]] = {
    "contiguous": lambda: torch.randn(2, 3, 4),
    "channels last": lambda: torch.randn(2, 3, 4, 5).to(memory_format=LAST),
    "transposed": lambda: torch.randn(3, 4).t(),
    "scalar": lambda: torch.tensor(3.0),
}


@pytest.mark.parametrize("kind", MADE)
def test_a_message_keeps_the_order_in_memory(kind: str) -> None:
    """What travels is a contiguous view, of which the same numbers with the same strides come."""
    tensor = MADE[kind]()
    order = passing_order(tensor)
    message = travelling(tensor, order)
    assert message.is_contiguous()
    assert message.data_ptr() == tensor.data_ptr()
    there = arrived(message.clone(), order)
    assert torch.equal(there, tensor)
    assert there.stride() == tensor.stride() == kept(tensor).stride()


def test_what_has_holes_is_copied() -> None:
    """No message can leave out what lies between."""
    tensor = torch.randn(4, 6)[:, ::2]
    assert passing_order(tensor) == ()
    assert torch.equal(travelling(tensor, ()), tensor)
    assert kept(tensor).is_contiguous()


def conjugate() -> Tensor:
    """One whose memory holds the numbers that it is the conjugate of."""
    return torch.randn(3, 4, dtype=torch.complex64).conj()


LAZY: dict[str, Callable[[], Tensor]] = {
    "conjugated": conjugate,
    "negated": lambda: torch.randn(1, dtype=torch.complex64).conj().imag,
    "conjugated and transposed": lambda: conjugate().t(),
}


@pytest.mark.parametrize("kind", LAZY)
def test_what_is_conjugated_when_it_is_read_is_so_in_its_message(kind: str) -> None:
    """The bytes that travel are the numbers; the tensor's own memory has others."""
    tensor = LAZY[kind]()
    assert tensor.is_conj() or tensor.is_neg()
    assert not is_dense(tensor)
    message = travelling(tensor, passing_order(tensor))
    sent = torch.frombuffer(bytearray(raw_bytes(message)), dtype=tensor.dtype)
    assert torch.equal(sent.view(tensor.shape), tensor)


def test_boundaries_say_in_which_order_tensors_travel() -> None:
    """Buffers are made alike; gradients, whose order no boundary knows, are contiguous."""
    model = split(convolutions())
    (spec,) = model.boundaries[1]
    assert spec.order == (0, 2, 3, 1)
    assert empty(spec).is_contiguous(memory_format=LAST)
    (back,) = gradient_specs([spec], 1)
    assert empty(back).is_contiguous()
    plain = split(convolutions(torch.contiguous_format))
    assert {each.order for boundary in plain.boundaries[1:] for each in boundary} == {()}
    assert plain.digest() != model.digest()


def test_training_has_the_bits_of_one_process() -> None:
    """Kernels that add along channels find them side by side on every GPU."""
    assert trial.tried(ARCHITECTURES["channels last"].make).verdict == "equal"


@pytest.mark.parametrize("semantics", ["flush", "2bw"])
def test_peaks_are_as_planned(semantics: Semantics) -> None:
    """To the byte: layers are measured on tensors that lie as they do in a run."""
    chain = profile_task(convolutions(), repeats=1, warmup=0)
    plan = test_memory.planned(lasting(chain, halves=True), 2, semantics, 1, seed=5)
    peaks = [row.peak_bytes for row in plan.memory]
    assert test_memory.measured(plan, convolutions()) == peaks
