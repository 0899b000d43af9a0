"""The chains of the offloading figures: their cut, bytes and times against what is published."""

from __future__ import annotations

import pytest

from benchmarks.remat_networks import network
from pipeplan.remat import from_chain
from pipeplan.remat.checkpointing.periodic import keep_all
from pipeplan.remat.offloading.compute_order import compute_order


@pytest.mark.parametrize(
    ("name", "blocks"),
    [("resnet18", 8), ("resnet50", 16), ("resnet152", 50), ("densenet121", 58 + 10)],
)
def test_blocks_are_single_layers(name: str, blocks: int) -> None:
    """Three layers of the stem, one per block or dense layer, two at the end.

    A transition of a DenseNet has three layers, and one norm comes before the end.
    """
    assert len(network(name, 2, 224).layers) == 3 + blocks + 2


def test_boundaries_have_the_sizes_of_the_networks() -> None:
    """ResNet halves its side four times behind the stem's convolution, DenseNet grows by 32."""
    resnet = network("resnet50", 2, 224).layers
    assert [layer.output_bytes for layer in resnet[:4]] == [
        2 * 4 * size for size in (64 * 112**2, 64 * 112**2, 64 * 56**2, 256 * 56**2)
    ]
    assert resnet[-3].output_bytes == 2 * 4 * 2048 * 7**2
    dense = network("densenet121", 2, 224).layers
    assert [layer.output_bytes for layer in dense[3:6]] == [
        2 * 4 * channels * 56**2 for channels in (96, 128, 160)
    ]
    assert dense[-3].output_bytes == 2 * 4 * 1024 * 7**2


def test_inception_has_the_sizes_and_weights_of_torchvisions() -> None:
    """Boundaries at 299 pixels; 23.8 million weights without the auxiliary classifier."""
    layers = network("inception_v3", 2, 299).layers
    stem = [(32, 149), (32, 147), (64, 147), (64, 73), (80, 73), (192, 71), (192, 35)]
    modules = [(256, 35), (288, 35), (288, 35), *[(768, 17)] * 5, (1280, 8), *[(2048, 8)] * 2]
    convolutions = {"1a", "2a", "2b", "3b", "4a"}
    sizes = [layer.output_bytes for layer in layers[:-2] if layer.name not in convolutions]
    assert sizes == [2 * 4 * channels * side**2 for channels, side in stem + modules]
    assert sum(layer.weight_bytes for layer in layers) == 4 * 23_833_568


def test_what_layers_keep() -> None:
    """A block keeps its input, what its norms and convolutions read, and its output."""
    block = network("resnet18", 1, 224).layers[3]
    assert block.saved_input_bytes == block.saved_output_bytes == block.output_bytes
    assert block.saved_bytes == 3 * block.output_bytes
    pool = network("resnet18", 1, 224).layers[2]
    assert (pool.saved_input_bytes, pool.saved_bytes) == (64 * 112**2 * 4, 64 * 56**2 * 8)


def test_bytes_and_times_are_near_what_is_published() -> None:
    """ResNet-101 at batch 32 trains in around 5 GB; ResNet-50 at 318 images per second."""
    costs = from_chain(network("resnet101", 32, 224))
    assert 4.3e9 < compute_order(costs, keep_all(costs)).peak < 5.5e9
    fast = from_chain(network("resnet50", 32, 224))
    assert 32e9 / fast.compute == pytest.approx(318, rel=0.01)


def test_unknown_networks_are_refused() -> None:
    """A name without a table, and one that is no network."""
    for name in ("resnet19", "vgg16", "densenet"):
        with pytest.raises(ValueError, match="network: got"):
            network(name, 1, 224)
