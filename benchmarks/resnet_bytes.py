"""Bytes of ResNets beside Tables 1 and 2 of Beaumont, Herrmann, Pallez, Shilova (2019).

    python -m benchmarks.resnet_bytes [--networks 18 34 ..]

estimates ResNets of 1000 classes for one image (`pipeplan profile --mode fake`, whose bytes are
those of a run), writes benchmarks/results/resnet_bytes.json and docs/results/resnet-bytes.md.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.markdown import table
from pipeplan.remat import from_chain
from pipeplan.remat.checkpointing.periodic import keep_all
from pipeplan.remat.offloading.compute_order import compute_order

RESULT = Path(__file__).parent / "results" / "resnet_bytes.json"
WEIGHTS = {18: 175.05, 34: 329.29, 50: 384.85, 101: 674.65, 152: 913.36}
"""Table 1, by depth: "to keep all weights"; in MiB, as the comparison shows."""
ALL = {
    224: (230.05, 413.00, 620.27, 1027.21, 1410.62),
    350: (309.83, 534.96, 964.66, 1543.72, 2139.75),
    500: (449.21, 749.73, 1570.93, 2472.72, 3458.50),
    650: (639.07, 1039.08, 2387.54, 3682.00, 5161.76),
    1100: (1496.10, 2346.95, 6073.06, 9208.30, 12961.96),
    1500: (2628.70, 4075.07, 10944.42, 16515.11, 23277.27),
}
"""Table 2, by image side, in the order of `WEIGHTS`: "all weights and activations", one image."""
COPIES = 4
"""Weights, gradients and two moments of Adam."""


def measure(depth: int) -> dict[str, Any]:
    """Bytes of the weights, and by image side what a step of one image keeps at its turn."""
    from pipeplan.capture import estimate  # only here: it needs torch
    from pipeplan.devices import find_device

    kept = {}
    for side in ALL:
        task = f"pipeplan.tasks:resnet(size={depth},batch=1,side={side},classes=1000)"
        chain = estimate(task, find_device("v100"))
        costs = from_chain(chain)
        line = compute_order(costs, keep_all(costs))
        kept[side] = int(line.held[line.turn - 1]) - costs.static
        print(depth, side, file=sys.stderr, flush=True)
    return {"weights": sum(layer.weight_bytes for layer in chain.layers), "kept": kept}


def page(found: dict[str, Any]) -> Iterator[str]:
    """The result page."""
    yield "# Bytes of ResNets beside published tables"
    yield (
        "The command `python -m benchmarks.resnet_bytes` estimates ResNets of 1000 classes and one"
        " image (`pipeplan profile --mode fake`; tests hold its bytes equal to those of runs) and"
        " puts them beside Tables 1 and 2 of Beaumont, Herrmann, Pallez, Shilova (2019), who do"
        " not say how they counted. All figures but ratios are MiB."
    )
    yield "## Table 1: weights"
    yield (
        f"The published figures are near {COPIES} copies: weights, gradients and two moments of"
        " Adam."
    )
    yield table(
        ("ResNet", "weights", f"{COPIES} copies", "published", f"published / {COPIES} copies"),
        (_weights(depth, found[str(depth)]) for depth in WEIGHTS),
    )
    yield "## Table 2: activations"
    yield (
        "Published: Table 2 less Table 1. Kept: the bytes that autograd keeps from the forward to"
        " the backward, each storage once. Both grow with the pixels: the published figures are"
        " the same multiple of ours at every side. It is near three, as if all outputs of a"
        " convolution, its norm and its ReLU counted, and a gradient for each: six tensors where"
        " autograd keeps two."
    )
    head = ("side", *(f"ResNet-{depth}: kept, published, ratio" for depth in WEIGHTS))
    yield table(head, (_activations(side, found) for side in ALL))


def _weights(depth: int, row: dict[str, Any]) -> tuple[str, ...]:
    all_copies = COPIES * row["weights"] / 2**20
    published = WEIGHTS[depth]
    return (
        str(depth),
        f"{row['weights'] / 2**20:.2f}",
        f"{all_copies:.2f}",
        f"{published:.2f}",
        f"{published / all_copies:.3f}",
    )


def _activations(side: int, found: dict[str, Any]) -> tuple[str, ...]:
    cells = [str(side)]
    for (depth, weights), both in zip(WEIGHTS.items(), ALL[side], strict=True):
        kept, published = found[str(depth)]["kept"][str(side)] / 2**20, both - weights
        cells.append(f"{kept:.1f}, {published:.1f}, {published / kept:.2f}")
    return tuple(cells)


def main() -> None:
    """Estimate, write the file and the page."""
    from benchmarks import pages  # only here: it imports this module

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--networks", nargs="+", type=int, default=list(WEIGHTS))
    found = json.loads(RESULT.read_text(encoding="utf-8")) if RESULT.exists() else {}
    for depth in parser.parse_args().networks:
        found[str(depth)] = json.loads(json.dumps(measure(depth)))
        RESULT.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if {str(depth) for depth in WEIGHTS} <= found.keys():
        pages.main()


if __name__ == "__main__":
    main()
