"""Layers that share what a forward changes are one layer; those that share what stays are not."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import combinations

import pytest
import torch
from torch import Tensor, nn

from pipeplan import tasks
from pipeplan.capture import agreement, split
from pipeplan.capture.fake_tensors.fake_model import weightless_twin
from pipeplan.errors import InputError
from pipeplan.split_model import SplitModel
from pipeplan.task import Task
from pipeplan.testing import reference
from tests import grids, pipelines
from tests.capture_tasks import sgd
from tests.captured import captured

WIDTH = 4
siamese = partial(tasks.siamese, layers=2)


class Average(nn.Module):
    """Subtracts a moving average of what it has seen, which it writes through a view."""

    def __init__(self) -> None:
        super().__init__()
        self.average = nn.Buffer(torch.zeros(WIDTH))

    def forward(self, rows: Tensor) -> Tensor:
        """Moves it."""
        with torch.no_grad():
            self.average[:].mul_(0.9).add_(rows.detach().mean(0), alpha=0.1)
        return rows - self.average.clone()


class Past(Average):
    """Writes past torch's count of writes."""

    def forward(self, rows: Tensor) -> Tensor:
        """Moves it."""
        self.average.data.mul_(0.9).add_(rows.detach().mean(0), alpha=0.1)
        return rows - self.average.clone()


class Replaced(Average):
    """Puts a new tensor there."""

    def forward(self, rows: Tensor) -> Tensor:
        """One more."""
        self.average = self.average + 1
        return rows - self.average


class Statistics(Average):
    """Has statistics without the counter that torch's own norms have."""

    def __init__(self) -> None:
        super().__init__()
        self.deviation = nn.Buffer(torch.ones(WIDTH))

    def forward(self, rows: Tensor) -> Tensor:
        """Which the operation changes without saying so."""
        return nn.functional.batch_norm(rows, self.average, self.deviation, training=True)


