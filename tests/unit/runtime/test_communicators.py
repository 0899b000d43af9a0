"""What NCCL needs that can be checked without a GPU: which channels there are, who makes them."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import HashStore

from pipeplan.errors import RankError
from pipeplan.plan import Plan
from pipeplan.runtime.parameters.tied_parameters import find_ties, tags_of, untie
from pipeplan.runtime.startup.communicators import communicators
from pipeplan.runtime.transport.endpoints import endpoints, first_tie_tag
from pipeplan.runtime.transport.nccl import NcclTransport
from pipeplan.runtime.transport.pair_communicator import CommunicatorSpec, LentMessage, lent
from pipeplan.runtime.transport.rank_grid import RankGrid
from pipeplan.split_model import TensorSpec
from tests import pipelines

TOY, _ = pipelines.toy()
PATIENCE = timedelta(seconds=1)
CPU = torch.device("cpu")


def plan(semantics: Any = "flush") -> Plan:
    """Six stages on four GPUs; two boundaries go from rank 0 to rank 1, one of three tensors."""
    return pipelines.plan_of([1, 3, 4, 5, 7], [0, 1, 2, 0, 1, 3], semantics, microbatches=6)


def test_every_message_has_one_channel() -> None:
    """Each tensor of each wire of each replica: exactly one channel, of its two ranks."""
    stages, ranks, replicas = plan().stages, 4, 2
    made = communicators(stages, TOY.boundaries, ranks, replicas)
    found = [(each.source, each.target, tag) for each in made for tag in each.tags]
    needed = [(here, here + ranks, 0) for here in range(ranks)]
    needed += [(here + ranks, here, 0) for here in range(ranks)]
    for first in (0, ranks):
        for index, stage in enumerate(stages):
            links = endpoints(stages, TOY.boundaries, index)
            for endpoint in filter(None, (links.output, links.input_gradient)):
                needed += [
                    (first + stage.gpu, first + endpoint.peer, tag) for tag in endpoint.tags
                ]
            for endpoint in filter(None, (links.input, links.output_gradient)):
                assert all(
                    (first + endpoint.peer, first + stage.gpu, t) in found for t in endpoint.tags
                )
    assert sorted(found) == sorted(needed)
    between = [each for each in made if (each.source, each.target) == (0, 1)]
    assert len(between) == 2, "boundaries of one pair must not wait for each other"


def test_a_rank_makes_few_channels() -> None:
    """16 GPUs x 64 replicas, one stage each: 8 at most; every rank made all 3,936."""
    ranks, replicas = 16, 64
    boundaries = [(TensorSpec((1,), "torch.float32", index > 0),) for index in range(ranks)]
    stages = pipelines.plan_of(range(1, ranks), range(ranks), "flush", 16, layers=ranks).stages
    made = communicators(stages, boundaries, ranks, replicas)
    ends = Counter(end for each in made for end in (each.source, each.target))
    assert len(made) == 3936
    assert max(ends.values()) == 8
    assert len(ends) == ranks * replicas


def rounds(made: Sequence[CommunicatorSpec]) -> int:
    """How many channels connect one after the other, if each end makes its own in their order."""
    done: Counter[int] = Counter()
    for each in made:
        done[each.source] = done[each.target] = 1 + max(done[each.source], done[each.target])
    return max(done.values())


def test_channels_connect_side_by_side() -> None:
    """However many ranks and replicas: neighbours do not wait for each other in a row."""
    ranks, replicas = 16, 64
    boundaries = [(TensorSpec((1,), "torch.float32", index > 0),) for index in range(ranks)]
    stages = pipelines.plan_of(range(1, ranks), range(ranks), "flush", 16, layers=ranks).stages
    assert rounds(communicators(stages, boundaries, ranks, replicas)) == 8


def test_tied_gradients_have_channels_of_their_own() -> None:
    """Each use on another rank than its owner: from it and to it, in every replica, once."""
    split, _ = pipelines.split_by_hand(tied_layers(), "sgd", data=rows)
    split = untie(split, "synchronize")
    stages = pipelines.plan_of([1, 2, 3], [0, 1, 2, 1], "flush", 4, layers=4).stages
    ties = find_ties(stages, split)
    assert len(ties) == 2
    tags = tags_of(ties, first_tie_tag(split.boundaries))
    needed = []
    for tie in ties:
        for use in tie.uses[1:]:
            for first in (0, 3):
                here, there, tag = first + use.rank, first + tie.owner.rank, tags[id(use)]
                needed += [(here, there, tag), (there, here, tag)]
    made = communicators(stages, split.boundaries, 3, 2, ties)
    plain = communicators(stages, split.boundaries, 3, 2)
    assert set(plain) < set(made)
    extra = [each for each in made if each not in plain]
    assert sorted((e.source, e.target, tag) for e in extra for tag in e.tags) == sorted(needed)
    assert not {tag for each in extra for tag in each.tags} & {
        tag for each in plain for tag in each.tags
    }
    within = [e for e in extra if max(e.source, e.target) < 3]
    assert len(within) == 4, "one per direction and pair of stages, however many parameters"


def tied_layers() -> list[nn.Module]:
    """Layers 0, 2 and 3 share a weight and a bias."""
    first = nn.Linear(6, 6)
    later = [nn.Linear(6, 6), nn.Linear(6, 6)]
    for each in later:
        each.weight, each.bias = first.weight, first.bias
    return [first, nn.Tanh(), *later]


def rows(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """As `pipelines.data`, with six classes."""
    return pipelines.data(number)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float8_e4m3fn]
)
def test_lent_memory_is_the_same_memory(dtype: torch.dtype) -> None:
    """Of any type, also behind an offset; the lent tensor keeps nothing but what it lends."""
    whole = torch.zeros(5, 4).to(dtype)
    part = whole[2:]
    found = lent(part)
    assert (found.data_ptr(), found.shape, found.dtype) == (part.data_ptr(), part.shape, dtype)
    assert found.untyped_storage()._cdata != part.untyped_storage()._cdata


def test_a_message_keeps_what_it_lends_until_it_is_waited_for() -> None:
    """Not shorter: NCCL knows an address alone. Not longer: the plan counts on it."""
    tensor = torch.zeros(3)
    alive = weakref.ref(tensor)
    message = LentMessage(tensor, _Link(0, []))
    del tensor
    assert alive() is not None
    message.wait()
    assert alive() is None


class _Link:
    """A communicator that never connects; says what it is given."""

    def __init__(self, end: int, told: list[Any]) -> None:
        self.end, self.told = end, told

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> _Link:
        assert (rank, tag) == (1 - self.end, 0)
        self.told.append(("send", self))
        return self

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> _Link:
        assert (rank, tag) == (1 - self.end, 0)
        self.told.append(("receive", self))
        return self

    def wait(self) -> None:
        """Never waits."""

    def shutdown(self) -> None:
        self.told.append(("shutdown", self))


class _Whole:
    """The group of all ranks."""

    def __init__(self) -> None:
        self.store = HashStore()

    def get_group_store(self) -> HashStore:
        return self.store


def opened(
    rank: int, made: Sequence[CommunicatorSpec], told: list[Any]
) -> tuple[NcclTransport, RankGrid]:
    """The transport of one rank, with links that tell what they do, made or moved."""
    whole = _Whole()
    ranks = RankGrid(whole, None, PATIENCE, ((0, 1, 2, 3),), rank, owned=False)  # type: ignore[arg-type]

    names: list[str] = []

    def look(group: Any, store: Any) -> Any:
        assert group is whole
        return SimpleNamespace(
            close=lambda: told.append("good-bye"), tell=told.append, gone=lambda: "rank 7 is gone"
        )

    def make(store: Any, end: int, timeout: timedelta) -> Any:
        assert timeout == PATIENCE
        store.set("made", "")
        keys = [f"channel{number}/made" for number in range(len(made))]
        names.extend(key for key in keys if whole.store.check([key]) and key not in names)
        return _Link(end, told)

    transport = NcclTransport(ranks, made, CPU, make=make, look=look, carries=lambda _: True)
    assert names == [
        f"channel{number}/made"
        for number, each in enumerate(made)
        if rank in (each.source, each.target)
    ], "both ends must know a link by the same name"
    return transport, ranks


def test_all_ranks_make_and_connect_their_channels_in_one_order() -> None:
    """Each rank those that end at it, by their place among all; first messages in that order."""
    made = communicators(plan().stages, TOY.boundaries, 4)
    for rank in range(4):
        told: list[Any] = []
        transport, _ = opened(rank, made, told)
        mine = [each for each in made if rank in (each.source, each.target)]
        assert [verb for verb, _ in told] == [
            "send" if each.source == rank else "receive" for each in mine
        ]
        assert [link.end for _, link in told] == [
            int(rank == max(each.source, each.target)) for each in mine
        ]
        assert len(transport._communicators) == sum(len(each.tags) for each in mine)


def test_channels_are_left_before_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """When all are there: each link of this rank once and in order, then the group of all."""
    told: list[Any] = []
    monkeypatch.setattr(dist, "barrier", lambda group: told.append(("barrier", group)))
    monkeypatch.setattr(dist, "destroy_process_group", told.append)
    made = [
        CommunicatorSpec(0, 1, (0, 1)),
        CommunicatorSpec(1, 2, (0,)),
        CommunicatorSpec(1, 0, (0,)),
    ]
    transport, ranks = opened(0, made, told)
    mine = list(dict.fromkeys(transport._communicators.values()))
    assert len(mine) == 2
    told.clear()
    transport.close()
    left = [("shutdown", link) for link in mine]
    barrier = ("barrier", ranks.group)
    assert told == [barrier, "good-bye", *left, barrier, ranks.group]


def test_whoever_fails_says_so() -> None:
    """Its process may live on, and others' GPUs would wait for it."""
    told: list[Any] = []
    transport, _ = opened(2, [CommunicatorSpec(1, 2, (0,))], told)
    assert transport.gone() == "rank 7 is gone"
    told.clear()
    transport.abandon()
    assert told == ["rank 2 of all has failed"]


def test_channels_of_one_rank() -> None:
    """A plan for one GPU has none; replicas of it have those between neighbours."""
    stages = pipelines.plan_of([4], [0, 0], "flush", microbatches=6).stages
    assert communicators(stages, TOY.boundaries, 1) == ()
    assert communicators(stages, TOY.boundaries, 1, 2) == (
        CommunicatorSpec(0, 1, (0,)),
        CommunicatorSpec(1, 0, (0,)),
    )
    pairs = {(each.source, each.target) for each in communicators(stages, TOY.boundaries, 1, 3)}
    assert pairs == {(0, 1), (1, 0), (1, 2), (2, 1)}


def test_a_lost_rank_is_told_where_channels_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others hear of it, and it is an error of ranks, not of torch."""

    def lost(_: object) -> None:
        raise RuntimeError("connection reset")

    monkeypatch.setattr(dist, "barrier", lost)
    monkeypatch.setattr(dist, "destroy_process_group", lambda _: None)
    told: list[Any] = []
    transport, _ = opened(0, [CommunicatorSpec(0, 1, (0,))], told)
    told.clear()
    with pytest.raises(RankError, match=r"rank 0: another rank was gone .*: connection reset"):
        transport.close()
    assert told == ["rank 0 of all has failed"]
