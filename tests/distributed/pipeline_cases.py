"""`Pipeline` with replicas on forked ranks: made by it, and on a mesh of the user's.

Prints a line per case: `exact` where losses and weights equal one process bit for bit.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed import TCPStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

sys.path.insert(0, str(Path(__file__).parents[2]))

from pipeplan import Pipeline
from pipeplan.capture import profile_task
from pipeplan.errors import InputError
from pipeplan.launch.rank_store import RankStore
from pipeplan.pipeline import pipeline as made
from pipeplan.plan import Plan, Semantics
from pipeplan.task import Task
from pipeplan.testing import reference
from tests import launch_task, pipelines

GPUS, REPLICAS, STEPS = 2, 2, 3
M = launch_task.MICROBATCHES
EXPECTED: list[tuple[Callable[[int], Task], Semantics]] = [
    (launch_task.task, "2bw"), (launch_task.narrow, "2bw"), (launch_task.task, "flush")
]  # fmt: skip
"""Trainings that ranks are compared with."""


def mesh(rows: list[list[int]], names: tuple[str, ...] = ("dp", "pp")) -> DeviceMesh:
    """A mesh of the ranks in `rows`."""
    return DeviceMesh("cpu", rows, mesh_dim_names=names)


def batch(replica: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The micro-batches that the task would give this replica in `step`."""
    first = (step * REPLICAS + replica) * M
    inputs, target = zip(*map(pipelines.data, range(first, first + M)), strict=True)
    return torch.cat(inputs), torch.cat(target)


@functools.cache
def plan_of(make: Callable[[int], Task], semantics: Semantics) -> Plan:
    """The plan of a task of `launch_task`."""
    if make is launch_task.task:
        return launch_task.plan(GPUS, semantics)
    chain = launch_task.leveled(profile_task(make(0), repeats=1, warmup=0))
    return launch_task.plan_of(chain, GPUS, semantics)


@functools.cache
def expected_of(make: Callable[[int], Task], semantics: Semantics) -> reference.Trained:
    """What one process makes of the task that averages over as many micro-batches."""
    return launch_task.trained(semantics, STEPS, replicas=[REPLICAS] * STEPS, make=make)


def trained(
    make: Callable[[int], Task], semantics: Semantics, **words: Any
) -> tuple[bool, tuple[int, int]]:
    """Two steps on the task's data, one on a batch of the replica's own; whether all is exact."""
    with Pipeline(make(0), plan_of(make, semantics), seed=0, **words) as pipeline:
        assert pipeline.mesh is not None
        assert pipeline.mesh.mesh_dim_names == ("dp", "pp")
        coordinate = pipeline.mesh.get_coordinate()
        assert coordinate is not None
        replica, gpu = coordinate
        losses = pipeline.run(STEPS - 1)
        last = pipeline.step(*batch(replica, STEPS - 1))
        losses += [last] if last is not None else []
        state = {k: v for k, v in pipeline.state_dict().items() if k.startswith("model.")}
        assert pipeline.state_dict()["drawn"] == STEPS * REPLICAS * M
        told: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(told, ((replica, gpu), losses, state))
    pipeline.close()  # again, which does nothing
    expected = expected_of(make, semantics)
    first = {key: value for (r, _), _, part in told if r == 0 for key, value in part.items()}
    heard = next(losses for (r, _), losses, _ in told if r == 0 and losses)
    means = [sum(expected.losses[i : i + M]) / M for i in range(0, STEPS * M, M)]
    exact = heard == means and all(
        torch.equal(first[f"model.{name}"], value) for name, value in expected.weights.items()
    )
    return exact, (replica, gpu)


