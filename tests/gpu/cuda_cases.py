"""One training on spawned ranks with GPUs, against one process on a GPU.

`python cuda_cases.py BACKEND RANKS SEMANTICS DEVICE [REPLICAS [TASK [VISIBLE]]]` prints what
carried messages, and `exact` where losses and weights are bit-equal, or how they differ. RANKS
counts those of all replicas; with VISIBLE `one` each rank sees one GPU. DEVICE cpu runs the same
without a GPU, to test this file.
TASK is `train`, or `recompute` or `offload`: a small GPT-2 within scarce memory, on one rank; or
`kill`: the last rank dies before its second step; the others print how they end.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch
import torch.distributed as dist
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[2]))

from pipeplan import Pipeline, tasks
from pipeplan.capture import profile_task, split
from pipeplan.capture.tensor_distance import largest_difference
from pipeplan.cluster import Host, uniform
from pipeplan.errors import RankError
from pipeplan.launch.rank_store import RankStore
from pipeplan.plan import OpKind, Semantics
from pipeplan.planner import Config, solve
from pipeplan.runtime.transport.backend import Machine, Wanted, take_gpu
from pipeplan.runtime.transport.torchrun_env import TorchrunEnv
from pipeplan.task import Task
from pipeplan.testing import reference
from tests import launch_task, pipelines

STEPS = 4
SCARCE = {"recompute": 0.7, "offload": 0.7}
"""Memory, of what a plan that keeps everything takes."""


def task(device: str) -> Task:
    """The launch tests' task, its model and data on `device`."""
    made = launch_task.clipped(0)
    assert isinstance(made.model, nn.Module)

    def data(number: int) -> tuple[Tensor, Tensor]:
        source, target = pipelines.data(number)
        return source.to(device), target.to(device)

    return replace(made, model=made.model.to(device), data=data)


