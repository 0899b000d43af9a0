"""The fault table: whatever happens to a rank, the others stop, say why, and nothing is lost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pipeplan import lowering
from pipeplan.plan import Semantics
from pipeplan.runtime.checkpoint import storage
from tests import launch_task
from tests.distributed.launches import STEPS, TIMEOUT_S, Told, launched, place, spec

RANKS = 4
PATIENCE_S = 5.0
"""Within which ranks end when another one has, on an idle machine."""
PHASES = ("warm-up", "steady", "drain", "save")


def trained(out: Path, semantics: Semantics, steps: int = STEPS) -> bool:
    """Whether model.pt holds what one process makes of that many steps."""
    state: dict[str, Tensor] = torch.load(out / "model.pt")
    expected = launch_task.trained(semantics, steps).weights
    return state.keys() == expected.keys() and all(
        torch.equal(state[name], expected[name]) for name in state
    )


def check_stopped(told: Told, culprit: int, phase: str) -> None:
    """All others ended with an error that names the culprit, where, and doing what."""
    for rank, each in enumerate(told):
        if rank == culprit:
            continue
        assert each["code"] == 1, each
        lines = [line for line in each["said"].splitlines() if line.startswith("error: ")]
        assert len(lines) == 1, each
        assert lines[0].startswith(f"error: rank {rank}: "), lines
        assert f"peer rank {culprit}" in lines[0], lines
        if phase in ("warm-up", "steady"):  # later others may have begun to save
            assert "(stage " in lines[0], lines


def check_resumed(folder: Path, again: Told, semantics: Semantics, first: int) -> None:
    """The restarted run went on after `first` steps and ended as if nothing had happened."""
    assert [each["code"] for each in again] == [0] * RANKS, again
    assert trained(folder / "run", semantics)
    run = json.loads((folder / "run" / "run.json").read_text())
    assert run["first_step"] == first


SAVED = {"warm-up": 0, "steady": 2, "drain": 4, "save": 2}
"""Steps of the newest complete checkpoint when a rank fails in a phase, saving every 2."""


def fail_and_resume(
    folder: Path,
    semantics: Semantics,
    does: str,
    rank: int,
    phase: str,
    timeout_s: int = TIMEOUT_S,
) -> Told:
    """One line of the table: a fault, the others stop, a restart; compared with no fault.

    Returns:
        What the ranks did whose run had the fault.
    """
    plan = launch_task.plan(RANKS, semantics)
    words = ("--save-every", "2", "--timeout", f"{timeout_s}s")
    fault = {"rank": rank, "does": does, "at": place(plan, rank, phase)}
    told, again = launched(
        spec(folder, plan, *words, fault=fault), spec(folder, plan, *words, attempt=1)
    )
    assert told[rank]["code"] == -9
    check_stopped(told, rank, phase)
    check_resumed(folder, again, semantics, SAVED[phase])
    return told


def check_soon(told: Told, culprit: int, within_s: float) -> None:
    """All others ended that soon after the fault."""
    assert all(each["after_s"] < within_s for rank, each in enumerate(told) if rank != culprit), (
        told
    )


@pytest.mark.parametrize(
    ("semantics", "rank", "phase"), [("2bw", 1, "steady"), ("flush", 2, "save")]
)
def test_killed_rank(tmp_path: Path, semantics: Semantics, rank: int, phase: str) -> None:
    """Two lines of the table; `test_every_kill` has the others."""
    fail_and_resume(tmp_path, semantics, "kill", rank, phase)


def test_hung_rank(tmp_path: Path) -> None:
    """A hung rank is missed after the timeout, by name; `test_every_hang` has the others."""
    fail_and_resume(tmp_path, "2bw", "hang", 2, "steady", timeout_s=3)


@pytest.mark.long
@pytest.mark.parametrize("semantics", ["flush", "2bw"])
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("rank", range(RANKS))
def test_every_kill(tmp_path: Path, semantics: Semantics, rank: int, phase: str) -> None:
    """Each rank killed in each phase: others stop within 5 s; the restarted run is exact."""
    told = fail_and_resume(tmp_path, semantics, "kill", rank, phase)
    check_soon(told, rank, PATIENCE_S)


@pytest.mark.long
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("rank", range(RANKS))
def test_every_hang(tmp_path: Path, rank: int, phase: str) -> None:
    """Each rank hung in each phase: others stop within the timeout and 5 s."""
    told = fail_and_resume(tmp_path, "2bw", "hang", rank, phase, timeout_s=3)
    check_soon(told, rank, 3 + PATIENCE_S)


@pytest.mark.parametrize("background", [pytest.param(False, marks=pytest.mark.long), True])
def test_full_disk_keeps_the_checkpoint_before(tmp_path: Path, background: bool) -> None:
    """No room for the second checkpoint: a message with the cause; with room again it goes on."""
    plan = launch_task.plan(2, "2bw")
    words = ["--save-every", "2", *(["--save-in-background"] if background else [])]
    fault = {"rank": 1, "does": "full", "at": "save 2"}
    told, again = launched(
        spec(tmp_path, plan, *words, fault=fault),
        spec(tmp_path, plan, *words, "--resume", str(tmp_path / "run")),
    )
    assert [each["code"] for each in told] == [1, 1], told
    for each in told:
        assert "could not be written: rank 1: " in each["said"], each
        assert "File too large" in each["said"]
    assert [each["code"] for each in again] == [0, 0], again
    assert json.loads((tmp_path / "run" / "run.json").read_text())["first_step"] == 2
    assert trained(tmp_path / "run", "2bw")


def test_flipped_byte_in_a_checkpoint(tmp_path: Path) -> None:
    """The rank that reads the file names it, nobody trains; without it the one before is taken."""
    plan = launch_task.plan(2, "2bw")
    out = tmp_path / "run"
    resume = spec(tmp_path, plan, "--resume", str(out))
    launched(spec(tmp_path, plan, "--steps", "4", "--save-every", "2"))
    newest = storage.step_folder(out, 4)
    data = newest / "__1_0.distcp"
    flipped = bytearray(data.read_bytes())
    flipped[len(flipped) // 2] ^= 1
    data.write_bytes(flipped)
    (told,) = launched(resume)
    assert [each["code"] for each in told] == [1, 2], told
    assert f"{newest}: cannot be read: __1_0.distcp: its SHA-256 is " in told[1]["said"]
    assert "move the folder away, and --resume goes on" in told[1]["said"]
    newest.rename(tmp_path / "away")
    (again,) = launched(resume)
    assert [each["code"] for each in again] == [0, 0], again
    assert json.loads((out / "run.json").read_text())["first_step"] == 2
    assert trained(out, "2bw")


def test_metadata_that_would_run_code(tmp_path: Path) -> None:
    """It is not run, and the checkpoint passed over aloud; where there is no other, none is."""
    plan = launch_task.plan(2, "flush")
    out, ran = tmp_path / "run", tmp_path / "ran"
    resume = spec(tmp_path, plan, "--resume", str(out))
    launched(spec(tmp_path, plan, "--steps", "4", "--save-every", "2"))
    hostile = f"cposix\nsystem\n(Vtouch {ran}\ntR.".encode()
    (storage.step_folder(out, 4) / ".metadata").write_bytes(hostile)
    (told,) = launched(resume)
    assert [each["code"] for each in told] == [0, 0], told
    assert "passed over: " in told[0]["said"]
    assert "names posix.system, which no checkpoint needs" in told[0]["said"]
    assert json.loads((out / "run.json").read_text())["first_step"] == 2
    assert trained(out, "flush")
    for each in storage.folders(out):
        (each / ".metadata").write_bytes(hostile)
    (told,) = launched(resume)
    assert [each["code"] for each in told] == [2, 2], told
    assert "holds no complete checkpoint" in told[0]["said"]
    assert "names posix.system, which no checkpoint needs" in told[0]["said"]
    assert not ran.exists()


def strict(text: str) -> Any:
    """`text` as JSON, which has no NaN."""
    return json.loads(text, parse_constant=lambda word: pytest.fail(f"got {word} in {text[:80]}"))


@pytest.mark.parametrize("semantics", [pytest.param("flush", marks=pytest.mark.long), "2bw"])
def test_nan_at_step_3(tmp_path: Path, semantics: Semantics) -> None:
    """All ranks end together with one message; what is saved is from before, and goes on."""
    plan = launch_task.plan(2, semantics)
    out = tmp_path / "run"
    spoiled = f"tests.launch_task:spoiled(at={2 * plan.microbatches + 1})"
    words = ("--save-every", "2", "--task", spoiled)
    told, again = launched(
        spec(tmp_path, plan, *words), spec(tmp_path, plan, "--resume", str(out))
    )
    assert [each["code"] for each in told] == [1, 1], told
    errors = [line for each in told for line in each["said"].splitlines() if "error" in line]
    (last,) = {stage.id for stage in plan.stages[-1:]}
    assert len(errors) == 1, errors
    assert errors[0].startswith(
        f"error: step 3: the loss of micro-batch {2 * plan.microbatches + 1} (stage {last}) is not"
        " finite."
    )
    assert [each["code"] for each in again] == [0, 0], again
    assert strict((out / "run.json").read_text())["first_step"] == 2
    assert trained(out, semantics)
    for line in (out / "metrics.jsonl").read_text().splitlines():
        assert strict(line)["loss"] is not None


def test_plan_that_names_code(tmp_path: Path) -> None:
    """No rank calls what a plan names; all refuse it."""
    ran = tmp_path / "ran"
    named = f"subprocess:getoutput(cmd='touch {ran}')"
    chain = launch_task.chain().model_copy(update={"task": named})
    plan = launch_task.plan_of(chain, 2, "flush")
    (told,) = launched(spec(tmp_path, plan))
    assert [each["code"] for each in told] == [2, 2], told
    assert "names the task" in told[0]["said"]
    assert not ran.exists()
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("semantics", [pytest.param("flush", marks=pytest.mark.long), "2bw"])
def test_resume_on_fewer_and_fewer_ranks(tmp_path: Path, semantics: Semantics) -> None:
    """2 steps on 4 ranks, 2 on 2, 2 on 1: bit for bit six steps of one process."""
    out = tmp_path / "run"
    told = launched(
        spec(tmp_path, launch_task.plan(4, semantics), "--steps", "2"),
        *(
            spec(tmp_path, launch_task.plan(n, semantics), "--steps", m, "--resume", str(out))
            for n, m in ((2, "4"), (1, "6"))
        ),
    )
    assert [each["code"] for run in told for each in run] == [0] * 7, told
    assert trained(out, semantics, 6)
    assert json.loads((out / "run.json").read_text())["first_step"] == 4


def test_sigusr1_to_one_rank_saves_and_leaves(tmp_path: Path) -> None:
    """A scheduler's warning to one rank: all stop at one step, saved; resuming is exact."""
    plan = launch_task.plan(RANKS, "2bw")
    fault = {"rank": 1, "does": "SIGUSR1", "at": place(plan, 1, "warm-up")}
    out = tmp_path / "run"
    (told,) = launched(spec(tmp_path, plan, fault=fault))
    assert told[1]["code"] == 128 + 10, told
    steps = json.loads((out / "run.json").read_text())["steps"]
    assert steps < STEPS
    assert trained(out, "2bw", steps)
    (again,) = launched(spec(tmp_path, plan, "--resume", str(out)))
    check_resumed(tmp_path, again, "2bw", steps)


