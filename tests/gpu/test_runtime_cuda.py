"""Training on GPUs: ranks that share one through page-locked memory, and NCCL between several."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pipeplan.runtime.staging import receive_staged, send_staged
from tests.case_scripts import printed

GPUS = torch.cuda.device_count()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(GPUS == 0, reason="needs a CUDA device"),
]


def exact(backend: str, ranks: int, semantics: str) -> None:
    """Runs cuda_cases.py, which must find the training bit-equal."""
    script = Path(__file__).with_name("cuda_cases.py")
    assert printed(script, backend, str(ranks), semantics, "cuda", timeout_s=500) == ["exact"]


@pytest.mark.parametrize("semantics", ["flush", "2bw"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ranks_that_share_gpus_over_gloo(ranks: int, semantics: str) -> None:
    """Losses and weights equal one process on a GPU bit for bit, dropout and clipping on."""
    exact("gloo", ranks, semantics)


@pytest.mark.skipif(GPUS < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("semantics", ["flush", "2bw"])
def test_nccl_between_two_gpus(semantics: str) -> None:
    """The same with messages that never leave the GPUs."""
    exact("nccl", 2, semantics)


@pytest.mark.skipif(GPUS < 4, reason="needs four CUDA devices")
@pytest.mark.parametrize("semantics", ["flush", "2bw"])
def test_nccl_between_four_gpus(semantics: str) -> None:
    """Two stages on each: several boundaries between two GPUs."""
    exact("nccl", 4, semantics)


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
