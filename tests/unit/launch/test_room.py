"""What a GPU has for a rank, what a run took of it, and whether its chain comes from elsewhere."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pipeplan import Pipeline
from pipeplan.errors import InputError
from pipeplan.launch.elsewhere import chain_facts, remark
from pipeplan.launch.logs import MetricsFile
from pipeplan.launch.progress import Progress
from pipeplan.pipeline import pipeline
from pipeplan.plan import Plan
from pipeplan.runtime.startup.gpu_memory import GpuMemory, GpuMemoryUse
from tests import launch_task

CUDA = torch.device("cuda", 0)


def planned(memory: int, reserve: int = 0, **device: Any) -> Plan:
    """A plan for two GPUs of so many bytes."""
    plan = launch_task.plan(2, "flush")
    gpus = tuple(
        gpu.model_copy(update={"memory_bytes": memory, "reserve_bytes": reserve})
        for gpu in plan.cluster.gpus
    )
    chain = plan.chain.model_copy(update={"device": device, "mode": "measured"})
    cluster = plan.cluster.model_copy(update={"gpus": gpus})
    return plan.model_copy(update={"cluster": cluster, "chain": chain})


def cuda(monkeypatch: pytest.MonkeyPatch, free: int, total: int, held: int) -> None:
    """A GPU of this name and these bytes."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free, total))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: held)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Big GPU")


def test_a_budget_beyond_what_is_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """What this process holds counts as there; the message has the flags that would do."""
    cuda(monkeypatch, free=600, total=1000, held=300)
    room = GpuMemory.of(CUDA)
    assert room is not None
    room.check(planned(900), 1)
    room.check(planned(1000, 100), 1)
    text = (
        r"cluster\.gpus\[1\]: got a budget of 901 bytes, need at most 900, .* of Big GPU: 100 of"
        r" its 1000 .*--memory 1000 --reserve 100 or more"
    )
    with pytest.raises(InputError, match=text):
        room.check(planned(1000, 99), 1)


def test_the_processor_has_no_such_room() -> None:
    """Nothing is asked of CUDA, and nothing is told."""
    here = torch.device("cpu")
    assert GpuMemory.of(here) is None
    assert GpuMemoryUse.since_start(here) == GpuMemoryUse(None, None)
    GpuMemoryUse.start(here)


def test_a_pipeline_is_refused_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is built; its connections are closed."""
    cuda(monkeypatch, free=600, total=1000, held=300)
    monkeypatch.setattr(pipeline, "device_of", lambda _: CUDA)
    monkeypatch.setattr(pipeline, "check_current", lambda *_: None)
    monkeypatch.setattr(pipeline, "Session", pytest.fail)
    left: list[int] = []
    transport = SimpleNamespace(rank=0, size=1, abandon=lambda: left.append(1))
    monkeypatch.setattr(pipeline, "for_pipeline", lambda *_: transport)
    with pytest.raises(InputError, match=r"gpus\[0\]: got a budget of .* need at most 900"):
        Pipeline(launch_task.task(0), launch_task.plan(1, "flush"))
    assert left


def test_steps_tell_what_is_taken(tmp_path: Path) -> None:
    """Beside the resident size: nothing on the processor, two numbers on a GPU."""
    lines = []
    for name, taken in (("cpu", GpuMemoryUse(None, None)), ("cuda", GpuMemoryUse(7, 9))):
        plan = launch_task.plan(1, "flush")
        file = tmp_path / name
        progress = Progress(
            plan,
            units_per_microbatch=1,
            follower=MetricsFile(file),
            taken=lambda taken=taken: taken,  # type: ignore[misc]
        )
        for number in range(plan.microbatches):
            progress.loss(number, 1.0)
            progress.backward(number, number)
        progress.updated(len(plan.stages) - 1, 0)
        progress.stepped(0, float("inf"), (0.1,))
        line = json.loads(file.read_text())
        assert (line["gradient_norm"], line["learning_rates"]) == (None, [0.1])
        lines.append((line["allocated_bytes"], line["reserved_bytes"]))
    assert lines == [(None, None), (7, 9)]


A = {"device": "cuda", "gpu": "A", "cpu": "x", "torch": "2"}
C = {"device": "cpu", "cpu": "x"}


@pytest.mark.parametrize(
    ("measured", "ranks", "said"),
    [
        (A, [A, A], None),
        (A, [A, A | {"cpu": "y"}], None),
        (A, [A, A | {"gpu": "B"}], "gpu A, and rank 1 has B"),
        (A, [A | {"torch": "3"}, A], "torch 2, and rank 0 has 3"),
        (A | {"device": "cpu"}, [A, A], "device cpu, and rank 0 has cuda"),
        (C, [C | {"cpu": "y"}] * 2, "cpu x, and rank 0"),
        (C | {"threads": 4}, [C | {"threads": 1}] * 2, "threads 4, and rank 0 has 1"),
        (A | {"threads": 4}, [A | {"threads": 1}] * 2, None),
        ({}, [A, A], None),
    ],
)
def test_a_chain_from_elsewhere_is_said(
    measured: dict[str, Any], ranks: list[dict[str, Any]], said: str | None
) -> None:
    """In one line, about the first rank that differs in what times and bytes follow from."""
    found = remark(planned(1, **measured), ranks)
    assert found is None if said is None else found is not None and said in found


def test_other_gpus_that_the_cluster_knows_are_not_said() -> None:
    """A speed other than 1 says that the GPU is not the one of the profile; nor are estimates."""
    plan = planned(1, **A)
    gpus = tuple(gpu.model_copy(update={"speed": 2.0}) for gpu in plan.cluster.gpus)
    faster = plan.model_copy(update={"cluster": plan.cluster.model_copy(update={"gpus": gpus})})
    others = [A | {"gpu": "B"}] * 2
    assert remark(faster, others) is None
    assert remark(plan, others) is not None
    estimated = plan.chain.model_copy(update={"mode": "estimated"})
    assert remark(plan.model_copy(update={"chain": estimated}), others) is None


def test_facts_are_those_of_a_profile() -> None:
    """A chain that was measured here says the same."""
    facts = chain_facts(torch.device("cpu"))
    assert remark(planned(1, **facts), [facts, facts]) is None
