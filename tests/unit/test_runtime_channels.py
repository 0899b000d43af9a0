"""What NCCL needs that can be checked without a GPU: who is refused, which channels there are."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pipeplan.errors import InputError
from pipeplan.plan import Plan
from pipeplan.runtime.backend import Backend, Machine, Wanted
from pipeplan.runtime.channels import Channel, channels
from pipeplan.runtime.nccl import ChannelTransport
from pipeplan.runtime.place import Place
from pipeplan.runtime.ranks import Ranks
from pipeplan.runtime.wiring import wires
from tests import pipelines

TOY, _ = pipelines.toy()
PATIENCE = timedelta(seconds=1)
GPU, CPU = torch.device("cuda", 0), torch.device("cpu")


def place(ranks_here: int) -> Place:
    """The first rank of a machine."""
    return Place.of({"RANK": "0", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": str(ranks_here)})


def plan(semantics: Any = "flush") -> Plan:
    """Six stages on four GPUs; two boundaries go from rank 0 to rank 1, one of three tensors."""
    return pipelines.plan_of([1, 3, 4, 5, 7], [0, 1, 2, 0, 1, 3], semantics, microbatches=6)


@pytest.mark.parametrize(
    ("machine", "device", "need"),
    [
        (Machine(0, False), CPU, "has no GPU here"),
        (Machine(4, False), GPU, "has no NCCL here"),
        (Machine(2, True), GPU, "4 ranks and 2 GPUs on this machine, need a GPU for each rank"),
        (Machine(4, True), CPU, "a model on cpu, need it on cuda"),
    ],
)
def test_nccl_where_it_cannot_work(machine: Machine, device: torch.device, need: str) -> None:
    """The message says what is missing, and that gloo would do."""
    with pytest.raises(InputError, match=need) as caught:
        machine.chosen("nccl", place(4), device)
    assert "backend gloo" in str(caught.value)


@pytest.mark.parametrize(
    ("machine", "device", "wanted", "chosen"),
    [
        (Machine(4, True), GPU, "auto", "nccl"),
        (Machine(4, True), GPU, "nccl", "nccl"),
        (Machine(4, True), GPU, "gloo", "gloo"),
        (Machine(1, True), GPU, "auto", "gloo"),
        (Machine(4, False), GPU, "auto", "gloo"),
        (Machine(4, True), CPU, "auto", "gloo"),
    ],
)
def test_chosen_backend(
    machine: Machine, device: torch.device, wanted: Wanted, chosen: Backend
) -> None:
    """`auto` takes NCCL only where every rank has a GPU and the model is on it."""
    assert machine.chosen(wanted, place(4), device) == chosen


def test_every_message_has_one_channel() -> None:
    """Each tensor of each wire of each replica: exactly one channel, of its two ranks."""
    stages, ranks, replicas = plan().stages, 4, 2
    made = channels(stages, TOY.boundaries, ranks, replicas)
    found = [(each.source, each.target, tag) for each in made for tag in each.tags]
    needed = [(here, here + ranks, 0) for here in range(ranks)]
    needed += [(here + ranks, here, 0) for here in range(ranks)]
    for first in (0, ranks):
        for index, stage in enumerate(stages):
            links = wires(stages, TOY.boundaries, index)
            for wire in filter(None, (links.output, links.input_gradient)):
                needed += [(first + stage.gpu, first + wire.peer, tag) for tag in wire.tags]
            for wire in filter(None, (links.input, links.output_gradient)):
                assert all((first + wire.peer, first + stage.gpu, t) in found for t in wire.tags)
    assert sorted(found) == sorted(needed)
    between = [each for each in made if (each.source, each.target) == (0, 1)]
    assert len(between) == 2, "boundaries of one pair must not wait for each other"


class _Group:
    """A communicator that never connects; says what it is given."""

    def __init__(self, ends: list[int], told: list[tuple[str, int, int]]) -> None:
        self.ends, self.told = ends, told

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> _Group:
        return self._moved("send", rank, tag)

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> _Group:
        return self._moved("receive", rank, tag)

    def _moved(self, verb: str, rank: int, tag: int) -> _Group:
        self.told.append((verb, sorted(self.ends)[rank], tag))
        return self

    def wait(self) -> None:
        """Never waits."""


def test_all_ranks_make_and_connect_channels_in_one_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups: the same list on each rank. First messages: in the order of the channels."""
    made = channels(plan().stages, TOY.boundaries, 4)
    for rank in range(4):
        groups: list[list[int]] = []
        told: list[tuple[str, int, int]] = []

        def new_group(ends: list[int], told: list[Any] = told, **words: Any) -> _Group:
            assert words["backend"] == "nccl"
            groups.append(ends)  # noqa: B023
            return _Group(ends, told)

        monkeypatch.setattr(dist, "new_group", new_group)
        ranks = Ranks(_Group([], told), None, PATIENCE, ((0, 1, 2, 3),), rank, owned=False)  # type: ignore[arg-type]
        transport = ChannelTransport(ranks, made, CPU, carries=lambda _: True)
        assert groups == [[each.source, each.target] for each in made]
        mine = [each for each in made if rank in (each.source, each.target)]
        assert told == [
            ("send", each.target, 0) if each.source == rank else ("receive", each.source, 0)
            for each in mine
        ]
        assert len(transport._channels) == sum(len(each.tags) for each in mine)


def test_channels_are_left_before_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """When all are there: each channel's group of this rank once, then the group of all."""
    told: list[Any] = []
    whole = _Group([0, 1], [])
    monkeypatch.setattr(dist, "new_group", lambda ends, **_: _Group(ends, []))
    monkeypatch.setattr(dist, "barrier", lambda group: told.append(("barrier", group)))
    monkeypatch.setattr(dist, "destroy_process_group", told.append)
    ranks = Ranks(whole, None, PATIENCE, ((0, 1, 2),), 0, owned=False)  # type: ignore[arg-type]
    made = [Channel(0, 1, (0, 1)), Channel(1, 2, (0,)), Channel(1, 0, (0,))]
    transport = ChannelTransport(ranks, made, CPU, carries=lambda _: True)
    mine = list(dict.fromkeys(transport._channels.values()))
    assert len(mine) == 2
    transport.close()
    assert told == [("barrier", whole), *mine, ("barrier", whole), whole]


def test_channels_of_one_rank() -> None:
    """A plan for one GPU has none; replicas of it have those between them."""
    stages = pipelines.plan_of([4], [0, 0], "flush", microbatches=6).stages
    assert channels(stages, TOY.boundaries, 1) == ()
    assert channels(stages, TOY.boundaries, 1, 2) == (Channel(0, 1, (0,)), Channel(1, 0, (0,)))
