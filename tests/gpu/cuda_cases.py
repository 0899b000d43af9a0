"""One training on spawned ranks with GPUs, against one process on a GPU.

`python cuda_cases.py BACKEND RANKS SEMANTICS DEVICE` prints `exact` where losses and weights are
bit-equal. DEVICE cpu runs the same without a GPU, to test this file.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import TCPStore

sys.path.insert(0, str(Path(__file__).parents[2]))

from pipeplan import Pipeline
from pipeplan.capture import split
from pipeplan.plan import Semantics
from pipeplan.runtime.backend import Machine, Wanted, take_gpu
from pipeplan.runtime.place import Place
from pipeplan.task import Task
from tests import launch_task, pipelines, reference

STEPS = 4


def task(device: str) -> Task:
    """The launch tests' task, its model and data on `device`."""
    made = launch_task.clipped(0)
    assert isinstance(made.model, nn.Module)

    def data(number: int) -> tuple[Tensor, Tensor]:
        source, target = pipelines.data(number)
        return source.to(device), target.to(device)

    return replace(made, model=made.model.to(device), data=data)


def trained(device: str, semantics: Semantics, ranks: int, backend: Wanted) -> bool:
    """Two steps, the state into a new pipeline, two more; whether rank 0 finds all exact."""
    plan = launch_task.waiting(launch_task.plan(ranks, semantics))
    told: list[Any] = [None] * ranks
    losses = []
    with Pipeline(task(device), plan, seed=0, backend=backend) as pipeline:
        losses += pipeline.run(2)
        pipeline.evaluate(numbers=[7])
        pipeline.load_state_dict({k: _copied(v) for k, v in pipeline.state_dict().items()})
        losses += pipeline.run(2)
        state = {k: v.cpu() for k, v in pipeline.state_dict().items() if k.startswith("model.")}
        assert all(v.device.type == device for v in _tensors(pipeline.state_dict()))
        if ranks > 1:
            dist.all_gather_object(told, (losses, state))
        else:
            told = [(losses, state)]
    if dist.is_initialized():
        raise AssertionError("the group was made for the pipeline")
    expected = reference.train(
        semantics, split(task(device)), task(device), STEPS, launch_task.MICROBATCHES, 0
    )
    m = launch_task.MICROBATCHES
    means = [sum(expected.losses[i : i + m]) / m for i in range(0, STEPS * m, m)]
    weights = {name: value for _, state in told for name, value in state.items()}
    heard = next(losses for losses, _ in told if losses)
    return heard == means and all(
        torch.equal(weights[f"model.{name}"], value.cpu())
        for name, value in expected.weights.items()
    )


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _tensors(state: dict[str, Any]) -> list[Tensor]:
    return [v for k, v in state.items() if isinstance(v, Tensor) and not k.endswith(".step")]


def work(rank: int, words: list[str], port: int) -> None:
    """One rank."""
    backend, ranks, semantics, device = words
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": ranks,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    take_gpu(Place.of(os.environ), Machine.here())
    exact = trained(device, semantics, int(ranks), backend)  # type: ignore[arg-type]
    if rank == 0:
        print("exact" if exact else "differs", flush=True)


def main() -> None:
    """The store, and the ranks: spawned, since CUDA does not survive a fork."""
    words = sys.argv[1:]
    patience = timedelta(seconds=120)
    store = TCPStore("127.0.0.1", 0, is_master=True, timeout=patience, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    ranks = [
        context.Process(target=work, args=(rank, words, store.port))
        for rank in range(int(words[1]))
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    sys.exit(any(rank.exitcode for rank in ranks))


if __name__ == "__main__":
    main()