@pytest.mark.parametrize(
    ("semantics", "replicas", "step_s", "long_s", "within_s"),
    [
        pytest.param("flush", 1, 3, 1, None, marks=pytest.mark.long),
        ("2bw", 1, 3, 1, None),
        pytest.param("flush", 1, 7.2, None, 4, marks=pytest.mark.long),
        pytest.param("2bw", 1, 7.2, None, 4, marks=pytest.mark.long),
        pytest.param("flush", 2, 7.2, None, 4, marks=pytest.mark.long),
        pytest.param("flush", 1, 22, None, 10, marks=pytest.mark.long),
        pytest.param("2bw", 1, 22, None, 10, marks=pytest.mark.long),
    ],
)
def test_sigterm_with_long_steps(
    tmp_path: Path,
    semantics: Semantics,
    replicas: int,
    step_s: float,
    long_s: float | None,
    within_s: float | None,
) -> None:
    """Nobody finishes a long step: all drop it, save the one before, and go on exactly from it.

    Steps are long from 5 s on, or from `long_s` seconds on. Of the losses of the dropped step that
    are missing when the signal comes, not all are computed; with `within_s` all ranks have ended
    that many seconds after it.
    """
    plan = launch_task.plan(2, semantics)
    m = plan.microbatches
    losses = tmp_path / "losses"
    slow = f"tests.launch_task:slow(seconds={step_s / m}, counted={str(losses)!r})"
    words = ["--task", slow, *(["--replicas", str(replicas)] if replicas > 1 else [])]
    at = f"1F{m + m // 2}"
    fault = {"rank": 1, "does": "SIGTERM", "at": at, "mark": str(losses)}
    out = tmp_path / "run"
    first = spec(tmp_path, plan, *words, fault=fault)
    patience = {} if long_s is None else {"long_s": long_s}
    (told,) = launched({**first, **patience, "ranks": 2 * replicas})
    assert told[1]["code"] == 128 + 15, told
    begun = [str(action) for action in lowering.lower(plan).actions(1, 2 * m)]
    last = [f"{plan.stages[-1].id}F{m + number}" for number in range(m)]
    missing = sum(action in last for action in begun[begun.index(at) :])
    assert losses.read_text().rpartition("!")[2].count(".") < missing * replicas
    assert within_s is None or all(each["after_s"] < within_s for each in told), told
    run = json.loads((out / "run.json").read_text())
    assert (run["steps"], run["complete"]) == (1, False)
    assert (
        "stopped after step 1; the steps behind it are too long to be finished"
        in (told[0]["said"])
    )
    (again,) = launched(spec(tmp_path, plan, "--resume", str(out)))
    assert [each["code"] for each in again] == [0, 0], again
    state = torch.load(out / "model.pt")
    counts = [replicas] + [1] * (STEPS - 1)
    expected = launch_task.trained(semantics, STEPS, replicas=counts).weights
    assert all(torch.equal(state[name], value) for name, value in expected.items())


