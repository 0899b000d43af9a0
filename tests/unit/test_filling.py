"""First weights by name: what a rank hosts gets its values, what does not fit is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from pipeplan.capture.split import module_of
from pipeplan.errors import InputError
from pipeplan.filling import fill
from pipeplan.hosting import Draft, Hosted, states_of
from pipeplan.plan import Plan
from pipeplan.task import Task
from tests.initialised import WIDTH
from tests.unit.test_hosting import TiedEnds, plan_for, seeded, task_of

Weights = str | Path | Callable[[str], Tensor]


class Buffered(nn.Module):
    """Buffers that a state_dict has, and one that it has not."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("scale", torch.rand(WIDTH), persistent=False)

    def forward(self, rows: Tensor) -> Tensor:
        for layer in self.layers:
            rows = torch.tanh(layer(rows)) * self.scale
        return self.norm(rows)


def row() -> Task:
    """Two layers."""
    return task_of(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)))


def other(make: Callable[[], Task]) -> dict[str, Tensor]:
    """Weights that the seed of the tasks does not give."""
    torch.manual_seed(99)
    state = module_of(make()).state_dict()
    return {name: torch.randn_like(v) if v.is_floating_point() else v for name, v in state.items()}


def filled(make: Callable[[], Task], weights: Weights, gpu: int = 1) -> tuple[Hosted, Plan]:
    """What `gpu` hosts of the task, with values from `weights`."""
    plan = plan_for(seeded(make))
    draft = Draft(seeded(lambda: _with(make(), weights)), plan, pytest.fail)
    hosted = draft.hosted(gpu, seeded=False)
    fill(hosted, plan, gpu)
    return hosted, plan


def _with(task: Task, weights: Weights) -> Task:
    fields = {name: getattr(task, name) for name in Task.__dataclass_fields__}
    return Task(**{**fields, "weights": weights})


def check(make: Callable[[], Task], weights: Weights, expected: dict[str, Tensor]) -> None:
    """Both GPUs have what `load_state_dict(expected)` gives the whole model."""
    whole = module_of(seeded(make)())
    whole.load_state_dict(expected)
    named = dict((*whole.named_parameters(), *whole.named_buffers()))
    for gpu in range(2):
        hosted, plan = filled(make, weights, gpu)
        states = dict(states_of(hosted.split, plan, gpu))
        assert states
        for name, tensor in states.items():
            assert torch.equal(tensor, named[name]), name
            assert tensor.dtype == named[name].dtype


def saved(folder: Path, values: object) -> Path:
    """The path of `values`, written by torch.save."""
    torch.save(values, folder / "first.pt")
    return folder / "first.pt"


def test_buffers_and_parameters_of_all_kinds(tmp_path: Path) -> None:
    """Running statistics are read, buffers of no state_dict keep what the code gives them."""

    def make() -> Task:
        return task_of(Buffered())

    check(make, saved(tmp_path, other(make)), other(make))


def test_values_of_another_type_are_converted(tmp_path: Path) -> None:
    """As load_state_dict does."""
    values = {name: value.double() for name, value in other(row).items()}
    check(row, saved(tmp_path, values), values)


def test_a_function_is_asked_for_what_is_hosted() -> None:
    """And for nothing else."""
    values, asked = other(row), []

    def give(name: str) -> Tensor:
        asked.append(name)
        return values[name]

    hosted, plan = filled(row, give)
    assert asked == ["1.weight", "1.bias"]
    for name, tensor in states_of(hosted.split, plan, 1):
        assert torch.equal(tensor, values[name])


@pytest.mark.parametrize("left_out", ["first.weight", "last.weight"])
def test_a_tied_weight_is_found_by_either_name(tmp_path: Path, left_out: str) -> None:
    """Files have it once; both copies get it."""

    def make() -> Task:
        return task_of(TiedEnds(), tied="synchronize")

    values = other(make)
    values["last.weight"] = values["first.weight"]
    fewer = {name: value for name, value in values.items() if name != left_out}
    path = tmp_path / "one.safetensors"
    save_file(fewer, path)
    check(make, path, values)


def test_files_of_a_folder_without_an_index(tmp_path: Path) -> None:
    """All safetensors files in it."""
    values = other(row)
    for number in range(2):
        part = {k: v for k, v in values.items() if k.startswith(str(number))}
        save_file(part, tmp_path / f"part{number}.safetensors")
    check(row, tmp_path, values)


def test_a_model_on_meta_gets_its_values(tmp_path: Path) -> None:
    """In a function that makes it each time, or made once by the user."""
    values = other(row)
    path = saved(tmp_path, values)

    def on_meta() -> Task:
        return _with(task_of(module_of(row()).to("meta")), path)

    plan = plan_for(seeded(row))
    for anew in (True, False):
        draft = Draft(on_meta, plan, pytest.fail, anew=anew)
        hosted = draft.hosted(1, seeded=False)
        fill(hosted, plan, 1)
        for name, tensor in states_of(hosted.split, plan, 1):
            assert torch.equal(tensor, values[name]), name


CASES: dict[str, tuple[Callable[[dict[str, Tensor]], object], str]] = {
    "missing": (
        lambda values: {k: v for k, v in values.items() if k != "1.bias"},
        r"has no '1\.bias', need it",
    ),
    "unknown": (
        lambda values: values | {"2.bias": torch.ones(1), "3.bias": torch.ones(1)},
        r"has '2\.bias' and 1 more, which the model does not know",
    ),
    "shape": (
        lambda values: values | {"1.bias": torch.ones(1)},
        r"'1\.bias': got shape \[1\], need \[32\]",
    ),
    "no state_dict": (
        lambda values: {"model": values, "step": 3},
        "got a dict that is no state_dict, need names with tensors",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_source_that_does_not_fit_is_refused_by_name(tmp_path: Path, case: str) -> None:
    """The message names the source, the tensor, what it has and what is needed."""
    change, message = CASES[case]
    path = saved(tmp_path, change(other(row)))
    with pytest.raises(InputError, match=message) as told:
        filled(row, path)
    assert str(told.value).startswith(f"task: weights {path}: ")


def test_what_others_host_is_not_missed(tmp_path: Path) -> None:
    """A rank looks for its own names."""
    path = saved(tmp_path, {k: v for k, v in other(row).items() if k.startswith("1")})
    filled(row, path)
    with pytest.raises(InputError, match=r"has no '0\.weight'"):
        filled(row, path, gpu=0)


def test_places_without_weights_are_refused(tmp_path: Path) -> None:
    """No file, an empty folder, a file of something else, an index that leads elsewhere."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "text").write_text("not weights")
    (tmp_path / "away").mkdir()
    index = {"weight_map": {"0.weight": "../elsewhere.safetensors"}}
    (tmp_path / "away" / "model.safetensors.index.json").write_text(json.dumps(index))
    for place, message in {
        "none": "got no file, need a folder with safetensors",
        "empty": "got a folder with none of these, need",
        "text": "cannot be read: .*need a folder with safetensors",
        "away": r"got the file '\.\./elsewhere\.safetensors', need one beside it",
    }.items():
        with pytest.raises(InputError, match=message):
            filled(row, tmp_path / place)


def test_a_function_that_gives_something_else_is_refused() -> None:
    """A tensor, or a KeyError, which means that there is none."""
    with pytest.raises(InputError, match=r"'1\.weight': got a float, need a tensor"):
        filled(row, lambda _: 1.0)  # type: ignore[arg-type,return-value]
    with pytest.raises(InputError, match=r"has no '1\.weight', need it"):
        filled(row, {}.__getitem__)
