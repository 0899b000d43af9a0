"""Checkpoints: exact, keyed by name, never torn, readable by plain torch."""

from __future__ import annotations

import copy
import json
import pickle
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from torch import Tensor, nn

from pipeplan.errors import InputError, RankError
from pipeplan.plan import Plan, Semantics
from pipeplan.runtime.build import Worker, build
from pipeplan.runtime.checkpoint import named_state, storage
from pipeplan.runtime.checkpoint.writer import CheckpointWriter
from pipeplan.runtime.data.feed import TaskFeed, Uses
from pipeplan.runtime.parameters.optimizer_factory import LayerOptimizers
from pipeplan.runtime.parameters.tied_parameters import untie
from pipeplan.runtime.parameters.weights import Weights
from pipeplan.runtime.stages.stage import StageRunner
from pipeplan.runtime.transport.base import Transport
from pipeplan.runtime.transport.gloo import LocalTransport
from pipeplan.task import LossScale
from pipeplan.testing.in_process import run_ranks
from tests import grids, models, pipelines


def worker(plan: Plan, optimizer: str, transport: Transport) -> Worker:
    """One rank of `plan` with fresh weights."""
    split, task = pipelines.toy(optimizer)
    pattern = pipelines.pattern_of(plan, period=3)
    feed = TaskFeed(task, split, Uses.of(plan, split, transport.rank))
    return build(plan, pattern, split, task, feed, transport, pipelines.Listener(), seed=3)


def meta(step: int) -> storage.CheckpointMeta:
    """Whatever; only `step` matters here."""
    return storage.CheckpointMeta(
        step=step, seed=3, semantics="2bw", microbatches=6, task_digest="", plan_digest=""
    )


def save_alone(folder: Path, semantics: Semantics, optimizer: str, steps: int) -> Worker:
    """Train on one rank and save."""
    plan = pipelines.plan_of([4], [0, 0], semantics, microbatches=6)
    trained = worker(plan, optimizer, LocalTransport())
    trained.executor.run(0, steps)
    CheckpointWriter(LocalTransport(), background=False).save(
        folder, meta(steps), trained.stages.values()
    )
    return trained


@grids.each_pair(
    shape=[([], [0]), ([2, 4, 6], [0, 1, 2, 0])],
    semantics=["flush", "2bw"],
    optimizer=["sgd", "adamw"],
)
def test_resume_under_another_plan_is_exact(
    tmp_path: Path,
    shape: tuple[Sequence[int], Sequence[int]],
    semantics: Semantics,
    optimizer: str,
) -> None:
    """Two steps, a checkpoint, two more under another plan equal four steps on end."""
    trained = save_alone(tmp_path / "c", semantics, optimizer, 2)
    trained.executor.run(2, 2)
    plan = pipelines.plan_of(*shape, semantics, microbatches=6)

    def work(transport: Transport) -> dict[str, Tensor]:
        resumed = worker(plan, optimizer, transport)
        named_state.load(tmp_path / "c", 2, resumed)
        resumed.executor.run(2, 2)
        return pipelines.weights_of(resumed)

    parts = run_ranks(len(plan.cluster.gpus), work)
    weights = {name: value for part in parts for name, value in part.items()}
    expected = pipelines.weights_of(trained)
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in weights)


class Counting(torch.optim.SGD):
    """Has a rate of its own, and what it follows from, in its groups, as Prodigy does."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Ever shorter ones, longer where gradients were large."""
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            largest = group.get("largest", torch.zeros(()))
            for parameter in group["params"]:
                largest = torch.maximum(largest, parameter.grad.abs().max())
            group["largest"], group["lr"] = largest, 0.1 / group["count"]
            for parameter in group["params"]:
                parameter -= group["lr"] * largest * parameter.grad


@pytest.mark.parametrize("file", [True, False])
def test_state_in_groups_is_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: bool
) -> None:
    """Numbers and tensors that steps write into groups are there again, under another plan."""
    monkeypatch.setitem(pipelines.OPTIMIZERS, "counting", lambda p: Counting(p, lr=0.1))
    trained = save_alone(tmp_path / "c", "flush", "counting", 2)
    state = copy.deepcopy(named_state.state_of(trained.stages.values()))
    assert state["group.0.0.weight.count"] == 2
    assert not any(key.endswith("momentum") for key in state), "no step has changed it"
    trained.executor.run(2, 2)
    resumed = worker(pipelines.plan_of([2], [0, 0], "flush", 6), "counting", LocalTransport())
    if file:
        named_state.load(tmp_path / "c", 2, resumed)
    else:
        named_state.put(resumed, 2, state, (), 0)
    again = named_state.state_of(resumed.stages.values())
    assert again.keys() == state.keys(), "also before the next step"
    resumed.executor.run(2, 2)
    expected, found = pipelines.weights_of(trained), pipelines.weights_of(resumed)
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def exchanging(plan: Plan, transport: Transport) -> Worker:
    """One rank of a model whose updates need other stages, and whose schedule moves."""
    split, task = models.make("GPT-2, tied")
    rule = LossScale(initial=4.0, interval=2)
    decay = partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.7)
    task = replace(task, loss_scale=rule, scheduler=decay)
    split = untie(split, task.tied)
    pattern = pipelines.pattern_of(plan, period=3)
    feed = TaskFeed(task, split, Uses.of(plan, split, transport.rank))
    return build(plan, pattern, split, task, feed, transport, pipelines.Listener(), seed=3)


