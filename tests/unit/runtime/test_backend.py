"""What carries messages is one answer for all ranks, found from what each of them has."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pipeplan.errors import InputError
from pipeplan.runtime.startup import process_group
from pipeplan.runtime.startup.process_group import Training, make_transport
from pipeplan.runtime.transport import backend
from pipeplan.runtime.transport.backend import (
    BackendChoice,
    Machine,
    Means,
    Wanted,
    agreed,
    take_gpu,
)
from pipeplan.runtime.transport.torchrun_env import TorchrunEnv
from tests import launch_task, pipelines

GPU = torch.device("cuda", 0)


def means(gpus: str, wanted: Wanted = "auto") -> list[Means]:
    """Of one rank per letter, which names its GPU."""
    return [Means(wanted, "cuda", gpu, True) for gpu in gpus]


@pytest.fixture
def one_visible(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What torch.cuda says where a rank sees one GPU: number 0, whichever that is."""
    seen = SimpleNamespace(uuid="a", set=[])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", seen.set.append)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: seen)
    monkeypatch.setattr(backend, "is_nccl_available", lambda: True)
    monkeypatch.setattr(backend, "device_of", lambda _: GPU)
    return seen


@pytest.mark.parametrize("wanted", ["auto", "nccl"])
def test_one_visible_gpu_per_rank(wanted: Wanted, one_visible: Any) -> None:
    """With srun --gpus-per-task=1: four ranks of a machine see one GPU each, all others: NCCL."""
    told = []
    for rank in range(4):
        one_visible.uuid = f"{rank}-of-this-machine"
        words = {"RANK": rank, "WORLD_SIZE": 4, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": 4}
        place = TorchrunEnv.of({name: str(value) for name, value in words.items()})
        machine = Machine.here()
        machine.check(wanted)
        take_gpu(place, machine)
        told.append(Means.of(wanted, pipelines.toy()[0]))
    assert one_visible.set == [0] * 4
    assert agreed(told) == BackendChoice("nccl", "4 ranks on GPUs of their own")


def test_one_gpu_under_two_numbers(one_visible: Any) -> None:
    """Two ranks that see the same GPU, each as its number 0: auto shares it, nccl is refused."""
    told = [Means.of("auto", pipelines.toy()[0]) for _ in range(2)]
    assert agreed(told) == BackendChoice("gloo", "ranks 0 and 1 on one GPU (GPU-a)")
    with pytest.raises(InputError, match=r"nccl and ranks 1 and 3 on one GPU \(b\), need NCCL"):
        agreed(means("abcb", "nccl"))


def test_a_gpu_without_a_uuid_is_known_by_its_place(
    one_visible: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By PCI address and machine: equal addresses on two machines are two GPUs."""
    places = iter([(0, 1, 0), (0, 2, 0), (0, 1, 0), (0, 1, 0)])
    machines = iter(["one", "one", "two", "one"])

    def properties(_: object) -> SimpleNamespace:
        domain, bus, device = next(places)
        return SimpleNamespace(pci_domain_id=domain, pci_bus_id=bus, pci_device_id=device)

    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    monkeypatch.setattr(backend, "machine", lambda: next(machines))
    told = [Means.of("auto", pipelines.toy()[0]).gpu for _ in range(4)]
    assert len(set(told)) == 3
    assert told[0] == told[3]


@pytest.mark.parametrize(
    ("worse", "why"),
    [
        ({"has_nccl": False}, "no NCCL in the torch of rank 2"),
        ({"gpu": None, "device": "cpu"}, "the model of rank 2 on cpu"),
        ({"gpu": "a"}, "ranks 0 and 2 on one GPU (a)"),
    ],
)
def test_one_rank_that_cannot_decides_for_all(worse: dict[str, Any], why: str) -> None:
    """A machine without NCCL or with too few GPUs: all ranks take gloo, and say why."""
    told = means("abcd")
    told[2] = replace(told[2], **worse)
    assert agreed(told) == BackendChoice("gloo", why)
    with pytest.raises(InputError) as caught:
        agreed([replace(each, wanted="nccl") for each in told])
    assert why in str(caught.value)
    assert "backend gloo" in str(caught.value)
    assert agreed([replace(each, wanted="gloo") for each in told]).backend == "gloo"


def test_ranks_that_want_different_things() -> None:
    """Are told which."""
    told = [*means("ab"), *means("c", "gloo")]
    with pytest.raises(InputError, match=r"auto on rank 0 and gloo on rank 2.*same --backend"):
        agreed(told)


@pytest.mark.parametrize(
    ("machine", "lacks"), [(Machine(0, False), "no GPU"), (Machine(4, False), "no NCCL")]
)
def test_nccl_where_it_cannot_work(machine: Machine, lacks: str) -> None:
    """Is refused before anything is loaded; what other ranks have decides the rest."""
    with pytest.raises(InputError, match=f"has {lacks} here.*backend gloo"):
        machine.check("nccl")
    machine.check("auto")
    Machine(1, True).check("nccl")


class _Ranks:
    """Four ranks, two replicas of two, of which this is one."""

    def __init__(self) -> None:
        self.group = SimpleNamespace(size=lambda: 4)
        self.rows = ((3, 1), (0, 2))
        self.left = 0

    def leave(self) -> None:
        self.left += 1


def training(wanted: Wanted) -> Training:
    """Of the toy on two GPUs."""
    plan = pipelines.plan_of([4], [0, 1], "flush", microbatches=2)
    return Training(plan, pipelines.toy()[0], wanted)


def test_all_ranks_decide_from_what_all_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks are named as people count them, replica by replica; who cannot leaves with all."""
    told = {3: "a", 1: "b", 0: "c", 2: "a"}

    def gathered(values: list[Any], own: Means, group: Any) -> None:
        for rank, gpu in told.items():
            values[rank] = replace(own, device="cuda", gpu=gpu, has_nccl=True)

    monkeypatch.setattr(dist, "all_gather_object", gathered)
    monkeypatch.setattr(process_group, "GlooTransport", lambda ranks, choice: choice)
    monkeypatch.setattr(
        process_group,
        "NcclTransport",
        lambda *words: SimpleNamespace(words=words, communicators=3),
    )
    ranks: Any = _Ranks()
    assert make_transport(ranks, training("auto")) == BackendChoice(
        "gloo", "ranks 0 and 3 on one GPU (a)"
    )
    with pytest.raises(InputError, match="ranks 0 and 3 on one GPU"):
        make_transport(ranks, training("nccl"))
    assert ranks.left == 1
    told[2] = "d"
    monkeypatch.delenv(backend.QUEUES, raising=False)
    made: Any = make_transport(ranks, training("nccl"))
    _, channels, _, choice = made.words
    assert choice.backend == "nccl"
    assert len(channels) == 2 * 2 + 2 * 2, "of both replicas, and between them"


def test_a_rank_alone_is_told_too() -> None:
    """There are no messages, but what was asked for cannot be had."""
    assert isinstance(training("auto").alone(), process_group.LocalTransport)
    with pytest.raises(InputError, match="the model of rank 0 on cpu"):
        training("nccl").alone()


@pytest.mark.parametrize(
    ("said", "channels", "need"),
    [(None, 7, None), (None, 8, 9), ("32", 100, None), ("1", 1, 2), ("1", 99, 32), ("x", 8, 9)],
)
def test_too_few_queues_are_said(said: str | None, channels: int, need: int | None) -> None:
    """A GPU has 8 unless told otherwise, 32 at most."""
    advice = backend.lacking_queues(said, channels)
    assert bool(advice) == (need is not None)
    if need is not None:
        assert f"need {need}: {channels} receives" in advice


def test_queues_are_asked_for_before_the_first_use_of_cuda(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What the user has set stays; later it would change nothing, so a warning says it."""
    monkeypatch.setenv(backend.QUEUES, "1")
    backend.ask_for_queues()
    assert backend.os.environ[backend.QUEUES] == "1"
    monkeypatch.delenv(backend.QUEUES)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    backend.ask_for_queues()
    assert backend.QUEUES not in backend.os.environ
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    backend.ask_for_queues()
    assert backend.os.environ[backend.QUEUES] == "32"


def test_a_pipeline_asks_for_queues_and_says_if_they_are_few(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It cannot set what was read with the model's first tensor on the GPU."""
    from pipeplan import Pipeline

    monkeypatch.delenv(backend.QUEUES, raising=False)
    with Pipeline(launch_task.task(0), launch_task.plan(1, "flush")):
        assert backend.os.environ[backend.QUEUES] == "32"
    monkeypatch.setattr(dist, "all_gather_object", lambda values, own, _: _fill(values, own))
    monkeypatch.setattr(
        process_group, "NcclTransport", lambda *_: SimpleNamespace(communicators=40)
    )
    monkeypatch.setenv(backend.QUEUES, "8")
    with pytest.warns(UserWarning, match="got 8, need 32: 40 receives"):
        make_transport(_Ranks(), training("auto"))  # type: ignore[arg-type]


def _fill(values: list[Any], own: Means) -> None:
    values[:] = [replace(own, device="cuda", gpu=str(n), has_nccl=True) for n in range(4)]