def trained(
    device: str, semantics: Semantics, ranks: int, backend: Wanted, replicas: int
) -> tuple[str, str]:
    """Two steps, the state into a new pipeline, two more; what carried it, how exact it is."""
    plan = launch_task.waiting(launch_task.plan(ranks // replicas, semantics))
    told: list[Any] = [None] * ranks
    losses = []
    with Pipeline(task(device), plan, seed=0, backend=backend, replicas=replicas) as pipeline:
        losses += pipeline.run(2)
        pipeline.evaluate(numbers=[7])
        pipeline.load_state_dict({k: _copied(v) for k, v in pipeline.state_dict().items()})
        losses += pipeline.run(2)
        state = {k: v.cpu() for k, v in pipeline.state_dict().items() if k.startswith("model.")}
        assert all(v.device.type == device for v in _tensors(pipeline.state_dict()))
        carrier = type(pipeline._transport).__name__
        if ranks > 1:
            dist.all_gather_object(told, (losses, state))
        else:
            told = [(losses, state)]
    if dist.is_initialized():
        raise AssertionError("the group was made for the pipeline")
    m = launch_task.MICROBATCHES
    expected = reference.train(
        semantics,
        split(task(device)),
        task(device),
        STEPS,
        m,
        0,
        replicas=[replicas] * STEPS if replicas > 1 else [],
    )
    means = _of_steps(expected.losses)
    first = told[: ranks // replicas]
    weights = {name: value for _, state in first for name, value in state.items()}
    heard = next(losses for losses, _ in first if losses)
    pairs = [(weights[f"model.{name}"], value.cpu()) for name, value in expected.weights.items()]
    return carrier, _compared(list(zip(heard, means, strict=True)), pairs)


def small(device: str) -> Task:
    """GPT-2 whose first weights are always the same."""
    torch.manual_seed(0)
    made = tasks.gpt2(0)
    assert isinstance(made.model, nn.Module)
    return replace(made, model=made.model.to(device))


def scarce(device: str, semantics: Semantics, kind: str) -> tuple[str, str]:
    """GPT-2 in memory so scarce that its plan does what `kind` says."""
    chain = profile_task(small(device), repeats=1, warmup=0)
    host = Host(memory_bytes=2**40, bandwidth_bytes_per_s=10**12)
    config = Config(
        semantics=semantics,
        microbatches=4,
        k=1,
        recompute="off" if kind == "offload" else "auto",
        offload="off" if kind == "recompute" else "auto",
        time_limit_s=5,
        deterministic=True,
    )
    free = solve(chain, uniform(1, 2**40), replace(config, recompute="off", offload="off"))
    cluster = uniform(1, round(SCARCE[kind] * free.memory[0].peak_bytes))
    cluster = cluster.model_copy(update={"host": None if kind == "recompute" else host})
    plan = solve(chain, cluster, config)
    remats = [stage.remat for stage in plan.stages if stage.remat]
    assert any(each.recompute or each.programs for each in remats) == (kind != "offload")
    assert any(op.kind is OpKind.OFFLOAD for op in plan.ops) == (kind != "recompute")
    with Pipeline(small(device), plan, seed=0) as pipeline:
        losses = pipeline.run(STEPS)
        weights = pipeline.state_dict()
    alone = small(device)
    expected = reference.train(semantics, split(alone), alone, STEPS, 4, 0)
    means = _of_steps(expected.losses)
    pairs = [(weights[f"model.{name}"], value) for name, value in expected.weights.items()]
    return kind, _compared(list(zip(losses, means, strict=True)), pairs)


def _of_steps(losses: list[float]) -> list[float]:
    """Mean losses of the `STEPS` steps."""
    m = len(losses) // STEPS
    return [sum(losses[i : i + m]) / m for i in range(0, len(losses), m)]


def _compared(losses: list[tuple[float, float]], weights: list[tuple[Tensor, Tensor]]) -> str:
    """`exact`, or what differs."""
    other = [step for step, (mine, alone) in enumerate(losses) if mine != alone]
    far = [largest_difference(*pair) for pair in weights if not torch.equal(*pair)]
    if not other and not far:
        return "exact"
    return f"losses of steps {other} and {len(far)} weights differ, by {max(far, default=0):.1e}"


def killed(rank: int, ranks: int, device: str, backend: Wanted) -> None:
    """The last rank dies while others wait for it; they say how it ends for them."""
    plan = launch_task.waiting(launch_task.plan(ranks, "flush"))
    with Pipeline(task(device), plan, seed=0, backend=backend, timeout="100s") as pipeline:
        pipeline.run(1)
        if rank == ranks - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        begin = time.monotonic()
        try:
            pipeline.run(1)
        except RankError:
            print(f"rank {rank}: within 20 s: {time.monotonic() - begin < 20}", flush=True)
            os._exit(0)


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _tensors(state: dict[str, Any]) -> list[Tensor]:
    return [v for k, v in state.items() if isinstance(v, Tensor) and not k.endswith(".step")]


def work(rank: int, words: list[str], store: RankStore) -> None:
    """One rank."""
    backend, ranks, semantics, device, *more = words
    replicas, name, visible = (*more, *("1", "train", "all")[len(more) :])
    if visible == "one":
        os.environ["CUDA_VISIBLE_DEVICES"] = str(rank)
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": ranks,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port()),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    take_gpu(TorchrunEnv.of(os.environ), Machine.here())
    if name == "kill":
        killed(rank, int(ranks), device, backend)  # type: ignore[arg-type]
        return
    if name in SCARCE:
        print(*scarce(device, semantics, name), flush=True)  # type: ignore[arg-type]
        return
    carrier, found = trained(
        device,
        semantics,
        int(ranks),
        backend,
        int(replicas),  # type: ignore[arg-type]
    )
    if rank == 0:
        print(carrier, found, flush=True)


def main() -> None:
    """The store, and the ranks: spawned, since CUDA does not survive a fork."""
    words = sys.argv[1:]
    context = multiprocessing.get_context("spawn")
    store = RankStore(context, patience_s=120)
    ranks = [
        context.Process(target=work, args=(rank, words, store)) for rank in range(int(words[1]))
    ]
    store.start(ranks)
    for rank in ranks:
        rank.join()
    sys.exit(any(rank.exitcode not in (0, -signal.SIGKILL) for rank in ranks))


if __name__ == "__main__":
    main()