@pytest.mark.parametrize("semantics", ["flush", "2bw"])
def test_copies_schedule_and_scale_are_resumed(tmp_path: Path, semantics: Semantics) -> None:
    """Copies of a tied weight on one rank, resumed on three: as if never interrupted."""
    plan = pipelines.plan_of([2, 5], [0, 0, 0], semantics, microbatches=6)
    trained = exchanging(plan, LocalTransport())
    trained.executor.run(0, 3)
    scales, good = trained.scales(3)
    saved = meta(3).model_copy(update={"scales": scales, "good_steps": good})
    CheckpointWriter(LocalTransport(), background=False).save(
        tmp_path / "c", saved, trained.stages.values()
    )
    trained.executor.run(3, 3)
    far = pipelines.plan_of([2, 5], [2, 0, 1], semantics, microbatches=6)

    def work(transport: Transport) -> tuple[dict[str, Tensor], object]:
        resumed = exchanging(far, transport)
        named_state.load(tmp_path / "c", 3, resumed)
        resumed.executor.run(3, 3)
        return pipelines.weights_of(resumed), resumed.scales(6)

    parts = run_ranks(3, work)
    expected = pipelines.weights_of(trained)
    assert all(scale == trained.scales(6) for _, scale in parts)
    assert {name for part, _ in parts for name in part} == expected.keys()
    assert all(torch.equal(value, expected[n]) for part, _ in parts for n, value in part.items())


def test_export_is_a_plain_state_dict(tmp_path: Path) -> None:
    """`torch.load` reads it, with an alias for a tied weight and what no layer holds."""
    trained = save_alone(tmp_path / "c", "flush", "sgd", 1)
    names = {"a": "2.weight", "b": "2.weight"}
    named_state.export_weights(tmp_path / "c", tmp_path / "model.pt", names, {"c": torch.ones(1)})
    state = torch.load(tmp_path / "model.pt")
    assert list(state) == ["a", "b", "c"]
    newest = pipelines.weights_of(trained)["2.weight"]
    assert torch.equal(state["a"], newest)
    assert torch.equal(state["b"], newest)


def test_latest_skips_torn_checkpoints(tmp_path: Path) -> None:
    """Without `.metadata`, or with a file shorter than `.metadata` says: no checkpoint."""
    for step in (3, 20):
        storage.step_folder(tmp_path, step).mkdir(parents=True)
    with pytest.raises(InputError, match="no complete checkpoint"):
        storage.latest(tmp_path)
    for step in (3, 7):
        save_alone(storage.step_folder(tmp_path, step), "flush", "sgd", 1)
    assert storage.latest(tmp_path) == storage.step_folder(tmp_path, 7)
    (torn,) = storage.step_folder(tmp_path, 7).glob("*.distcp")
    torn.write_bytes(torn.read_bytes()[:-1])
    assert storage.latest(tmp_path) == storage.step_folder(tmp_path, 3)
    metadata = storage.step_folder(tmp_path, 3) / ".metadata"
    metadata.write_bytes(metadata.read_bytes()[:40])
    with pytest.raises(InputError, match="no complete checkpoint"):
        storage.latest(tmp_path)


