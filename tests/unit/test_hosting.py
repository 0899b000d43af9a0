"""What a rank builds: its own layers as they always were, of all others shapes alone."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn, optim
from torch.nn import functional

from pipeplan import hosting
from pipeplan.capture import split
from pipeplan.capture.partition.graph_layers import GraphLayer
from pipeplan.capture.split import module_of
from pipeplan.empty import is_empty
from pipeplan.errors import InputError
from pipeplan.hosting import Draft, Hosted, states_of
from pipeplan.plan import Plan
from pipeplan.repeat import fingerprint, seed_all
from pipeplan.runtime.transport.backend import device_of
from pipeplan.split_model import SplitModel
from pipeplan.task import Task
from tests import pipelines
from tests.initialised import MODELS, WIDTH
from tests.odd_models import Square

GPUS = 2


def task_of(model: nn.Module | list[nn.Module], **more: object) -> Task:
    """`model` on rows of numbers."""
    batch = torch.ones(3, WIDTH), torch.zeros(3, 1)
    return Task(
        model=model,
        loss=lambda output, target: functional.mse_loss(output.float().mean(-1, True), target),
        optimizer=lambda parameters: optim.SGD(parameters, lr=0.1),
        data=lambda _: batch,
        **more,  # type: ignore[arg-type]
    )


class Net(nn.Module):
    """Exported; one parameter that no layer uses, one that both ends share."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.unused = nn.Parameter(torch.randn(7))
        self.norm = nn.BatchNorm1d(WIDTH)
        self.scale = nn.Buffer(torch.rand(WIDTH))

    def forward(self, rows: Tensor) -> Tensor:
        for block in self.blocks:
            rows = torch.tanh(block(rows)) * self.scale
        return self.norm(rows)


class TiedEnds(nn.Module):
    """The first and the last layer share their weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.last.weight = self.first.weight

    def forward(self, rows: Tensor) -> Tensor:
        return self.last(torch.tanh(self.middle(torch.tanh(self.first(rows)))))


def rows(name: str) -> Task:
    """A row of layers of which each is made as in `initialised`."""
    model = MODELS[name]()
    assert isinstance(model, nn.Sequential)
    return task_of(model)


MAKERS: dict[str, Callable[[], Task]] = {
    "exported": lambda: task_of(Net()),
    "double": lambda: replace(task_of(_wide()), data=lambda _: (_ROWS.double(), _ZEROS)),
    "tied copies": lambda: task_of(TiedEnds(), tied="synchronize"),
    "list": lambda: task_of([nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)]),
    **{
        name: (lambda name=name: rows(name))  # type: ignore[misc]
        for name in ("drawn", "truncated", "spectral", "weight_norm", "looked_at", "kept")
    },
}


def _wide() -> nn.Module:
    """Cast when it has been drawn, buffers too."""
    row = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)
    return nn.Sequential(*row).double()


_ROWS, _ZEROS = torch.ones(3, WIDTH), torch.zeros(3, 1)


def seeded(make: Callable[[], Task]) -> Callable[[], Task]:
    """`make` from the same random state at each call."""

    def anew() -> Task:
        seed_all(5)
        return make()

    return anew


def plan_for(make: Callable[[], Task]) -> Plan:
    """Two GPUs, half of the layers each, for the task's digest."""
    return planned(make())[0]


