"""Task references: what they may name, how a task's micro-batches come out, what is refused."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from pipeplan.errors import InputError
from pipeplan.task import LossScale, Task, load
from tests.capture_tasks import mlp

SOURCE = """
import torch
from pipeplan.task import Task

def task(seed=1):
    return Task(model=[torch.nn.Linear(seed, 1)], loss=max, optimizer=list, data=min)

def plain():
    return task(2)

def wrong():
    return 3

def broken():
    raise KeyError("gone")

def needy(rate):
    return task()

def halved():
    return Task(model=[])

def with_class():
    return Task(model=torch.nn.Linear, loss=max, optimizer=list, data=min)

def with_loss_class():
    return Task(model=[], loss=torch.nn.MSELoss, optimizer=list, data=min)

def with_optimizer():
    layer = torch.nn.Linear(1, 1)
    made = torch.optim.SGD(layer.parameters(), lr=1.0)
    return Task(model=[layer], loss=max, optimizer=made, data=min)

constant = 7
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a module and a package that hold tasks."""
    (tmp_path / "mine.py").write_text(SOURCE, encoding="utf-8")
    (tmp_path / "bad.py").write_text("import nothing_of_this_name", encoding="utf-8")
    package = tmp_path / "pack_of_tasks"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "inner.py").write_text(SOURCE, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


def width(task: Task) -> int:
    """What the tasks of these tests differ in."""
    assert isinstance(task.model, list)
    return int(task.model[0].in_features)


@pytest.mark.parametrize("reference", ["mine.py:task", "pack_of_tasks.inner:task"])
def test_files_and_modules_get_the_seed(reference: str, folder: Path) -> None:
    """A path and a module name work alike; a function with `seed` gets it."""
    assert width(load(reference, seed=5)) == 5


def test_function_without_seed_is_called_without(folder: Path) -> None:
    """A function that needs no seed need not take it."""
    assert width(load(f"{folder / 'mine.py'}:plain", seed=5)) == 2


REFUSED = {
    "mine.py": "need package.module:function.*, for example mine.py:task",
    ":task": "need package.module:function",
    "mine.py:not a name": "need package.module:function",
    "other.py:task": "no file other.py",
    "no_such_module_here:task": "ModuleNotFoundError.* It is looked for in .*: FILE.py:FUNCTION",
    "bad.py:task": r"importing bad.py failed: .*'nothing_of_this_name' \(bad.py:1, in <module>\)$",
    "mine.py:absent": "no function 'absent', it has task, plain, wrong, broken",
    "mine.py:constant": r"of type int, need a function .*: def constant\(\): return",
    "mine.py:needy": r"needy\(rate\): missing .* 'rate'. .*: mine.py:needy\(name=value",
    "mine.py:halved": "missing 3 required .*'loss'.* `python -m pydoc pipeplan.Task`",
    "mine.py:with_class": r"model: got the class Linear, need one of it: Linear\(\.\.\)",
    "mine.py:with_loss_class": "loss: got the class MSELoss, need one",
    "mine.py:with_optimizer": r"got a SGD, need a function .*: lambda parameters: SGD\(",
    "mine.py:wrong": r"got a int, need a pipeplan.Task. Let wrong\(\) return Task\(model=",
    "mine.py:broken": "KeyError",
    "mine.py:task(seed=other)": "plain values",
    "mine.py:task(3)": "plain values",
    "mine.py:task(seed=3": "package.module:function",
    "mine.py:task(width=3)": "unexpected keyword argument 'width'",
    "pipeplan.tasks:resnet(size=19)": "size: got 19, need one of 18, 34",
}


def test_a_reference_may_hold_arguments(folder: Path) -> None:
    """Arguments in the reference reach the function and win over the run's seed."""
    assert load("mine.py:task(seed=5)", seed=4).model[0].in_features == 5
    assert load("mine.py:task()", seed=4).model[0].in_features == 4


def test_data_that_are_no_function_are_refused() -> None:
    """A loader has an order of its own; what makes a function of it is named."""
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(4, 1)))
    task = Task(model=[nn.Linear(1, 1)], loss=None, optimizer=list, data=loader)
    with pytest.raises(InputError, match=r"data: got a DataLoader, .* pipeplan\.batches\(\.\.\)"):
        task.microbatch(0)


@pytest.mark.parametrize(("reference", "message"), REFUSED.items(), ids=list(REFUSED))
def test_refuses(reference: str, message: str, folder: Path) -> None:
    """A reference that gives no task is an InputError that says why."""
    with pytest.raises(InputError, match=message):
        load(reference)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: replace(mlp(), clip_norm=-1.0),
            r"task: clip_norm: got -1\.0, need a number above",
        ),
        (lambda: replace(mlp(), clip_norm=0), "clip_norm: got 0, need .* None to clip nothing"),
        (lambda: replace(mlp(), clip_norm=float("nan")), "clip_norm: got nan, need"),
        (lambda: replace(mlp(), clip_norm="1.0"), r"clip_norm: got '1\.0', need"),
        (lambda: replace(mlp(), clip_norm=True), "clip_norm: got True, need"),
        (lambda: replace(mlp(), loss_scale=1024.0), r"loss_scale: got 1024\.0, need a LossScale"),
        (lambda: LossScale(initial=0.0), r"task: loss_scale: initial: got 0\.0, need a finite"),
        (
            lambda: LossScale(initial=float("inf")),
            "initial: got inf, need a finite number above 0",
        ),
        (lambda: LossScale(growth=0.5), r"growth: got 0\.5, need a finite number, at least 1"),
        (lambda: LossScale(backoff=2.0), r"backoff: got 2\.0, need a number above 0, at most 1"),
        (lambda: LossScale(interval=0), "interval: got 0, need an integer above 0"),
        (lambda: LossScale(interval=1.5), r"interval: got 1\.5, need an integer"),
    ],
)
def test_refuses_numbers_that_train_otherwise(make: Callable[[], object], message: str) -> None:
    """A negative norm would train uphill; others would fail within a step."""
    with pytest.raises(InputError, match=message):
        make()


