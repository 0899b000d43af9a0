"""What `Pipeline` and `launch` share: checkpoints, the end at numbers that are not finite."""

from __future__ import annotations

import copy
import gc
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from pipeplan import Pipeline
from pipeplan.capture import profile_task
from pipeplan.errors import InputError, RankError
from pipeplan.plan import Semantics
from pipeplan.runtime.checkpoint import storage
from pipeplan.runtime.transport.base import Transport
from pipeplan.task import LossScale
from pipeplan.testing.in_process import run_ranks
from tests import launch_task

STEPS = 4


def trained(pipeline: Pipeline) -> dict[str, Tensor]:
    """Its state, tensors alone, copied."""
    state = pipeline.state_dict()
    return {name: value.clone() for name, value in state.items() if isinstance(value, Tensor)}


@pytest.mark.parametrize("semantics", ["flush", "2bw"])
def test_a_checkpoint_goes_on(semantics: Semantics, tmp_path: Path) -> None:
    """Saved, loaded by another `Pipeline` and trained on: bit-equal to a run that never ended."""
    options = {"clip_norm": 0.5, "loss_scale": LossScale(initial=8.0, interval=2)}
    plan = launch_task.waiting(launch_task.plan(1, semantics))
    with Pipeline(replace(launch_task.task(0), **options), plan, seed=3) as whole:
        losses = whole.run(STEPS)
        wanted = trained(whole)
    with Pipeline(replace(launch_task.task(0), **options), plan, seed=3) as first:
        first.run(2)
        first.save(tmp_path)
    assert storage.read_meta(storage.latest(tmp_path)).step == 2
    with Pipeline(replace(launch_task.task(1), **options), plan, seed=3) as later:
        later.load(tmp_path)
        assert later.steps == 2
        assert later.run(STEPS - 2) == losses[2:]
        found = trained(later)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_a_saved_step_is_not_overwritten(tmp_path: Path) -> None:
    """A second save of one step is refused, and the pipeline trains on."""
    with Pipeline(launch_task.task(0), launch_task.plan(1, "flush")) as pipeline:
        pipeline.run(1)
        pipeline.save(tmp_path)
        with pytest.raises(InputError, match="step 1 is there already"):
            pipeline.save(tmp_path)
        pipeline.run(1)
        pipeline.save(tmp_path)
    assert [path.name for path in storage.folders(tmp_path)] == ["step-00000001", "step-00000002"]


def test_two_trainings_are_not_mixed_in_one_directory(tmp_path: Path) -> None:
    """A shorter one would never be loaded; who has loaded the longer one may go back and save."""
    plan = launch_task.plan(1, "flush")
    with Pipeline(launch_task.task(0), plan) as pipeline:
        pipeline.run(1)
        early = copy.deepcopy(pipeline.state_dict())
        pipeline.run(2)
        pipeline.save(tmp_path)
        pipeline.load_state_dict(early)
        pipeline.save(tmp_path)
    with Pipeline(launch_task.task(0), plan) as other:
        other.run(2)
        mixed = r"got step-00000003 there, .* behind step 2: load and"
        with pytest.raises(InputError, match=mixed):
            other.save(tmp_path)
        other.save(tmp_path / "own")
        other.run(2)
        other.save(tmp_path)
    assert storage.latest(tmp_path).name == "step-00000004"
    with Pipeline(launch_task.task(0), plan) as later:
        later.load(tmp_path)
        later.load_state_dict(early)
        later.run(1)
        later.save(tmp_path)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"seed": 4}, "its seed is 0, this training's is 4"),
        ({"plan": "2bw"}, "its semantics is flush, this training's is 2bw"),
    ],
)
def test_another_training_is_refused(
    other: dict[str, object], message: str, tmp_path: Path
) -> None:
    """A checkpoint of another seed or semantics is not loaded; the pipeline stays whole."""
    with Pipeline(launch_task.task(0), launch_task.plan(1, "flush")) as pipeline:
        pipeline.save(tmp_path)
    semantics: Semantics = "2bw" if "plan" in other else "flush"
    seed = 4 if "seed" in other else 0
    with Pipeline(launch_task.task(0), launch_task.plan(1, semantics), seed=seed) as pipeline:
        with pytest.raises(InputError, match=message):
            pipeline.load(tmp_path)
        pipeline.run(1)