def planned(task: Task, *, evaluates: bool = False) -> tuple[Plan, SplitModel]:
    """The plan, and the layers of the task's whole model."""
    model = split(task, evaluates=evaluates)
    count = len(model.layers)
    made = pipelines.plan_of([count // 2], [0, 1], "flush", 2, layers=count)
    layers = tuple(
        one.model_copy(update={"name": name})
        for one, name in zip(made.chain.layers, model.names, strict=True)
    )
    update = {"task_digest": model.digest(), "tied": task.tied, "layers": layers}
    changed = made.chain.model_copy(update=update)
    plan = made.model_copy(update={"chain": changed, "task_digest": model.digest()})
    return plan, model


def hosted_by(
    make: Callable[[], Task],
    gpu: int,
    said: list[str] | None = None,
    plan: Plan | None = None,
    *,
    evaluates: bool = False,
) -> Hosted:
    """What `gpu` builds of the task, with values from the seed."""
    lines: list[str] = [] if said is None else said
    plan = plan or plan_for(seeded(make))
    draft = Draft(seeded(make), plan, lines.append, evaluates=evaluates)
    return draft.hosted(gpu, seeded=True, rest=gpu == 0)


@pytest.mark.parametrize("name", MAKERS)
def test_hosted_layers_are_those_of_the_whole_model(name: str) -> None:
    """Parameters and buffers by torch.equal, and the generator goes on from where it would."""
    make = MAKERS[name]
    whole = seeded(make)()
    state = torch.get_rng_state()
    plan, model = planned(whole)
    for gpu in range(GPUS):
        expected = dict(states_of(model, plan, gpu))
        said: list[str] = []
        found = hosted_by(make, gpu, said, plan)
        assert torch.equal(torch.get_rng_state(), state)
        mine = dict(states_of(found.split, plan, gpu))
        assert mine.keys() == expected.keys()
        for each, tensor in mine.items():
            assert torch.equal(tensor, expected[each]), each
        assert not found.blank
        assert not said or name in ("looked_at", "kept", "spectral"), said


class Squaring(nn.Module):
    """Stays a module in the layers: no graph holds the backward of its function."""

    def forward(self, rows: Tensor) -> Tensor:
        return Square.apply(rows)


class Branching(nn.Module):
    """Exported; another way in eval mode, with all of its tensors in both."""

    def __init__(self, middle: nn.Module) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.middle, self.norm = middle, nn.BatchNorm1d(WIDTH)

    def forward(self, rows: Tensor) -> Tensor:
        rows = self.middle(torch.tanh(self.first(rows)))
        return self.last(self.norm(rows if self.training else rows * 2))


@pytest.mark.parametrize(
    ("make", "times"),
    [
        (lambda: task_of(Branching(nn.Tanh())), 1),
        (MAKERS["tied copies"], 1),
        (MAKERS["exported"], 2),
        (lambda: task_of(Branching(Squaring())), 2),
    ],
    ids=["graph", "graph, tied", "draws a buffer", "eager module"],
)
def test_a_graph_is_cut_once(
    make: Callable[[], Task], times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The draft's layers are those of the second build, where they hold nothing but its tensors.

    In both modes they compute what the whole model's compute.
    """
    plan, model = planned(seeded(make)(), evaluates=True)
    cuts: list[Task] = []

    def counted(task: Task, most: int | None = None, *, evaluates: bool) -> SplitModel:
        cuts.append(task)
        return split(task, most, evaluates=evaluates)

    monkeypatch.setattr(hosting, "split", counted)
    for gpu in range(GPUS):
        cuts.clear()
        found = hosted_by(make, gpu, plan=plan, evaluates=True)
        assert len(cuts) == times
        state = dict(module_of(found.task).named_parameters())
        for name, tensor in states_of(found.split, plan, gpu):
            assert tensor is state.get(name, tensor) or found.task.tied == "synchronize"
        stage = next(stage for stage in plan.stages if stage.gpu == gpu)
        for index in range(stage.first, stage.last + 1):
            mine, expected = found.split.layers[index], model.layers[index]
            for mode in (True, False):
                given = torch.rand(found.split.boundaries[index][0].shape)
                assert torch.equal(mine.train(mode)(given), expected.train(mode)(given))


def test_copies_of_shared_weights_are_known_by_the_parameters_of_the_user() -> None:
    """Also where the first layer, whose parameter it is, belongs to another rank."""
    made: list[nn.Parameter] = []

    def make() -> Task:
        model = TiedEnds()
        made[:] = [model.first.weight]
        return task_of(model, tied="synchronize")

    split = hosted_by(make, 1).split
    (copied,) = split.originals
    assert split.originals[copied] is made[0]
    assert any(copied is parameter for parameter in split.layers[-1].parameters())


def test_what_else_has_memory_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last layer is scaled by a number taken out of the first one, long after it was drawn."""
    monkeypatch.setattr(hosting, "_SAMPLE_BYTES", 0)

    def make() -> Task:
        layers = [nn.Linear(WIDTH, WIDTH) for _ in range(6)]
        layers[5].weight.data.mul_(layers[0].weight.norm().item())
        return task_of(nn.Sequential(*layers))

    said: list[str] = []
    found = hosted_by(make, 1, said)
    assert torch.equal(found.split.layers[5].weight, seeded(make)().model[5].weight)
    (line,) = said
    assert line.startswith("has memory for parameters of others, too (4.00 KiB), such as 0.weight")


def test_others_layers_take_no_memory() -> None:
    """Neither in the layers nor in the user's model, which know each other's tensors."""
    plan = plan_for(seeded(MAKERS["exported"]))
    found = hosted_by(MAKERS["exported"], 1, plan=plan)
    model = module_of(found.task)
    mine = {name for name, _ in states_of(found.split, plan, 1)}
    others = dict(states_of(found.split, plan, 0))
    assert len(others.keys() - mine) >= 4
    assert all(tensor.is_meta for name, tensor in others.items() if name not in mine)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        assert tensor.is_meta == (name not in mine), name
        assert others.get(name, tensor) is tensor or name in mine


def test_who_kept_a_parameter_of_others_finds_no_number_in_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A list beside the modules may hold it: it has its shape and one element's memory."""
    monkeypatch.setattr(hosting, "_SAMPLE_BYTES", 0)
    lists: list[list[nn.Parameter]] = []

    def make() -> Task:
        model = Net()
        lists.append(list(model.parameters()))
        return task_of(model)

    hosted_by(make, 1)
    first = lists[-1][1]
    assert first.shape == (WIDTH, WIDTH)
    assert first.isnan().all()
    assert first.untyped_storage().nbytes() == first.itemsize


def test_the_device_is_known_without_tensors() -> None:
    """A rank may host layers that have none, and then nothing of the model has memory."""

    def make() -> Task:
        return task_of([nn.Linear(WIDTH, WIDTH), nn.Tanh()])

    found = hosted_by(make, 1)
    assert device_of(found.split) == torch.device("cpu")
    assert device_of(replace(found.split, device="cuda:1")) == torch.device("cuda:1")


def test_parameters_that_no_layer_uses_have_their_values_on_the_first_rank() -> None:
    """They are part of the final model."""
    seed_all(5)
    expected = Net().unused
    model = module_of(hosted_by(MAKERS["exported"], 0).task)
    assert torch.equal(model.get_parameter("unused"), expected)


@pytest.mark.parametrize("evaluates", [True, False])
def test_layers_that_are_never_evaluated_have_no_graph_for_it(evaluates: bool) -> None:
    """A launch without validation exports the model once; its layers are the same."""
    make = seeded(MAKERS["exported"])
    plan, whole = planned(make(), evaluates=True)
    draft = Draft(make, plan, pytest.fail, evaluates=evaluates)
    assert draft.split.digest() == whole.digest()
    layer = draft.split.layers[0]
    assert isinstance(layer, GraphLayer)
    assert (layer.in_evaluation is not None) == evaluates


def test_room_without_values_is_said() -> None:
    """Where a checkpoint's values come later, the rank's layers have memory alone."""
    make = seeded(MAKERS["list"])
    plan = plan_for(make)
    draft = Draft(make, plan, pytest.fail)
    found = draft.hosted(0, seeded=False)
    names = [name for name, _ in states_of(found.split, plan, 0)]
    assert [name for name, _ in found.blank] == names
    assert not any(is_empty(tensor) for _, tensor in found.blank)


def test_what_draws_behind_parameters_is_right_without_values_too() -> None:
    """A random tensor that is no parameter is the plain model's, whatever is left out before."""

    class Noisy(nn.Linear):
        def __init__(self) -> None:
            super().__init__(WIDTH, WIDTH)
            self.noise = torch.randn(WIDTH)

        def forward(self, rows: Tensor) -> Tensor:
            return super().forward(rows) + self.noise

    def make() -> Task:
        return task_of([Noisy(), Noisy()])

    expected = seeded(make)().model[1].noise
    draft = Draft(seeded(make), plan_for(seeded(make)), pytest.fail)
    found = draft.hosted(1, seeded=False)
    assert torch.equal(found.split.layers[1].noise, expected)


def test_a_model_that_is_made_once_is_refused() -> None:
    """A cache would hand out parameters that have lost their values."""
    cached: list[Task] = []

    def make() -> Task:
        if not cached:
            cached.append(MAKERS["list"]())
        return cached[0]

    plan = plan_for(seeded(MAKERS["list"]))
    draft = Draft(seeded(make), plan, pytest.fail)
    with pytest.raises(InputError, match=r"got the same parameter '0\.weight' from two calls"):
        draft.hosted(0, seeded=True)


def test_a_model_that_is_there_before_is_used_as_it_is() -> None:
    """Module-level models have their values; that they are whole is said."""
    seed_all(5)
    there = MAKERS["list"]()
    before = copy.deepcopy(module_of(there).state_dict())
    said: list[str] = []
    draft = Draft(lambda: there, plan_for(lambda: there), said.append)
    found = draft.hosted(1, seeded=True)
    assert len(said) == 1
    assert "builds the whole model" in said[0]
    for name, value in module_of(found.task).state_dict().items():
        assert torch.equal(value, before[name])


def test_a_model_that_cannot_be_a_draft_is_built_whole_and_says_why() -> None:
    """A layer whose shapes follow from its weights' values is traced for real, as ever."""

    class Looks(nn.Linear):
        def forward(self, rows: Tensor) -> Tensor:
            count = int(self.weight.abs().sum() > 0) + 1
            return super().forward(rows).repeat(1, count)[:, :WIDTH]

    said: list[str] = []

    def make() -> Task:
        return task_of([Looks(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)])

    found = hosted_by(make, 1, said)
    expected = seeded(make)()
    assert len(said) == 1
    assert "builds the whole model and not only its own layers: " in said[0]
    assert torch.equal(found.split.layers[1].weight, expected.model[1].weight)
    assert torch.equal(found.split.layers[1].bias, expected.model[1].bias)


def test_a_model_on_meta_without_a_source_is_refused() -> None:
    """It has no values; the message names a parameter and both ways out."""

    def make() -> Task:
        with torch.device("meta"):
            layers = [nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)]
        return task_of(layers)

    plan = plan_for(seeded(lambda: task_of([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)])))
    for anew in (True, False):
        draft = Draft(make, plan, pytest.fail, anew=anew)
        with pytest.raises(
            InputError, match=r"'0\.weight' is on the meta device.*weights="
        ) as told:
            draft.hosted(0, seeded=True)
        assert "every rank then builds only what it hosts" in str(told.value)


OTHERS = {
    "shapes": (
        lambda: task_of([nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 4)]),
        "Layers have the plan's names: what differs",
    ),
    "layers": (
        lambda: task_of(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))),
        "got 2 layers .*need 3 layers",
    ),
    "names": (lambda: task_of(Net()), r"Layer 0 is 'blocks\.0.*', the plan's '0:Linear'"),
}


@pytest.mark.parametrize(("make", "why"), OTHERS.values(), ids=OTHERS)
def test_another_model_than_the_plans_is_refused(make: Callable[[], Task], why: str) -> None:
    """The draft has a digest like any model; the message says where they differ."""
    plan = plan_for(seeded(MAKERS["list"]))
    with pytest.raises(InputError, match=f"is not the one the plan was made for: .*{why}"):
        Draft(seeded(make), plan, pytest.fail)


def test_ranks_have_a_sample_of_weights_to_compare() -> None:
    """The same names on every rank, the smallest first, together no larger than the largest."""
    make = MAKERS["exported"]
    seed_all(5)
    values = dict(module_of(make()).named_parameters())
    plan = plan_for(seeded(make))
    for gpu in range(GPUS):
        witness = hosted_by(make, gpu, plan=plan).witness
        assert witness == {name: fingerprint([value]) for name, value in values.items()}


def test_the_sample_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of large models a part: no second parameter of the largest size."""
    monkeypatch.setattr(hosting, "_SAMPLE_BYTES", 0)
    for gpu in range(GPUS):
        names = hosted_by(MAKERS["list"], gpu).witness.keys()
        assert names == {"0.bias", "2.bias"}