def test_a_torn_checkpoint_is_none_while_it_is_written_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is left of the old one does not make a part of the new one look complete."""
    save_alone(tmp_path, "flush", "sgd", 1)
    before = []

    def killed(*_: object, **__: object) -> None:
        before.append(storage.is_complete(tmp_path))
        raise KeyboardInterrupt

    monkeypatch.setattr(storage.state_dict_saver, "save", killed)
    with pytest.raises(KeyboardInterrupt):
        save_alone(tmp_path, "flush", "sgd", 2)
    assert before == [False]


def test_background_save_is_of_the_moment_it_was_asked_for(tmp_path: Path) -> None:
    """Steps made while the files are written do not show in them; a failure is raised later."""
    plan = pipelines.plan_of([4], [0, 0], "2bw", microbatches=6)
    trained = worker(plan, "adamw", LocalTransport())
    trained.executor.run(0, 2)
    saver = CheckpointWriter(LocalTransport(), background=True)
    saver.save(tmp_path / "c", meta(2), trained.stages.values())
    trained.executor.run(2, 2)
    saver.finish()
    resumed = worker(plan, "adamw", LocalTransport())
    named_state.load(tmp_path / "c", 2, resumed)
    resumed.executor.run(2, 2)
    expected = pipelines.weights_of(trained)
    weights = pipelines.weights_of(resumed)
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    (tmp_path / "file").touch()
    saver.save(tmp_path / "file", meta(4), trained.stages.values())
    with pytest.raises(RankError, match=r"rank 0: .*file could not be written: FileExistsError"):
        saver.finish()


def test_meta_round_trip_and_refusal(tmp_path: Path) -> None:
    """Meta data reads back as written; another format is refused."""
    save_alone(tmp_path / "c", "flush", "sgd", 1)
    assert storage.read_meta(tmp_path / "c") == meta(1)
    (tmp_path / "c" / "pipeplan.json").write_text('{"format": "other/1"}')
    with pytest.raises(InputError, match="need 'pipeplan-checkpoint/1'"):
        storage.read_meta(tmp_path / "c")


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ({"step": "two"}, "step: got 'two', need an integer"),
        ({"seed": -1}, "seed: got -1, need at least 0"),
        ({"semantics": "3bw"}, "semantics: got"),
        ({"scales": [None]}, "scales"),
    ],
)
def test_damaged_meta_is_named(tmp_path: Path, field: dict[str, object], message: str) -> None:
    """A value of the wrong kind in pipeplan.json is refused by its name, before anything runs."""
    data = {**meta(1).model_dump(mode="json"), **field}
    (tmp_path / "pipeplan.json").write_text(json.dumps(data))
    with pytest.raises(InputError, match=re.escape(message)):
        storage.read_meta(tmp_path)


@pytest.mark.parametrize("content", [pickle.dumps({"a": 1}), b"\x80\x04cno_such\nthing\n.", b"?"])
def test_metadata_of_chance_is_no_checkpoint(tmp_path: Path, content: bytes) -> None:
    """Whatever `.metadata` holds instead of itself: torn, and the checkpoint before is taken."""
    for step in (3, 7):
        save_alone(storage.step_folder(tmp_path, step), "flush", "sgd", 1)
    (storage.step_folder(tmp_path, 7) / ".metadata").write_bytes(content)
    assert storage.latest(tmp_path) == storage.step_folder(tmp_path, 3)


def test_damaged_data_are_named(tmp_path: Path) -> None:
    """A data file as long as it should be, with other bytes in it: one line, and what to do."""
    save_alone(tmp_path / "c", "flush", "sgd", 1)
    (data,) = (tmp_path / "c").glob("*.distcp")
    data.write_bytes(b"x" * data.stat().st_size)
    resumed = worker(pipelines.plan_of([], [0], "flush", microbatches=6), "sgd", LocalTransport())
    with pytest.raises(InputError, match=r"cannot be read: .*move the folder away") as caught:
        named_state.load(tmp_path / "c", 1, resumed)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("option", "device"), [("capturable", "meta"), ("fused", "meta"), (None, "cpu")]
)
def test_steps_lie_where_the_optimizer_reads_them(option: str | None, device: str) -> None:
    """Beside the parameter if fused or capturable kernels count on the device, else as saved."""
    parameter = nn.Parameter(torch.zeros(2, device="meta"))
    optimizer = torch.optim.AdamW([parameter])
    optimizer.param_groups[0] |= {option: True} if option else {}
    optimizers = LayerOptimizers((optimizer,), (), (set(),), (None,))
    unit = SimpleNamespace(optimizers=optimizers, weight_of={parameter: parameter}.get)
    saved = {"optimizer.w.step": torch.tensor(3.0), "optimizer.w.exp_avg": torch.ones(2)}
    stage = SimpleNamespace(names={parameter: "w"})
    named_state._restore_optimizer(cast("StageRunner", stage), cast("Weights", unit), saved)
    restored = optimizer.state[parameter]
    assert restored["step"].device.type == device
    assert restored["exp_avg"].device.type == "meta"


def test_flush_checkpoint_lacks_what_2bw_needs(tmp_path: Path) -> None:
    """Resuming 2bw from a flush checkpoint is refused: there is no previous version."""
    save_alone(tmp_path / "c", "flush", "sgd", 1)
    plan = pipelines.plan_of([], [0], "2bw", microbatches=6)
    with pytest.raises(InputError, match=r"has no 'previous\."):
        named_state.load(tmp_path / "c", 1, worker(plan, "sgd", LocalTransport()))
