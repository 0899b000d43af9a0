"""Ranks that agree where to stop: behind the last step that anyone has begun."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from pipeplan.errors import RankError
from pipeplan.runtime.supervision import stop_consensus
from pipeplan.runtime.supervision.board import LocalBoard
from pipeplan.runtime.supervision.stop_consensus import BoardConsensus
from pipeplan.runtime.supervision.stop_request import NoRequest


class Wants(NoRequest):
    """Wants to stop once it is told."""

    def __init__(self) -> None:
        """Does not want to yet."""
        super().__init__()
        self.now = False

    def wanted(self, seconds: float) -> bool:
        """See `Wish`."""
        return super().wanted(seconds) or self.now


@pytest.fixture
def wishes() -> list[Wants]:
    """What three ranks want."""
    return [Wants() for _ in range(3)]


@pytest.fixture
def consensuses(wishes: list[Wants]) -> Iterator[list[BoardConsensus]]:
    """Gates of three ranks that have two steps behind them."""
    board = LocalBoard()
    consensuses = [
        BoardConsensus(board, rank, 3, wish, first=2, timeout_s=20)
        for rank, wish in enumerate(wishes)
    ]
    yield consensuses
    for consensus in consensuses:
        consensus.close()


def test_nobody_wants_to_stop(consensuses: list[BoardConsensus]) -> None:
    """Every step may begin, without a look at the others."""
    assert all(consensus.begin_step(step) for consensus in consensuses for step in range(2, 2000))


@pytest.mark.parametrize("who", [0, 1, 2])
def test_steps_that_anyone_has_begun_are_finished(
    consensuses: list[BoardConsensus], wishes: list[Wants], who: int
) -> None:
    """Also where the one that wants to stop has begun none, as a rank without stages."""
    assert all(consensuses[0].begin_step(step) for step in (2, 3, 4))
    assert consensuses[1].begin_step(2)
    wishes[who].now = True
    wishes[who].wake()
    while not consensuses[0]._settled() or consensuses[0]._end is None:
        time.sleep(0.01)
    assert [consensuses[1].begin_step(step) for step in (3, 4, 5)] == [True, True, False]
    assert not consensuses[0].begin_step(5)


def test_one_that_asks_begins_no_further_step(consensuses: list[BoardConsensus]) -> None:
    """`ask` holds from the moment it is called, though the others have not heard of it."""
    assert consensuses[0].begin_step(2)
    consensuses[0].ask()
    assert not consensuses[0].begin_step(3)
    assert consensuses[2].begin_step(2)
    assert not consensuses[2].begin_step(3)


def test_a_wish_before_the_first_step(consensuses: list[BoardConsensus]) -> None:
    """Nothing is begun, and no step before the first one is taken for the end."""
    consensuses[1].ask()
    assert not any(consensuses[rank].begin_step(2) for rank in (1, 0, 2))


def test_a_rank_that_says_nothing() -> None:
    """It is missed after the timeout, not waited for."""
    consensus = BoardConsensus(LocalBoard(), 0, 2, NoRequest(), first=0, timeout_s=0.5)
    consensus.ask()
    with pytest.raises(RankError, match="rank 0: the ranks do not agree where to stop: a rank"):
        consensus.begin_step(0)
    consensus.close()


class Gone(LocalBoard):
    """A board whose keeper has ended."""

    def offer(self, name: str, text: str) -> None:
        """See `Board`."""
        raise RuntimeError("Broken pipe")


def test_a_store_that_is_gone() -> None:
    """The one that wants to stop says why it cannot; others train on until they miss a peer."""
    consensus = BoardConsensus(Gone(), 0, 2, NoRequest(), first=0, timeout_s=60)
    assert consensus.begin_step(0)
    consensus.ask()
    with pytest.raises(RankError, match="do not agree where to stop: Broken pipe"):
        consensus.begin_step(1)
    consensus.close()


def test_no_thread_is_left(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Closing ends the thread, which else would look up after longer than a test may take."""
    monkeypatch.setattr(stop_consensus, "_LOOK_S", 3600)
    consensuses: list[BoardConsensus] = request.getfixturevalue("consensuses")
    before = threading.active_count()
    for consensus in consensuses:
        consensus.close()
    assert threading.active_count() == before - 3