def goes_on(out: str, **words: Any) -> bool:
    """One step, a checkpoint, all anew from it: whether the weights equal those of one process."""
    make = launch_task.task
    plan = plan_of(make, "2bw")
    with Pipeline(make(0), plan, seed=0, **words) as pipeline:
        pipeline.run(1)
        pipeline.save(out)
    with Pipeline(make(1), plan, seed=0, **words) as pipeline:
        pipeline.load(out)
        pipeline.run(STEPS - 1)
        assert pipeline.mesh is not None
        state = {k: v for k, v in pipeline.state_dict().items() if k.startswith("model.")}
        told: list[Any] = [None] * dist.get_world_size()
        first = pipeline.mesh.get_local_rank("dp") == 0  # each has running statistics of its own
        dist.all_gather_object(told, state if first else {})
    found = {name: value for part in told for name, value in part.items()}
    expected = expected_of(make, "2bw").weights
    return all(torch.equal(found[f"model.{name}"], value) for name, value in expected.items())


def refused(words: dict[str, Any]) -> str:
    """The message with which `Pipeline` refuses."""
    try:
        Pipeline(launch_task.task(0), launch_task.plan(GPUS, "flush"), **words)
    except InputError as error:
        return str(error)
    return "accepted"


def ends_badly(crossed: DeviceMesh) -> None:
    """A pipeline that cannot be made, and one whose block fails."""
    plan = launch_task.plan(GPUS, "flush")
    with mock.patch.object(made, "Session", side_effect=InputError("no stage fits")):
        assert refused({"mesh": crossed}) == "no stage fits"
    with suppress(KeyError), Pipeline(launch_task.task(0), plan, mesh=crossed):
        raise KeyError


def pushers() -> int:
    """Threads that push messages."""
    return sum(thread.name == "send-thread" for thread in threading.enumerate())


def work(rank: int, store: RankStore, out: str) -> None:
    """All cases of one rank."""
    port = store.port()
    torch.set_num_threads(1)
    size = GPUS * REPLICAS
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    lines = [refused({"replicas": 3}), refused({"backend": "nccl"})]
    exact, place = trained(launch_task.task, "2bw", replicas=REPLICAS)
    assert place == divmod(rank, GPUS)
    lines.append(f"replicas: {'exact' if exact else 'differs'}")
    lines.append(f"resumed: {'exact' if goes_on(f'{out}/own', replicas=REPLICAS) else 'differs'}")
    os.environ["TORCHELASTIC_RESTART_COUNT"] = "1"
    exact, _ = trained(launch_task.narrow, "2bw", replicas=REPLICAS)
    lines.append(f"in 16 bits: {'exact' if exact else 'differs'}")
    os.environ["TORCHELASTIC_RESTART_COUNT"] = "2"
    meeting = TCPStore("127.0.0.1", port, timeout=timedelta(seconds=60))
    again = dist.PrefixStore("users", meeting)
    dist.init_process_group("gloo", store=again, rank=rank, world_size=size)
    crossed = mesh([[0, 2], [1, 3]])
    exact, place = trained(launch_task.task, "flush", mesh=crossed)
    assert place == (rank % 2, rank // 2)
    lines.append(f"mesh: {'exact' if exact else 'differs'}")
    exact = goes_on(f"{out}/mesh", mesh=crossed)
    lines.append(f"resumed on a mesh: {'exact' if exact else 'differs'}")
    lines.append(refused({"mesh": init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))}))
    lines.append(refused({"mesh": mesh([[0, 1, 2, 3]])}))
    lines.append(refused({"mesh": crossed, "replicas": 3}))
    assert pushers() == 0
    ends_badly(crossed)
    lines.append(f"left behind: {pushers()}")
    if rank == 0:
        print("\n".join(lines), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """The store of all, and the ranks."""
    launch_task.plan(GPUS, "2bw")
    plan_of(launch_task.narrow, "2bw")  # measured once: ranks must have one plan
    for make, semantics in EXPECTED:  # trained once, not by each rank
        expected_of(make, semantics)
    context = multiprocessing.get_context("fork")
    store = RankStore(context)
    with TemporaryDirectory() as out:
        ranks = [
            context.Process(target=work, args=(rank, store, out))
            for rank in range(GPUS * REPLICAS)
        ]
        store.start(ranks)
        for rank in ranks:
            rank.join()
    sys.exit(any(rank.exitcode for rank in ranks))


if __name__ == "__main__":
    main()
