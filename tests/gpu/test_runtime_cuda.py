"""Training on GPUs: ranks that share one through page-locked memory, and NCCL between several."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from pipeplan import Pipeline
from pipeplan.plan import Semantics
from pipeplan.program import Action, ActionKind
from pipeplan.runtime.supervision.run_ahead import COMPUTES, RunAhead
from pipeplan.runtime.transport.backend import Means
from pipeplan.runtime.transport.base import PeerLostError
from pipeplan.runtime.transport.gloo import GlooTransport
from pipeplan.runtime.transport.host_staging import receive_staged, send_staged
from pipeplan.runtime.transport.nccl import NcclTransport
from pipeplan.runtime.transport.pair_communicator import lent
from tests import launch_task, pipelines
from tests.case_scripts import printed

GPUS = torch.cuda.device_count()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(GPUS == 0, reason="needs a CUDA device"),
]


SCRIPT = Path(__file__).with_name("cuda_cases.py")
CHANNELS, GLOO = NcclTransport.__name__, GlooTransport.__name__


def exact(carrier: str, backend: str, ranks: int, semantics: str, *more: str) -> None:
    """Runs cuda_cases.py, which must find the training bit-equal, its messages with `carrier`."""
    words = (backend, str(ranks), semantics, "cuda", *more)
    assert printed(SCRIPT, *words, timeout_s=500) == [f"{carrier} exact"]


@pytest.mark.parametrize("semantics", ["flush", "2bw"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_that_share_gpus_over_gloo(ranks: int, semantics: str) -> None:
    """Losses and weights equal one process on a GPU bit for bit, dropout and clipping on."""
    exact(GLOO, "gloo", ranks, semantics)


@pytest.mark.parametrize("semantics", ["flush", "2bw"])
def test_a_rank_alone(semantics: str) -> None:
    """The same without messages."""
    exact("LocalTransport", "auto", 1, semantics)


@pytest.mark.parametrize("kind", ["recompute", "offload"])
@pytest.mark.parametrize("semantics", ["flush", "2bw"])
def test_scarce_memory(semantics: str, kind: str) -> None:
    """What is computed again, or waits on the host, has the bits of one process."""
    words = ("auto", "1", semantics, "cuda", "1", kind)
    assert printed(SCRIPT, *words, timeout_s=500) == [f"{kind} exact"]


@pytest.mark.parametrize("semantics", ["flush", "2bw"])
def test_replicas_that_share_gpus_over_gloo(semantics: str) -> None:
    """Two replicas of two ranks: averages through the host."""
    exact(GLOO, "gloo", 4, semantics, "2")


def test_ranks_that_see_one_gpu_share_it() -> None:
    """`auto` knows the GPU again under another number, and takes gloo."""
    exact(GLOO, "auto", 2 * GPUS, "flush")


@pytest.mark.skipif(GPUS < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("semantics", ["flush", "2bw"])
def test_nccl_between_two_gpus(semantics: str) -> None:
    """The same with messages that never leave the GPUs."""
    exact(CHANNELS, "nccl", 2, semantics)


@pytest.mark.skipif(GPUS < 2, reason="needs two CUDA devices")
def test_nccl_where_each_rank_sees_one_gpu() -> None:
    """As under srun --gpus-per-task=1: `auto` takes NCCL."""
    exact(CHANNELS, "auto", 2, "flush", "1", "train", "one")


@pytest.mark.skipif(GPUS < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("semantics", ["flush", "2bw"])
def test_replicas_over_nccl(semantics: str) -> None:
    """Two replicas of one GPU: averages on a stream of their own."""
    exact(CHANNELS, "nccl", 2, semantics, "2")


@pytest.mark.skipif(GPUS < 2, reason="needs two CUDA devices")
def test_a_killed_rank_under_nccl() -> None:
    """The other one ends soon, though its GPU waits for a message that never comes."""
    words = ("nccl", "2", "flush", "cuda", "1", "kill")
    assert printed(SCRIPT, *words, timeout_s=200) == ["rank 0: within 20 s: True"]


@pytest.mark.skipif(GPUS < 4, reason="needs four CUDA devices")
@pytest.mark.parametrize("replicas", ["1", "2"])
@pytest.mark.parametrize("semantics", ["flush", "2bw"])
def test_nccl_between_four_gpus(semantics: str, replicas: str) -> None:
    """Two stages on each: several boundaries between two GPUs; two replicas of two."""
    exact(CHANNELS, "nccl", 4, semantics, replicas)


def address(borrowed: bool) -> tuple[int, int]:
    """Where a tensor was that a busy stream uses, and where the next one of its size is."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    busy = torch.cuda.Stream()
    tensor = torch.empty(2**24, device="cuda")
    found = tensor.data_ptr()
    with torch.cuda.stream(busy):
        torch.cuda._sleep(2**31)
    (lent(tensor) if borrowed else tensor).record_stream(busy)
    del tensor
    return found, torch.empty(2**24, device="cuda").data_ptr()


