"""LiveBytes: storages counted once, from the operation that makes them to their last reference."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity
from torch.profiler import profile as torch_profile

from pipeplan.capture.boundary_trace import call_layer
from pipeplan.livebytes import LiveBytes, peak_bytes, storage_bytes
from tests.capture_tasks import gpt2


def test_counts_storages_once_until_their_last_reference() -> None:
    """Views cost nothing, the storage lives as long as one of them."""
    live = LiveBytes()
    with live:
        whole = torch.zeros(100)
        part = whole[:10]
        assert live.live == 400
        del whole
        assert live.live == 400
        del part
        assert live.live == 0
    assert live.peak == 400


def test_known_tensors_are_counted_from_the_start() -> None:
    """Given tensors count at once, whoever views them later; giving them twice changes nothing."""
    known = torch.zeros(100)
    live = LiveBytes([known, known[:3]])
    live.count([known])
    with live:
        view = known[:10]
        known.add_(1)
    assert live.live == 400
    del known, view
    assert live.live == 0


def test_autograd_keeps_what_it_saves() -> None:
    """What only the graph refers to is alive; backward releases it."""
    weight = torch.zeros(10, requires_grad=True)
    weight.grad = torch.zeros(10)
    live = LiveBytes([weight, weight.grad])
    base = live.live
    with live:
        result = weight.exp().sum()
        assert live.live - base == 44
        result.backward()
        assert live.live - base == 4


def test_paused_counts_nothing_new() -> None:
    """What is made in a pause is not counted, even after it."""
    live = LiveBytes()
    with live:
        with live.paused():
            kept = torch.zeros(10)
        assert live.live == 0
        other = torch.zeros(5)
        assert live.live == 20
    assert storage_bytes([kept, kept[:2], other]) == 60


def test_resized_storage_counts_its_new_size() -> None:
    """An operation that lets a storage grow is seen."""
    live = LiveBytes()
    with live:
        value = torch.zeros(10)
        value.resize_(100)
        assert live.live == 400


def test_peak_can_be_reset() -> None:
    """After a reset the peak is what lives now."""
    live = LiveBytes()
    with live:
        large = torch.zeros(100)
        del large
        live.reset_peak()
        assert live.peak == 0


def test_agrees_with_the_allocator() -> None:
    """The peak of a transformer block's forward and backward is the allocator's, within 0.1 %.

    torch.profiler records every allocation, also those inside operations.
    """
    task = gpt2()
    module = task.model
    assert isinstance(module, torch.nn.Module)
    block = module.get_submodule("transformer.h.0")
    for parameter in block.parameters():
        parameter.grad = torch.zeros_like(parameter)

    def train() -> None:
        value = torch.randn(8, 32, 32, requires_grad=True)
        (output,) = call_layer("block", block, (value,))
        torch.autograd.backward(output, torch.ones_like(output))

    train()
    live = LiveBytes([p for q in block.parameters() for p in (q, q.grad) if p is not None])
    base = live.live
    with live:
        train()
    with torch_profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        train()
    results = recorded.profiler.kineto_results if recorded.profiler else None
    assert results is not None
    changes = [event for event in results.events() if event.name() == "[memory]"]
    held = peak = 0
    for event in sorted(changes, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    assert peak > 10**6
    assert abs((live.peak - base) - peak) <= peak // 1000


SPARSE_PARTS = {
    "oo": ("_indices", "_values"),
    "sr": ("crow_indices", "col_indices", "values"),
    "sc": ("ccol_indices", "row_indices", "values"),
}
"""By the end of a layout's name."""


@pytest.mark.parametrize("layout", ["coo", "csr", "csc", "bsr", "bsc"])
def test_sparse_tensors_count_by_their_parts(layout: str) -> None:
    """Indices and values are counted, once, and forgotten with the tensor."""
    block = {"blocksize": (2, 2)} if layout.startswith("bs") else {}
    live = LiveBytes()
    with live:
        dense = torch.eye(8)
        base = live.live
        value = getattr(dense, f"to_sparse_{layout}")(**block)
        names = SPARSE_PARTS[layout[-2:]]
        storages = [getattr(value, part)().untyped_storage() for part in names]
        expected = sum({id(each): each.nbytes() for each in storages}.values())
        assert storage_bytes([value, value]) == expected
        del storages
        gc.collect()
        assert live.live - base == expected
        del value
        gc.collect()
        assert live.live == base


def test_a_sparse_gradient_is_counted() -> None:
    """An embedding's sparse gradient holds its indices and rows, not the whole table."""
    table = nn.Embedding(1000, 8, sparse=True)
    tokens = torch.arange(10)
    peak = peak_bytes(table, lambda output, _: output.sum(), tokens, torch.zeros(1))
    held = 1000 * 8 * 4 + 10 * 8 + 4
    gradient = 10 * 8 + 10 * 8 * 4
    assert table.weight.grad is not None
    assert storage_bytes([table.weight.grad]) == gradient
    assert held + gradient <= peak < held + 3 * gradient
