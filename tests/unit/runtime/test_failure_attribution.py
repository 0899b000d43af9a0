"""Who is to blame: reports lead from the rank that fails to the one that waits for nobody."""

from __future__ import annotations

import inspect
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.distributed import HashStore

from pipeplan.errors import RankError
from pipeplan.runtime.data.feed import Uses
from pipeplan.runtime.supervision import failure_attribution
from pipeplan.runtime.supervision.failure_attribution import (
    FailureAttribution,
    RankActivity,
    _missed,
    _waits,
)
from pipeplan.runtime.transport.base import (
    PeerLostError,
    Pending,
    Transport,
    WrappedTransport,
    wait_all,
    wait_for,
)
from tests import pipelines


def watch(store: HashStore, rank: int, report: RankActivity) -> FailureAttribution:
    """A living rank that would report so."""
    return FailureAttribution(store, rank, lambda _: report)


def blamed(others: dict[int, RankActivity], failing: RankActivity) -> str:
    """What rank 0 finds out when it fails."""
    store = HashStore()
    watches = [watch(store, rank, report) for rank, report in others.items()]
    mine = watch(store, 0, failing)
    try:
        return mine.blame(failing)
    finally:
        for each in (mine, *watches):
            each.close()


def test_the_one_that_waits_for_nobody() -> None:
    """0 waits for 1, which waits for 2, which computes: 2 is to blame, with its own words."""
    others = {
        1: RankActivity("action 1F3", (2,)),
        2: RankActivity("action 2F3 for 9 s"),
        3: RankActivity("fine"),
    }
    assert (
        blamed(others, RankActivity("lost", (1,)))
        == "to blame: peer rank 2, which says: action 2F3 for 9 s"
    )


def test_the_one_that_says_nothing() -> None:
    """0 waits for 1, which waits for 2, which is dead."""
    said = blamed({1: RankActivity("action 1F3", (2,))}, RankActivity("lost", (1,)))
    assert said == "to blame: peer rank 2, which is gone or says nothing"


def test_later_failures_read_the_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that fails behind another one is told the same, without waiting for the dead.

    It would wait for longer than a test may take.
    """
    store = HashStore()
    first, second = (watch(store, rank, RankActivity("waits", (2,))) for rank in (0, 1))
    said = first.blame(RankActivity("lost", (2,)))
    monkeypatch.setattr(failure_attribution, "_PATIENCE_S", 3600)
    assert second.blame(RankActivity("lost", (0,))) == said
    first.close()
    second.close()


def test_the_store_gets_its_patience_back() -> None:
    """Whoever uses it after a failure, as a new `Pipeline` does, waits as long as before."""
    store = HashStore()
    before = store.timeout
    mine = watch(store, 0, RankActivity("lost", (1,)))
    assert mine.blame(RankActivity("lost", (1,)))
    assert store.timeout == before
    mine.close()


def test_waiting_in_a_circle_blames_nobody() -> None:
    """0 and 1 wait for each other: the failing rank's own line has to do."""
    assert blamed({1: RankActivity("action 1F3", (0,))}, RankActivity("lost", (1,))) == ""


def test_a_failure_of_its_own() -> None:
    """A rank whose own layer failed waits for nobody and blames nobody."""
    assert blamed({1: RankActivity("action 1F3", (0,))}, RankActivity("bad layer")) == ""


def test_a_wait_for_a_message_is_seen() -> None:
    """A rank inside `wait_all` waits for its peers; one that computes does not."""
    seen: list[bool] = []

    class Message:
        def wait(self) -> None:
            seen.append(_waits(inspect.currentframe()))

    wait_all([Message()])
    assert seen == [True]
    assert not _waits(inspect.currentframe())


def test_a_wait_for_one_rank_names_it() -> None:
    """The error does, and so do others that look at where this rank is."""
    seen: list[tuple[int, ...]] = []

    class Message:
        def wait(self) -> None:
            seen.append(_missed(inspect.currentframe()))
            raise PeerLostError("no message within 3 s")

    with pytest.raises(PeerLostError, match="no message within 3 s") as caught:
        wait_for(2, [Message()])
    assert caught.value.peer == 2
    assert seen == [(2,)]
    assert _missed(inspect.currentframe()) == ()


@pytest.mark.parametrize("clip", [True, False])
def test_an_update_names_the_rank_that_it_misses(clip: bool) -> None:
    """Where all ranks' norms decide, and where the rank with the losses hears of the step."""
    split, task = pipelines.toy()
    plan = pipelines.plan_of([4], [0, 1], "2bw", microbatches=2)
    whole = pipelines.pattern_of(plan, period=3)

    class Deaf(WrappedTransport):
        """Hears nothing of what is no tensor between stages."""

        def receive(self, tensor: Tensor, peer: int, tag: int) -> Pending:
            return (
                _Silent() if tensor.dtype == torch.float64 else super().receive(tensor, peer, tag)
            )

    class _Silent:
        def wait(self) -> None:
            raise PeerLostError("no message within 3 s")

    def work(transport: Transport) -> None:
        feed = pipelines.TaskFeed(task, split, Uses.of(plan, split, transport.rank))
        deaf = Deaf(transport) if transport.rank == 1 else transport
        given = replace(task, clip_norm=1.0 if clip else None)
        ends = plan, whole, split, given, feed, deaf, pipelines.Listener()
        pipelines.build(*ends, seed=0, reports=True).executor.run(0, 3)

    with pytest.raises(
        RankError, match="stage 1 lost peer rank 0: no message within 3 s"
    ) as caught:
        pipelines.run_ranks(2, work)
    assert caught.value.peers == (0,)


def test_executor_says_what_it_does() -> None:
    """Inside an action its place and peer, outside of one that it is between the steps.

    Asked between a wait in vain and its error's report, it still names the peer.
    """
    split, task = pipelines.toy()
    plan = pipelines.plan_of([2, 4, 6], [0, 1, 0, 1], "flush", microbatches=2)
    said: list[RankActivity] = []

    class Spy(pipelines.Listener):
        def backward(self, microbatch: int, end_ns: int) -> None:
            raise RankError("enough")

    pattern = pipelines.pattern_of(plan, period=3)
    workers = []

    def work(transport: pipelines.Transport) -> None:
        feed = pipelines.TaskFeed(task, split, Uses.of(plan, split, transport.rank))
        worker = pipelines.build(plan, pattern, split, task, feed, transport, Spy(), seed=0)
        workers.append(worker)
        said.append(worker.executor.doing(True))
        worker.executor.run(0, 1)

    with pytest.raises(RankError, match="enough"):
        pipelines.run_ranks(2, work)
    assert said[0] == RankActivity("between the steps", (1,))
    last = workers[1].executor.doing(True)
    assert last.text.startswith("action 3B0 (stage 3, micro-batch 0) for ")
    assert last.peers == ()
    waiting = workers[0].executor.doing(True)
    assert "peer rank 1" in waiting.text
    assert waiting.peers == (1,)
    assert workers[0].executor.doing(False).peers == (1,)