def test_lent_memory_is_not_tied_to_the_stream_that_it_is_lent_to() -> None:
    """Given up, it is there again at once; what the stream is recorded of is not ((O7))."""
    before, after = address(borrowed=True)
    assert after == before
    before, after = address(borrowed=False)
    assert after != before, "record_stream no longer holds memory: `lent` has no reason any more"


def test_a_process_is_not_far_ahead_and_hears_while_the_gpu_is_busy() -> None:
    """So many computes under way; a rank that is gone is heard of before the GPU is done."""
    device, gone = torch.device("cuda", 0), [""]
    ahead = RunAhead.of(device, lambda: gone[0], 100 * 10**9)
    action = Action(ActionKind.F, 0, 0)
    last = torch.cuda.Event()
    for _ in range(COMPUTES):
        torch.cuda._sleep(2**31)
        last.record()
        ahead.computed(action)
    assert not last.query()
    gone[0] = "rank 1 is gone"
    with pytest.raises(PeerLostError, match="rank 1 is gone"):
        ahead.computed(action)
    assert not last.query(), "heard after the GPU was done"
    gone[0] = ""
    ahead.drain()
    assert last.query()
    value = torch.arange(5, device="cuda")
    assert ahead.read(value).tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("semantics", ["flush", "2bw"])
def test_nothing_in_the_schedule_waits_for_the_gpu(semantics: Semantics) -> None:
    """Data from the host, losses, clipping, updates: torch finds no call that would."""
    made = launch_task.clipped(0)
    assert isinstance(made.model, nn.Module)
    task = replace(made, model=made.model.to("cuda"), data=pipelines.data)
    plan = launch_task.waiting(launch_task.plan(1, semantics))
    with Pipeline(task, plan, seed=0) as pipeline:
        pipeline.run(1)
        torch.cuda.set_sync_debug_mode("error")
        try:
            losses = pipeline.run(3)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert len(losses) == 3


def test_a_gpu_has_one_name() -> None:
    """The same each time, another one for each GPU."""
    split = pipelines.toy()[0]
    names = []
    for number in range(GPUS):
        device = torch.device("cuda", number)
        moved = replace(split, layers=tuple(layer.to(device) for layer in split.layers))
        names.append(Means.of("auto", moved).gpu)
        assert names[-1] == Means.of("auto", moved).gpu
    assert None not in names
    assert len(set(names)) == GPUS


class _Carried:
    def __init__(self, host: torch.Tensor) -> None:
        self.host = host

    def wait(self) -> None:
        self.host.add_(1)


def test_a_staged_message_is_complete() -> None:
    """What is sent has been computed; what is received is in place for the next kernel."""
    seen = []

    def take(host: torch.Tensor) -> _Carried:
        assert host.is_pinned()
        seen.append(host.clone())
        return _Carried(host)

    large = torch.ones(2048, 2048, device="cuda")
    product = large @ large @ large
    send_staged(product, take).wait()
    assert torch.equal(seen[0], product.cpu())
    place = torch.empty(64, device="cuda")
    pending = receive_staged(place, lambda host: _Carried(host.zero_()))
    pending.wait()
    assert torch.equal((place * 2).cpu(), torch.full((64,), 2.0))