def test_takes_norms_and_scales_of_any_kind_of_number() -> None:
    """No gradient is longer than inf, of which norms are told all the same."""
    task = replace(mlp(), clip_norm=float("inf"), loss_scale=LossScale(growth=1, backoff=1))
    assert replace(task, clip_norm=np.float32(2)).clip_norm == 2


DOWNLOADING = """
import urllib.request

import transformers

def from_hub():
    return transformers.GPT2LMHeadModel.from_pretrained("gpt2", local_files_only=True)

def from_url():
    return urllib.request.urlopen("http://127.0.0.1:9/weights.pt")

def missing():
    return open("/no/such/weights.pt")
"""


def test_a_model_that_needs_a_download_is_told_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failed download is one line that says what to do; a missing file is no download."""
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    file = tmp_path / "downloading.py"
    file.write_text(DOWNLOADING, encoding="utf-8")
    for name in ("from_hub", "from_url"):
        with pytest.raises(InputError, match=r"needs a download.*from a configuration") as caught:
            load(f"{file}:{name}")
        assert "\n" not in str(caught.value)
    with pytest.raises(InputError) as caught:
        load(f"{file}:missing")
    assert "download" not in str(caught.value).replace("downloading.py", "")


def test_micro_batches_own_their_memory() -> None:
    """Views of a larger tensor and parts of a data set come out as copies of their own."""
    window = torch.arange(20.0).reshape(2, 10)
    views = window[:, :-1], window[:, 1:]
    source, target = replace(mlp(), data=lambda _: views).microbatch(0)
    for copy, view in zip((source, target), views, strict=True):
        assert torch.equal(copy, view)
        assert copy.is_contiguous()
        assert copy.untyped_storage().nbytes() == copy.nbytes
        assert copy.data_ptr() != view.data_ptr()


def test_data_that_end_are_told_to_go_on() -> None:
    """A list of batches is over at some number; other failures, and the first one, have no such
    advice.
    """
    task = replace(mlp(), data=[mlp().data(0)].__getitem__)
    with pytest.raises(
        InputError, match=r"data\(1\) failed: IndexError: .* take the number modulo"
    ):
        task.microbatch(1)
    with pytest.raises(InputError, match=r"data\(0\) failed: IndexError: list .* range$"):
        replace(task, data=[].__getitem__).microbatch(0)


def test_micro_batch_number_reaches_the_data() -> None:
    """Each number gives its own tensors, the same every time."""

    def data(number: int) -> tuple[Tensor, Tensor]:
        return torch.full((2,), number), torch.zeros(2)

    task = replace(mlp(), data=data)
    assert task.microbatch(3)[0].tolist() == [3, 3]


@pytest.mark.parametrize("given", [torch.ones(2), (torch.ones(2),), [torch.ones(1)] * 3])
def test_refuses_data_that_is_no_pair(given: object) -> None:
    """Input and target come in a row of two."""
    task = replace(mlp(), data=lambda _: given)
    with pytest.raises(InputError, match=r"data\(0\): got .*need a tuple"):
        task.microbatch(0)


def test_loading_this_module_needs_no_torch() -> None:
    """The command line can name tasks without paying for torch."""
    code = "import sys, pipeplan.task; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_example_tasks_are_deterministic() -> None:
    """The same seed gives the same data in every process; another seed other data."""
    examples = Path(__file__).parents[2] / "examples"
    for name in ("mlp.py:task", "gpt2_stdlib.py:task", "gpt2_stdlib.py:tied"):
        one, two = load(f"{examples}/{name}", 1), load(f"{examples}/{name}", 1)
        other = load(f"{examples}/{name}", 2)
        for number in (0, 99):
            assert torch.equal(one.microbatch(number)[0], two.microbatch(number)[0])
            assert not torch.equal(one.microbatch(number)[0], other.microbatch(number)[0])
        assert isinstance(one.model, nn.Module)
        assert one.model.training


def test_a_task_file_finds_the_modules_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model in a file of its own is imported as `python file.py` would, wherever one stands."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "model_beside_it.py").write_text("layers = []\n")
    (tmp_path / "training.py").write_text(
        "from model_beside_it import layers\n"
        "from pipeplan.task import Task\n"
        "def task():\n"
        "    return Task(model=layers, loss=None, optimizer=None, data=None)\n"
    )
    assert load(f"{tmp_path}/training.py:task").model == []


def test_like_named_modules_beside_two_task_files_are_two(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second task file gets the module beside it, not the one the first has imported."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("one", "two"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "model_of_this_task.py").write_text(f"layers = [{name!r}]\n")
        (folder / "training.py").write_text(
            "from model_of_this_task import layers\n"
            "from pipeplan.task import Task\n"
            "def task():\n"
            "    return Task(model=layers, loss=None, optimizer=None, data=None)\n"
        )
    for name in ("one", "two", "one"):
        assert load(f"{tmp_path}/{name}/training.py:task").model == [name]