def test_what_another_recipe_changes_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What the checkpoint was not trained with; nothing where all is alike."""
    plan = launch_task.plan(1, "flush")
    with Pipeline(launch_task.task(0), plan) as pipeline:
        pipeline.save(tmp_path)
    for norm, told in ((None, []), (0.5, ["trained with None, this run has 0.5"])):
        with Pipeline(replace(launch_task.task(0), clip_norm=norm), plan) as pipeline:
            pipeline.load(tmp_path)
        warnings = [each.message for each in caplog.records if each.levelname == "WARNING"]
        said = [f"goes on with another clip_norm: the checkpoint was {words}" for words in told]
        assert warnings == said


def test_no_checkpoint_is_said(tmp_path: Path) -> None:
    """A directory without one is named."""
    with (
        Pipeline(launch_task.task(0), launch_task.plan(1, "flush")) as pipeline,
        pytest.raises(InputError, match=r"holds no complete checkpoint.* Give the --out"),
    ):
        pipeline.load(tmp_path)


def test_a_run_that_ended_before_its_first_checkpoint(tmp_path: Path) -> None:
    """Its folder was given: another one is what it needs."""
    (tmp_path / "rank0.error.txt").touch()
    with pytest.raises(InputError, match=r"before its first one \(--save-every\), start anew"):
        storage.latest(tmp_path)


def test_ranks_of_a_scripts_own_transport_do_not_save(tmp_path: Path) -> None:
    """Nobody agrees on files there: refused, with what to do."""

    def work(transport: Transport) -> None:
        plan = launch_task.plan(2, "flush")
        with Pipeline(launch_task.task(0), plan, transport=transport) as pipeline:
            pipeline.save(tmp_path)

    with pytest.raises(InputError, match=r"a transport of your own.*state_dict"):
        run_ranks(2, work)


@pytest.mark.parametrize("semantics", ["flush", "2bw"])
def test_a_loss_that_is_no_number_ends_the_training(semantics: Semantics, tmp_path: Path) -> None:
    """The step is named, long before all that was wanted; then only `close` is left."""
    m = launch_task.MICROBATCHES
    with Pipeline(launch_task.spoiled(0, 2 * m), launch_task.plan(1, semantics)) as pipeline:
        pipeline.run(2)
        with pytest.raises(RankError, match=r"step 3: the loss of micro-batch 12 .*not finite"):
            pipeline.run(10_000)
        assert pipeline.steps < 10_000
        with pytest.raises(InputError, match="failed in its middle"):
            pipeline.save(tmp_path)


class OddTypes(nn.Module):
    """Weights of which torch finds no least and greatest number."""

    def __init__(self) -> None:
        super().__init__()
        self.wave = nn.Parameter(torch.randn(6, 6, dtype=torch.cfloat))
        self.small = nn.Parameter(torch.randn(6, 6).to(torch.float8_e4m3fn), requires_grad=False)
        self.flags = nn.Parameter(torch.ones(6, dtype=torch.uint16), requires_grad=False)

    def forward(self, rows: Tensor) -> Tensor:
        mixed = (rows.to(torch.cfloat) @ self.wave).abs() @ self.small.float()
        return mixed * self.flags.float()


def test_weights_of_any_type_are_saved_and_looked_at(tmp_path: Path) -> None:
    """Complex numbers, 8 bits and integers; a part that is no number is found."""
    torch.manual_seed(1)
    task = replace(launch_task.task(0), model=nn.Sequential(OddTypes(), nn.Linear(6, 3)))
    chain = launch_task.leveled(profile_task(task, repeats=1, warmup=0))
    plan = launch_task.plan_of(chain, 1, "flush")
    with Pipeline(task, plan) as pipeline:
        pipeline.run(1)
        pipeline.save(tmp_path)
        wanted = trained(pipeline)
        pipeline.run(1)
        pipeline.load(tmp_path)
        found = trained(pipeline)
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)
        found["model.0.wave"][2, 3] = complex(0, torch.nan)
        pipeline.state_dict()["model.0.wave"].copy_(found["model.0.wave"])
        with pytest.raises(RankError, match=r"the weight '0\.wave' \(stage 0\) is not finite"):
            pipeline.save(tmp_path / "later")


def test_sparse_buffers_train_and_are_not_saved(tmp_path: Path) -> None:
    """No checkpoint holds them: that is said with a way out, and training goes on."""

    class Edges(nn.Linear):
        def __init__(self) -> None:
            super().__init__(6, 3)
            self.register_buffer("edges", torch.eye(5).to_sparse())

        def forward(self, rows: Tensor) -> Tensor:
            return super().forward(torch.sparse.mm(self.edges, rows))

    task = replace(launch_task.task(0), model=nn.Sequential(nn.Linear(6, 6), Edges()))
    chain = launch_task.leveled(profile_task(task, repeats=1, warmup=0))
    with Pipeline(task, launch_task.plan_of(chain, 1, "flush")) as pipeline:
        pipeline.run(1)
        with pytest.raises(InputError, match=r"buffer '1\.edges' .*sparse_coo.*as two buffers"):
            pipeline.save(tmp_path)
        assert not list(tmp_path.iterdir())
        pipeline.run(2)


def test_all_ranks_hear_of_a_loss_that_is_no_number() -> None:
    """Each of them ends, also one that knows no loss."""

    def work(transport: Transport) -> str:
        plan = launch_task.plan(2, "flush")
        with Pipeline(launch_task.spoiled(0, 0), plan, transport=transport) as pipeline:
            with pytest.raises(RankError) as error:
                pipeline.step()
            return str(error.value)

    told = run_ranks(2, work)
    assert told[0] == told[1]
    assert "step 1: the loss of micro-batch 0" in told[0]


def test_who_wants_to_trains_on(tmp_path: Path) -> None:
    """With `allow_nonfinite` nothing ends, and such weights are saved."""
    plan = launch_task.plan(1, "flush")
    with Pipeline(launch_task.spoiled(0, 0), plan, allow_nonfinite=True) as pipeline:
        assert len(pipeline.run(3)) == 3
        pipeline.save(tmp_path)
    assert storage.latest(tmp_path).name == "step-00000003"


def test_weights_that_are_no_numbers_are_not_saved(tmp_path: Path) -> None:
    """Whoever puts one into a weight is told its name, and no file is written."""
    with Pipeline(launch_task.task(0), launch_task.plan(1, "flush")) as pipeline:
        pipeline.run(1)
        name, value = next(iter(pipeline.state_dict().items()))
        value.fill_(torch.inf)
        with pytest.raises(RankError, match=f"the weight '{name.removeprefix('model.')}'"):
            pipeline.save(tmp_path)
    assert not storage.folders(tmp_path)


@pytest.mark.parametrize("closes", [True, False])
def test_no_thread_outlives_a_pipeline(closes: bool) -> None:
    """Closed or forgotten, its threads end."""
    before = set(threading.enumerate())
    pipeline = Pipeline(launch_task.task(0), launch_task.plan(1, "flush"))
    pipeline.run(1)
    assert set(threading.enumerate()) - before, "there is one to end, or this shows nothing"
    if closes:
        pipeline.close()
    del pipeline
    gc.collect()
    assert not set(threading.enumerate()) - before
