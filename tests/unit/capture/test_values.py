"""Models whose sizes or branches depend on values, which torch.export does not like."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from pipeplan.capture import agreement, split
from pipeplan.errors import InputError
from pipeplan.task import Task
from tests import pipelines

WIDTH = 6


def data(number: int) -> dict[str, Tensor]:
    """Rows, classes, and which of them count: more or less of them by number."""
    rows = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(number))
    return {"rows": rows, "labels": torch.arange(8) % 3, "here": torch.arange(8) <= number + 2}


def task_of(model: nn.Module) -> Task:
    """With the model's own loss."""
    return Task(model=model, loss=None, optimizer=pipelines.OPTIMIZERS["sgd"], data=data)


class Chosen(nn.Module):
    """Judges some rows, as many as a mask says."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, rows: Tensor, labels: Tensor, here: Tensor) -> dict[str, Tensor]:
        """The loss of rows that count."""
        for part in self.parts:
            rows = torch.tanh(part(rows))
        return {"loss": cross_entropy(self.head(rows)[here], labels[here])}


def test_a_size_of_values_stays_inside_of_a_layer() -> None:
    """All before it is cut; micro-batches with other sizes train as the model does."""
    task = task_of(Chosen())
    found = split(task)
    assert len(found.layers) == 5
    assert any("stays inside of one layer, whose figures are those of" in n for n in found.notes)
    assert agreement(found, task).is_exact


class Halved(Chosen):
    """Divides its sizes as tensors (Longformer does so)."""

    def forward(self, rows: Tensor, labels: Tensor, here: Tensor) -> dict[str, Tensor]:
        """The same of rows in two halves."""
        half = torch.div(rows.shape[1], 2, rounding_mode="trunc")
        halves = rows.view(rows.shape[0], 2, half)
        loss: Tensor = super().forward(halves.flip(1).flatten(1), labels, here)["loss"]
        return {"loss": loss}


def test_numbers_divided_as_tensors_are_known() -> None:
    """A quotient of sizes is a size."""
    task = task_of(Halved())
    assert agreement(split(task), task).is_exact


class Wavers(nn.Module):
    """Branches on values, and says how."""

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Linear(WIDTH, WIDTH)

    def forward(self, rows: Tensor) -> tuple[Tensor, object]:
        """Something that is no plain value comes with it, which fits into no graph."""
        return (self.part(rows) if rows.sum() > 0 else rows - self.part(rows)), object()


class Stack(nn.Module):
    """Runs modules of a list, which is called by nobody."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.ModuleList([Wavers(), Wavers()])

    def forward(self, rows: Tensor) -> Tensor:
        """Without what fits into no graph."""
        for part in self.rows:
            rows, _ = part(rows)
        return rows


class Told(nn.Module):
    """Branches on what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Linear(WIDTH, WIDTH)

    def forward(self, rows: Tensor, positive: bool) -> Tensor:
        """One way or the other."""
        return self.part(rows) if positive else rows - self.part(rows)


class Tells(nn.Module):
    """Tells the modules of a list what it has found out from values."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.ModuleList([Told(), Told()])

    def forward(self, rows: Tensor) -> Tensor:
        """All of them the same."""
        positive = (rows.sum() > 0).item()
        for part in self.rows:
            rows = part(rows, positive)
        return rows


class Inside(Chosen):
    """Holds a stack, or another module."""

    def __init__(self, stack: type[nn.Module] = Stack) -> None:
        super().__init__()
        self.stack = stack()

    def forward(self, rows: Tensor, labels: Tensor, here: Tensor) -> dict[str, Tensor]:
        """The stack first."""
        return super().forward(self.stack(rows), labels, here)


@pytest.mark.parametrize(
    ("stack", "why"), [(Stack, "takes or returns a"), (Tells, "is told a number or a choice")]
)
def test_what_fits_into_no_graph_stays_with_what_calls_it(
    stack: type[nn.Module], why: str
) -> None:
    """Not with the list that holds it, for ever: that is never called."""
    task = task_of(Inside(stack))
    found = split(task)
    assert any(f"module 'stack' holds stack.rows.0, which {why}" in n for n in found.notes)
    assert len(found.layers) == 6
    assert agreement(found, task).is_exact


class Casts(nn.Module):
    """Casts a part of it while it runs (Switch Transformers' router does so)."""

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Linear(WIDTH, WIDTH)

    def forward(self, rows: Tensor) -> Tensor:
        """Of the part as it is, here."""
        self.part = self.part.to(torch.float32)
        return self.part(rows)


def test_what_acts_on_a_part_is_to_blame() -> None:
    """The module that casts stays as it is, not every linear layer."""
    task = task_of(Inside(Casts))
    found = split(task)
    assert any("module 'stack' cannot be exported (at test_values" in n for n in found.notes)
    assert not any("more like it" in n for n in found.notes)
    assert agreement(found, task).is_exact


class Asks(Inside):
    """Looks at values where nobody exports it (Hugging Face's masks do so)."""

    def forward(self, rows: Tensor, labels: Tensor, here: Tensor) -> dict[str, Tensor]:
        """The same."""
        found = super().forward(rows, labels, here)
        if not torch.compiler.is_exporting() and found["loss"] < 0:
            raise ValueError("no loss")
        return found


def test_an_export_that_is_tried_again_has_the_same_calls() -> None:
    """Those of modules that stay as they are, from the first one on."""
    task = task_of(Asks(Casts))
    found = split(task)
    assert any("runs as for an export" in note for note in found.notes)
    assert any("module 'stack' cannot be exported (at test_values" in n for n in found.notes)
    assert agreement(found, task).is_exact


class Refuses(Chosen):
    """Checks its labels in its own forward."""

    def forward(self, rows: Tensor, labels: Tensor, here: Tensor) -> dict[str, Tensor]:
        """The same."""
        if labels.max() > 3:
            raise ValueError("a class too many")
        return super().forward(rows, labels, here)


class Drawn(Chosen):
    """Its loss is of a distribution, which checks its arguments."""

    def forward(self, rows: Tensor, labels: Tensor, here: Tensor) -> dict[str, Tensor]:
        """Of all rows."""
        mean = self.head(self.parts[0](rows))
        # torch.compile changes the default for the process, so an earlier test may have.
        drawn = torch.distributions.Normal(mean, mean.exp(), validate_args=True)
        return {"loss": -drawn.log_prob(mean + 1).mean()}


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (Refuses, r"at test_values.py:\d+ \(forward\), .* Or leave the labels out of its input"),
        (Drawn, r"at test_values.py:\d+ \(forward\), .* check their arguments: validate_args=F"),
    ],
)
def test_the_models_own_branch_is_refused(kind: type[nn.Module], says: str) -> None:
    """With the line, and the setting that avoids it."""
    with pytest.raises(InputError, match=says):
        split(task_of(kind()))