class Frozen(nn.Module):
    """Moves a parameter that nobody trains."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Parameter(torch.zeros(WIDTH), requires_grad=False)

    def forward(self, rows: Tensor) -> Tensor:
        """Adds it."""
        with torch.no_grad():
            self.teacher.add_(1)
        return rows + self.teacher.clone()


class Hooked(nn.BatchNorm1d):
    """Stays eager, since a graph has no hooks."""

    def __init__(self) -> None:
        super().__init__(WIDTH)
        self.register_forward_hook(lambda *_: None)


def norm(**how: object) -> nn.Module:
    """A batch norm."""
    return nn.BatchNorm1d(WIDTH, **how)  # type: ignore[arg-type]


CHANGING: dict[str, Callable[[], nn.Module]] = {
    "norm": norm,
    "norm without weights": partial(norm, affine=False),
    "cumulative norm": partial(norm, momentum=None),
    "statistics": Statistics,
    "average": Average,
    "average past counting": Past,
    "replaced": Replaced,
    "frozen parameter": Frozen,
}
STAYING: dict[str, Callable[[], nn.Module]] = {
    "norm as learnt": lambda: norm().eval(),
    "norm without statistics": partial(norm, track_running_stats=False),
    "layer norm": lambda: nn.LayerNorm(WIDTH),
}


class Twice(nn.Module):
    """One module between others, in two places."""

    def __init__(self, shared: nn.Module) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.fourth, self.shared = nn.Linear(WIDTH, WIDTH), shared

    def forward(self, rows: Tensor) -> Tensor:
        """A row of six."""
        rows = self.shared(self.second(self.first(rows)))
        return self.fourth(self.shared(self.third(rows)))


def listed(shared: nn.Module) -> list[nn.Module]:
    """The same as layers."""
    one, two, three, four = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
    return [one, two, shared, three, shared, four]


def sequence(shared: nn.Module) -> nn.Module:
    """The same as a sequence."""
    return nn.Sequential(*listed(shared))


FORMS: dict[str, Callable[[nn.Module], nn.Module | list[nn.Module]]] = {
    "list": listed,
    "sequence": sequence,
    "graph": Twice,
}


def rows(microbatch: int) -> tuple[Tensor, Tensor]:
    """Eight rows."""
    generator = torch.Generator().manual_seed(microbatch)
    return torch.randn(8, WIDTH, generator=generator), torch.zeros(8, WIDTH)


def task_of(model: nn.Module | list[nn.Module]) -> Task:
    """A task around `model`."""
    return Task(model=model, loss=nn.functional.mse_loss, optimizer=sgd, data=rows)


def holders(model: SplitModel) -> dict[int, list[int]]:
    """Which layers have each tensor that no optimizer steps."""
    found: dict[int, list[int]] = {}
    for index, layer in enumerate(model.layers):
        for tensor in [*layer.parameters(), *layer.buffers()]:
            if not tensor.requires_grad:
                found.setdefault(id(tensor), []).append(index)
    return found


def joined(model: SplitModel) -> list[str]:
    """What the notes say of layers that were joined."""
    return [note for note in model.notes if "are one layer" in note]


NO_GRAPH = "replaced", "average past counting"
"""What torch exports in no graph."""
NO_ESTIMATE = "cumulative norm"
"""Its forward looks at a value."""


ROWS = ["list", "sequence"]
"""Forms that give what they hold as layers: one of them for each kind, the other when long."""


@grids.each_value(form=ROWS, kind=list(CHANGING))
def test_what_changes_is_of_one_layer_of_a_row(form: str, kind: str) -> None:
    """So is all in between; outer layers stay apart; an estimate has the same layers."""
    check_one_layer(form, kind)


@pytest.mark.parametrize("kind", [kind for kind in CHANGING if kind not in NO_GRAPH])
def test_what_changes_is_of_one_layer_of_a_graph(kind: str) -> None:
    """So is all in between, too."""
    check_one_layer("graph", kind)


def check_one_layer(form: str, kind: str) -> None:
    """The one that has what `kind` changes, where the model is made in this `form`."""
    task = task_of(FORMS[form](CHANGING[kind]()))
    made = split(task)
    assert all(len(layers) == 1 for layers in holders(made).values())
    assert len(made.layers) >= 3
    assert agreement(made, task).largest_relative_difference == 0
    if kind != NO_ESTIMATE:
        twin, _ = weightless_twin(task)
        assert split(twin).digest() == made.digest()


def test_the_note_names_layers_and_buffer_and_the_way_out() -> None:
    """One line for each layer that comes of several."""
    (note,) = joined(split(task_of(listed(norm()))))
    assert note == (
        "layers 2:BatchNorm1d to 4:BatchNorm1d (3 in all) are one layer: their forwards change"
        " '2.running_mean' (one of 3), which several of them have, so no other micro-batch may"
        " come between them. Give each a module of its own to have them apart, or let forwards"
        " leave it as it is (a BatchNorm in eval mode, or with track_running_stats=False)"
    )
    both = norm()
    (note,) = joined(split(task_of([both, nn.Linear(WIDTH, WIDTH), both])))
    assert "(3 in all), all of the model, are one layer: " in note


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", STAYING)
def test_what_stays_may_be_of_several_layers(form: str, kind: str) -> None:
    """No cut is lost."""
    made = split(task_of(FORMS[form](STAYING[kind]())))
    assert not joined(made)
    assert len(made.layers) == (4 if form == "graph" else 6)


def test_a_norm_that_stays_eager_is_of_one_layer() -> None:
    """No operation of the graph shows its statistics."""
    made = split(task_of(Twice(Hooked())))
    assert any("has a hook" in note for note in made.notes)
    assert len(joined(made)) == 1
    assert all(len(layers) == 1 for layers in holders(made).values())


def test_fewer_layers_are_made_of_joined_ones() -> None:
    """`launch` asks for as many as the plan has; a smaller number parts nothing, either."""
    every = split(siamese())
    assert len(every.layers) == 5
    assert len(joined(every)) == 1
    assert split(siamese(), 5).digest() == every.digest()
    fewer = split(siamese(), 3)
    assert len(fewer.layers) == 3
    assert all(len(layers) == 1 for layers in holders(fewer).values())


def test_layers_that_run_in_order_stay_apart() -> None:
    """A module that is rematerialized on one device loses no layer."""
    assert len(split(tasks.siamese(), in_order=True).layers) == 12
    assert len(split(task_of(listed(norm())), in_order=True).layers) == 6


def test_cuts_that_the_run_refuses_are_none() -> None:
    """Both towers cut, as the planner did: refused at the end of a step; no plan can say so."""
    task = tasks.siamese()
    apart = split(task, in_order=True)
    plan = pipelines.plan_of([3, 4, 7], [0, 1, 0, 1], "flush", 3, layers=len(apart.layers))
    with pytest.raises(InputError, match=r"buffer 'trunk.*': changes in the forward of a layer"):
        pipelines.train(plan, pipelines.pattern_of(plan, period=1), apart, task, 1)
    first, *others = split(tasks.siamese()).fqns
    assert {name.partition(".")[0] for name in first.values()} == {"trunk"}
    assert {name.partition(".")[0] for fqns in others for name in fqns.values()} == {"head"}


@pytest.mark.parametrize("gpus", [[0, 0], [0, 1, 0]])
def test_every_cut_around_shared_norms_trains(gpus: list[int]) -> None:
    """Weights and statistics are the loop's, with many micro-batches in flight."""
    model, task = captured(siamese)
    expected = reference.train_flush(model, task, 2, 3, seed=3)
    for cuts in combinations(range(1, len(model.layers)), len(gpus) - 1):
        model, task = captured(siamese)
        plan = pipelines.plan_of(cuts, gpus, "flush", 3, layers=len(model.layers))
        outcome = pipelines.train(plan, pipelines.pattern_of(plan, period=1), model, task, 2)
        assert outcome.losses == expected.losses
        for name, weight in expected.weights.items():
            assert torch.equal(outcome.weights[name], weight), name
