"""Ranks agree before they make any group, or all hear the same reason why not."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch.distributed import HashStore
from torch.distributed.distributed_c10d import Store

from pipeplan.capture import split
from pipeplan.errors import DisagreementError, RankError
from pipeplan.runtime.parameters.tied_parameters import untie
from pipeplan.runtime.startup import facts, handshake, shared_directory
from pipeplan.runtime.startup.handshake import Fact, Facts, agree, send_refusal
from tests import launch_task
from tests.unit.runtime.test_memory import tied

SOON, LATE = timedelta(seconds=30), timedelta(seconds=0.5)


def on_ranks(work: Callable[[Store, int], object], ranks: Sequence[int]) -> list[str]:
    """What `work` raises on each rank: kind and message; empty where it returns."""
    store = HashStore()

    def one(rank: int) -> str:
        try:
            work(store, rank)
        except DisagreementError as error:
            return str(error)
        except RankError as error:
            return f"{error} {error.peers}"
        return ""

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(one, ranks))


def shaken(*each: Facts | str | None, timeout: timedelta = SOON) -> list[str]:
    """What ranks hear that come with these facts, are refused with a text, or never come."""

    def work(store: Store, rank: int) -> None:
        mine = each[rank]
        if isinstance(mine, Facts):
            agree(store, rank, len(each), mine, timeout)
        elif mine is not None:
            assert send_refusal(store, rank, len(each), mine, timeout)

    return on_ranks(work, [rank for rank, mine in enumerate(each) if mine is not None])


def come(plan: str = "a", seed: str = "0", weights: Mapping[str, str] | None = None) -> Facts:
    """Facts of a rank."""
    alike = {"plan": Fact(plan, "Take one plan."), "seed": Fact(seed, "Take one seed.")}
    return Facts(alike, weights or {})


def test_ranks_that_agree() -> None:
    """Nobody hears anything; what one rank alone has is compared with nothing."""
    some = [{"x": "1", "y": "2"}, {"y": "2"}, {"z": "3"}]
    assert shaken(*(come(weights=each) for each in some)) == ["", "", ""]


DIFFERENT: list[tuple[list[Facts | str], str]] = [
    (
        [come(), come(plan="b", seed="1"), come(), come(), come(plan="b")],
        "join: plan: got a on ranks 0, 2-3, b on ranks 1, 4, need the same on all ranks."
        " Take one plan.",
    ),
    ([come(seed="1"), come()], "join: seed: got 1 on rank 0, 0 on rank 1, need"),
    ([come(), Facts()], "join: plan: got a on rank 0, nothing on rank 1, need the same"),
    (
        [come(weights={"x": "1", "y": "2", "z": "3"}), come(), come(weights={"y": "5", "z": "4"})],
        "join: initial weights: 'y' (and 1 more): got 2 on rank 0, 5 on rank 2, need the same",
    ),
    ([come(), come(), "no such file"], "rank 2: no such file"),
]


@pytest.mark.parametrize(("each", "said"), DIFFERENT)
def test_ranks_that_differ(each: list[Facts | str], said: str) -> None:
    """The first difference, on every rank the same words."""
    heard = shaken(*each)
    assert heard[0].startswith(said)
    assert set(heard) <= {heard[0], ""}
    assert heard.count("") == sum(isinstance(one, str) for one in each)


def test_rank_0_is_refused() -> None:
    """The others hear its reason."""
    assert shaken("no such file", come(), come()) == ["", "no such file", "no such file"]


def test_ranks_that_do_not_come_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank that came names them; a difference among those that came is told instead.

    Which late ranks could hear of for a while: nobody comes, so that is made short.
    """
    monkeypatch.setattr(handshake, "_HEARD_S", 0.2)
    monkeypatch.setattr(handshake, "_GRACE_S", 0.2)
    heard = shaken(come(), None, come(), None, timeout=LATE)
    need = "got 2 of 4 ranks, need all within 500 ms: no word of ranks 1, 3 (1, 3)"
    assert heard == [f"rank 0: {need}", f"rank 2: {need}"]
    heard = shaken(come(), None, come(plan="b"), timeout=SOON)
    assert heard == ["join: plan: got a on rank 0, b on rank 2, need the same on all ranks."
                     " Take one plan."] * 2  # fmt: skip
    assert shaken(None, come(), timeout=LATE) == [
        "rank 1: got no word of rank 0 within 500 ms (0,)"
    ]


