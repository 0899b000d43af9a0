"""A `Pipeline` after an error, in the same processes: forked ranks, as in `pipeline_cases`.

`python recovery_cases.py on`, or `off` for ranks without socket channels, prints a line per case:
`exact` where the weights equal those of one process that never failed. A rank that waits for one
that says nothing does so for 600 s, longer than the script may take.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import TCPStore

sys.path.insert(0, str(Path(__file__).parents[2]))

from pipeplan import Pipeline
from pipeplan.errors import PipeplanError
from pipeplan.launch.rank_store import RankStore
from pipeplan.plan import Semantics
from pipeplan.runtime.transport import local_rendezvous
from pipeplan.task import Task
from tests import launch_task

GPUS, STEPS = 2, 4
M = launch_task.MICROBATCHES
kept: list[object] = []
"""Errors with their tracebacks, which hold what ranks had in hand."""


class _Fails:
    """The task's loss, that fails once: in the middle of the third step."""

    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        self._loss = loss
        self._calls = 0

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        self._calls += 1
        if self._calls == 2 * M + 3:
            raise ArithmeticError("a loss of mine")
        return self._loss(output, target)


def made(fails: bool) -> Task:
    """The model anew."""
    torch.manual_seed(0)
    task = launch_task.task(0)
    return replace(task, loss=_Fails(task.loss)) if fails else task


def recovers(semantics: Semantics) -> str:
    """Two steps, an error in the third on the rank of the loss, all anew from between."""
    plan = launch_task.plan(GPUS, semantics)
    pipeline = Pipeline(made(fails=True), plan)
    pipeline.run(2)
    state = {
        key: value.clone() if isinstance(value, Tensor) else value
        for key, value in pipeline.state_dict().items()
    }
    dist.barrier()
    try:
        pipeline.run(2)
    except PipeplanError as error:
        kept.append(error)
        said = str(error)
    assert ("a loss of mine" if pipeline.has_loss else "lost its peer") in said, said
    if not pipeline.has_loss:
        assert "to blame: peer rank 1, which says: rank 1: action" in said, said
    pipeline.close()
    with Pipeline(made(fails=False), plan) as pipeline:
        pipeline.load_state_dict(state)
        pipeline.run(STEPS - 2)
        part = {k: v for k, v in pipeline.state_dict().items() if k.startswith("model.")}
        parts: list[Any] = [None] * GPUS
        dist.all_gather_object(parts, part)
    expected = launch_task.trained(semantics, STEPS).weights
    found = {name: value for each in parts for name, value in each.items()}
    same = all(torch.equal(found[f"model.{name}"], value) for name, value in expected.items())
    return "exact" if same else "differs"


def case(rank: int, name: str, work: Callable[[], str]) -> None:
    """Run and tell one case."""
    told = work()
    if rank == 0:
        print(f"{name}: {told}", flush=True)


def refused_on_one(rank: int) -> str:
    """A `Pipeline` that cannot be made on one rank, then one that can."""
    plan = launch_task.plan(GPUS, "flush")
    task = made(fails=False)
    try:
        Pipeline(task, plan, seed=rank)
    except PipeplanError as error:
        said = str(error)
    assert said.startswith("join: seed: got 0 on rank 0, 1 on rank 1, need the same"), said
    return recovers("flush")


def one_leaves(rank: int) -> str:
    """A rank whose block fails between two steps; the other one wants to end with it."""
    plan = launch_task.plan(GPUS, "flush")
    try:
        with Pipeline(made(fails=False), plan) as pipeline:
            pipeline.run(1)
            if rank:
                raise KeyError("of mine")
    except (PipeplanError, KeyError) as error:
        kept.append(error)
        said = str(error)
    assert ("of mine" if rank else "rank 0: another rank was gone when all were to") in said, said
    return recovers("flush")


def work(rank: int, store: RankStore, sockets: str) -> None:
    """All cases of one rank."""
    port = store.port()
    torch.set_num_threads(1)
    if sockets == "off":
        local_rendezvous.machine = lambda: None  # then nobody finds out who is on one machine
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(GPUS),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    case(rank, f"sockets {sockets}, flush", lambda: recovers("flush"))
    case(rank, f"sockets {sockets}, 2bw", lambda: recovers("2bw"))
    case(rank, f"sockets {sockets}, differing seeds", lambda: refused_on_one(rank))
    case(rank, f"sockets {sockets}, one leaves", lambda: one_leaves(rank))
    meeting = TCPStore("127.0.0.1", port, timeout=timedelta(seconds=60))
    mine = dist.PrefixStore("users", meeting)
    dist.init_process_group("gloo", store=mine, rank=rank, world_size=GPUS)
    case(rank, f"sockets {sockets}, in a group of the script's", lambda: recovers("flush"))
    case(rank, f"sockets {sockets}, and again", lambda: recovers("2bw"))
    alive = torch.ones(1)
    dist.all_reduce(alive)
    case(rank, "the script's group", lambda: "alive" if alive.item() == GPUS else "broken")
    dist.destroy_process_group()


def main(sockets: str) -> None:
    """The store of all, and the ranks."""
    launch_task.plan(GPUS, "2bw")
    context = multiprocessing.get_context("fork")
    store = RankStore(context)
    ranks = [context.Process(target=work, args=(rank, store, sockets)) for rank in range(GPUS)]
    store.start(ranks)
    for rank in ranks:
        rank.join()
    sys.exit(any(rank.exitcode for rank in ranks))


if __name__ == "__main__":
    main(sys.argv[1])
