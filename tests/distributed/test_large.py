"""Ranks that build what they host: how much memory they take, and that nothing else changes."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint import state_dict_saver

from pipeplan.capture import estimate, split
from pipeplan.devices import find_device
from pipeplan.repeat import seed_all
from pipeplan.task import load
from pipeplan.testing import reference
from tests import case_scripts, launch_task
from tests.distributed.launches import launched

STEPS, M = 2, launch_task.MICROBATCHES


@dataclass(frozen=True)
class Ran:
    """What a run left."""

    planned: list[int]
    live: list[int]
    resident: list[int]
    weights: dict[str, Tensor]
    said: str


def reference_of(form: str, blocks: int, width: int, weights: Path | None = None) -> str:
    """The task as words."""
    more = f", weights={str(weights)!r}" if weights else ""
    return f"tests.large_task:large(form={form!r}, blocks={blocks}, width={width}{more})"


def launch(folder: Path, ranks: int, task: str, *more: str, steps: int = STEPS) -> Ran:
    """Train the task on `ranks` ranks."""
    plan = folder / "plan.json"
    chain = launch_task.leveled(estimate(task, find_device("h100")))
    plan.write_text(launch_task.plan_of(chain, ranks, "flush").to_json())
    out = folder / "run"
    options = ("--plan", str(plan), "--task", task, "--instrument", "--steps", str(steps))
    given = more or ("--out", str(out))
    words = [*options, *given]
    (told,) = launched({"ranks": ranks, "words": words, "fault": None, "folder": str(folder)})
    assert [each["code"] for each in told] == [0] * ranks, told
    run = json.loads((out / "run.json").read_text())
    return Ran(
        run["predicted"]["peak_bytes"],
        run["measured"]["peak_bytes"],
        run["measured"]["resident_bytes"],
        torch.load(out / "model.pt"),
        "".join(each["said"] for each in told),
    )


def plain(
    form: str, blocks: int, width: int, first: dict[str, Tensor] | None
) -> dict[str, Tensor]:
    """One process that trains the whole model, from the weights `first` if there are any."""
    seed_all(0)
    task = load(reference_of(form, blocks, width))
    if first:
        task.model.load_state_dict(first)
    return reference.train("flush", split(task), task, STEPS, M, 0).weights


def equal(got: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    """Same names, same bits."""
    return got.keys() == expected.keys() and all(torch.equal(got[k], expected[k]) for k in got)


def other_weights(form: str, blocks: int, width: int) -> dict[str, Tensor]:
    """Weights that no seed of the run gives."""
    seed_all(99)
    return load(reference_of(form, blocks, width)).model.state_dict()


def stored(folder: Path, source: str, values: dict[str, Tensor]) -> Path:
    """The path of `values`, written as `source` says."""
    if source == "saved":
        torch.save(values, folder / "first.pt")
        return folder / "first.pt"
    if source == "distributed":
        state_dict_saver.save(dict(values), checkpoint_id=folder / "first", no_dist=True)
        return folder / "first"
    first = folder / "first"
    first.mkdir()
    shards = {name: f"model-{number % 3}.safetensors" for number, name in enumerate(values)}
    for shard in set(shards.values()):
        save_file({k: v for k, v in values.items() if shards[k] == shard}, first / shard)
    (first / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    return first


def check_resident(ran: Ran, empty: Ran, largest: int) -> None:
    """Each rank holds at most its planned bytes and the largest layer, beside what all hold."""
    assert ran.live == ran.planned
    for resident, without, planned in zip(ran.resident, empty.resident, ran.planned, strict=True):
        assert resident - without <= planned + largest


def test_ranks_hold_what_they_host(tmp_path: Path) -> None:
    """32 MiB of weights on two ranks: no rank ever has the other's half in memory; same bits.

    Of an exported model; of a row of layers below, where a run goes on.
    """
    form = "exported"
    folders = [tmp_path / "empty", tmp_path / "large"]
    for folder in folders:
        folder.mkdir()
    empty = launch(folders[0], 2, reference_of(form, 8, 8))
    ran = launch(folders[1], 2, reference_of(form, 8, 1024))
    check_resident(ran, empty, 4 * 1024 * 1025)
    assert "builds the whole model" not in ran.said
    assert equal(ran.weights, plain(form, 8, 1024, None))


@pytest.mark.parametrize("source", ["safetensors", "distributed", "saved"])
def test_first_weights_from_elsewhere(tmp_path: Path, source: str) -> None:
    """Each rank reads its own: bit-equal to the plain loop that loads them all."""
    first = other_weights("exported", 4, 16)
    task = reference_of("exported", 4, 16, stored(tmp_path, source, first))
    ran = launch(tmp_path, 2, task)
    assert equal(ran.weights, plain("exported", 4, 16, first))


def test_resumed_ranks_hold_what_they_host(tmp_path: Path) -> None:
    """A run and one that goes on from its checkpoint: bit-equal, and within the same memory."""
    folders = [tmp_path / "empty", tmp_path / "large"]
    begun, resident = [], []
    for folder, width in zip(folders, (8, 1024), strict=True):
        folder.mkdir()
        task = reference_of("row", 8, width)
        begun.append(launch(folder, 2, task, steps=1))
        again = ("--resume", str(folder / "run"))
        resident.append(launch(folder, 2, task, *again))
    for empty, ran in (begun, resident):
        check_resident(ran, empty, 4 * 1024 * 1025)
        assert "builds the whole model" not in ran.said
    assert equal(resident[1].weights, plain("row", 8, 1024, None))


def test_pipeline_of_a_function_builds_what_it_hosts(tmp_path: Path) -> None:
    """From Python: the function is called by each rank, which holds its layers alone."""
    case_scripts.printed(Path(__file__).with_name("large_pipeline.py"), str(tmp_path))
    states = [torch.load(tmp_path / f"rank{rank}.pt") for rank in range(2)]
    merged = {key: value for state in states for key, value in state.items()}
    assert equal(merged, plain("exported", 4, 16, None))


@pytest.mark.long
@pytest.mark.parametrize("source", ["seed", "safetensors", "distributed", "saved"])
@pytest.mark.parametrize("form", ["row", "exported"])
def test_four_ranks_of_half_a_gibibyte(tmp_path: Path, form: str, source: str) -> None:
    """512 MiB of weights in 32 layers: what a rank holds follows from its own layers alone."""
    ran = []
    for width in (8, 2048):
        folder = tmp_path / str(width)
        folder.mkdir()
        first = None if source == "seed" else other_weights(form, 32, width)
        path = stored(folder, source, first) if first else None
        ran.append(launch(folder, 4, reference_of(form, 32, width, path)))
    check_resident(ran[1], ran[0], 4 * 2048 * 2049)
    assert equal(ran[1].weights, plain(form, 32, 2048, first))