def test_copies_of_a_tied_weight_have_its_name() -> None:
    """Under `synchronize` ranks that hold another layer's copy compare it with the owner's."""
    task = tied("synchronize")
    whole = untie(split(task), task.tied)
    first = replace(whole, layers=(whole.layers[0],), names=("a",), fqns=(whole.fqns[0],))
    last = replace(whole, layers=(whole.layers[4],), names=("b",), fqns=(whole.fqns[4],))
    shared = facts.weights(first).keys() & facts.weights(last).keys()
    assert shared
    before = facts.weights(last)
    with torch.no_grad():
        next(iter(whole.layers[4].parameters())).mul_(2)
    assert before != facts.weights(last)
    assert shaken(come(weights=facts.weights(first)), come(weights=before)) == ["", ""]
    heard = shaken(come(weights=facts.weights(first)), come(weights=facts.weights(last)))
    assert heard[0].startswith(f"join: initial weights: '{min(shared)}': got ")


def test_weights_without_memory_are_not_compared() -> None:
    """A rank tells of what it has; buffers are told with their layer."""
    made = split(launch_task.task(0))
    names = facts.weights(made).keys()
    assert any(name.endswith("running_mean") and ": " in name for name in names)
    torch.manual_seed(0)
    made.layers[0].to("meta")
    lacking = names - facts.weights(made).keys()
    assert lacking == {"0.0.weight", "0.0.bias"}


def test_plain_settings_of_the_task_are_facts() -> None:
    """A rank that clips would wait for norms that others never send."""
    plan, task = launch_task.plan(1, "flush"), launch_task.task(0)
    words = {"seed": 0, "data": "", "flags": {}}
    one, two = (
        facts.trained(plan, split(each), each, **words)  # type: ignore[arg-type]
        for each in (task, replace(task, clip_norm=0.5))
    )
    assert [name for name in one.alike if one.alike[name] != two.alike[name]] == [
        "settings of the task"
    ]
    same = (launch_task.validated(0), launch_task.validated(0))
    one, two = (facts.trained(plan, split(each), each, **words) for each in same)  # type: ignore[arg-type]
    assert one == two, "each rank makes metrics and callbacks of its own"


def shared(*outs: Path) -> list[str]:
    """What ranks hear whose --out are these."""
    return on_ranks(
        lambda store, rank: shared_directory.check_shared(
            store, rank, len(outs), outs[rank], SOON
        ),
        range(len(outs)),
    )


def test_one_directory(tmp_path: Path) -> None:
    """It is made, with what it is in, and is empty; also where it was there before."""
    out = tmp_path / "new" / "run"
    for _ in range(2):
        assert shared(out, out, out) == ["", "", ""]
        assert not any(out.iterdir())


def test_directories_of_their_own(tmp_path: Path) -> None:
    """Who has another one is named; what was there stays, what was not is not there again."""
    out, other = tmp_path / "new" / "run", tmp_path / "other" / "run"
    heard = shared(out, other, out, other)
    assert len(set(heard)) == 1
    assert heard[0].startswith(f"--out {out}: rank 1: got a directory of its own, need one that")
    assert not any(tmp_path.iterdir())
    for _ in range(60):  # ranks 1 and 3 look into one directory at the same time
        shared(out, other, out, other)
        assert not any(tmp_path.iterdir())
    out.mkdir(parents=True)
    other.mkdir(parents=True)
    assert all(shared(out, other))
    assert not any(out.iterdir())
    assert not any(other.iterdir())


def test_a_directory_that_takes_no_file(tmp_path: Path) -> None:
    """Whether rank 0 finds out or another one, all hear which."""
    (tmp_path / "file").touch()
    good, bad = tmp_path / "run", tmp_path / "file" / "run"
    for outs, rank in (((good, bad), 1), ((bad, good), 0)):
        heard = shared(*outs)
        assert heard[0] == heard[1]
        assert heard[0].startswith(f"--out {outs[0]}: rank {rank}: cannot be written to: ")
    assert not good.exists()