SOAK_STEPS = 4000
GROWTH_BYTES = 2**19
"""Over the second half: 2,000 steps and 200 checkpoints; a leak of 263 bytes per step would show.

The first half fills rings of fixed size and lets the allocator find its places: a checkpoint
leaves holes that later ones use, so what grows by 0.2 MiB per checkpoint at first stops growing.
"""


Used = tuple[int, int, int]
"""Resident bytes, open files, threads."""


def grown(used: list[Used]) -> Used:
    """How much more there is in the last part of the second half than in its first one.

    The least of each part counts: what lives for moments is no leak, what is never given back is
    in every later sample.
    """
    steady = used[len(used) // 2 : -3]
    window = len(steady) // 5
    assert window >= 5
    least = [
        [min(each[resource] for each in part) for resource in range(3)]
        for part in (steady[:window], steady[-window:])
    ]
    size, files, threads = (last - first for first, last in zip(*least, strict=True))
    return size, files, threads


def test_the_soak_sees_leaks_and_nothing_else() -> None:
    """A file for a moment is none; one that stays open from any step on is."""
    used = [(2**20, 38 + (step % 7 == 0), 7) for step in range(400)]
    assert grown(used) == (0, 0, 0)
    used[390] = (2**20, 40, 8)
    assert grown(used) == (0, 0, 0)
    leaks = [
        (size + 300 * step, files + (step > 300), 7) for step, (size, files, _) in enumerate(used)
    ]
    size, files, threads = grown(leaks)
    assert size > 40_000
    assert (files, threads) == (1, 0)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("semantics", ["flush", "2bw"])
def test_soak(tmp_path: Path, semantics: Semantics) -> None:
    """4,000 steps on 4 ranks: in the last 2,000 no more memory, open files or threads."""
    plan = launch_task.plan(RANKS, semantics)
    words = ("--steps", str(SOAK_STEPS), "--save-every", "10")
    (told,) = launched(spec(tmp_path, plan, *words), timeout_s=1700)
    assert [each["code"] for each in told] == [0] * RANKS, told
    assert trained(tmp_path / "run", semantics, SOAK_STEPS)
    for each in told:
        size, files, threads = grown([tuple(sample) for sample in each["used"]])
        assert size < GROWTH_BYTES, each["used"]
        assert max(files, threads) <= 0, each["used"]
