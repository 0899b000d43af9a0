"""What the executor of device programs costs: steps by operators beside eager ones.

    PYTHONPATH=. OMP_NUM_THREADS=1 python -m benchmarks.operators

writes benchmarks/results/operators.json. Each row is a model, run in turns by the program that
keeps all and by autograd. Times are processor time of the one thread that computes: others on the
machine take none of it away, but slow it down through caches. So two ratios are told: the median
over the rounds, and that of the least times, which others disturbed least. The aim: at most 1.03
where operators take 1 ms or more.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.markdown import table
from pipeplan.capture.layer_costs.device_clock import device_of
from pipeplan.operators import by_operators, capture
from pipeplan.rehearsal import measured
from pipeplan.remat.programs import keep_all
from pipeplan.tasks.attention import Block

ROUNDS, WARMUP = 15, 2
RESULT = Path(__file__).parent / "results" / "operators.json"


def _blocks(layers: int, width: int) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(
        *(Block(width, 8, dropout=0.0, causal=True) for _ in range(layers))
    )


def _convolutions(channels: int) -> nn.Module:
    parts = [
        nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU()
        )
        for _ in range(4)
    ]
    return nn.Sequential(*parts)


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "4 transformer blocks, width 512": (_blocks(4, 512), (8, 256, 512)),
    "4 transformer blocks, width 64": (_blocks(4, 64), (4, 64, 64)),
    "4 convolutions with batch norm, 64 channels": (lambda: _convolutions(64), (8, 64, 56, 56)),
}


def main() -> None:
    """All cases."""
    torch.set_num_threads(1)
    rows = {name: _row(*case) for name, case in CASES.items()}
    facts = device_of(nn.Linear(1, 1)).facts()
    RESULT.write_text(
        json.dumps({"machine": facts, "rounds": ROUNDS, "rows": rows}, indent=1) + "\n",
        encoding="utf-8",
    )
    for name, row in rows.items():
        print(name, row)


def _row(make: Callable[[], nn.Module], shape: tuple[int, ...]) -> dict[str, Any]:
    torch.manual_seed(0)
    module, source = make(), torch.randn(shape, requires_grad=True)
    captured = measured(module, capture(module, source))
    other = by_operators(module, captured, keep_all(captured.graph))
    ratios, eager, mine = [], [], []
    for turn in range(WARMUP + ROUNDS):
        both = [(each, _step(each, source)) for each in _order(turn, module, other)]
        times = {id(each): spent for each, spent in both}
        if turn >= WARMUP:
            ratios.append(times[id(other)] / times[id(module)])
            eager.append(times[id(module)])
            mine.append(times[id(other)])
    times_ns = sorted(each.time_ns for each in captured.graph.operations)
    return {
        "operations": len(times_ns),
        "median_operation_us": round(statistics.median(times_ns) / 1e3),
        "mean_operation_us": round(statistics.mean(times_ns) / 1e3),
        "eager_ms": round(statistics.median(eager) * 1e3, 2),
        "ratio": round(statistics.median(ratios), 4),
        "ratio_of_least": round(min(mine) / min(eager), 4),
        "ratio_quartiles": [round(each, 4) for each in statistics.quantiles(ratios, n=4)[::2]],
    }


def _order(turn: int, *modules: nn.Module) -> tuple[nn.Module, ...]:
    return modules if turn % 2 else modules[::-1]


def _step(module: nn.Module, source: Tensor) -> float:
    """Seconds of processor time of a forward and its backward."""
    result = torch.ones_like(source)
    begin = time.thread_time()
    module(source).backward(result)
    return time.thread_time() - begin


def page(found: dict[str, Any]) -> Iterator[str]:
    """The page of the results."""
    machine = found["machine"]
    yield "# What running a module by operators costs"
    yield (
        "The command `python -m benchmarks.operators` measures these rows on one thread"
        f" ({machine['cpu']}, torch {machine['torch']}): {found['rounds']} rounds, a step by"
        " autograd and one by the program that keeps all in each. Ratios are processor time by"
        " operators / by autograd; `least` is the ratio of the shortest steps. The aim is at most"
        " 1.03 where operators take 1 ms or more. Other jobs ran on the machine."
    )
    yield table(
        ("model", "operators", "mean of one [us]", "step [ms]", "ratio", "quartiles", "least"),
        [
            (
                name,
                str(row["operations"]),
                str(row["mean_operation_us"]),
                str(row["eager_ms"]),
                str(row["ratio"]),
                " to ".join(map(str, row["ratio_quartiles"])),
                str(row["ratio_of_least"]),
            )
            for name, row in found["rows"].items()
        ],
    )


if __name__ == "__main__":
    main()
