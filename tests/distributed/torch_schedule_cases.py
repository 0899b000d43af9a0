"""`torch_schedule_cases.py RANKS`: exported plans in torch's own `_PipelineScheduleRuntime`.

Each rank is a process; messages go over gloo. Prints a line per plan: `exact` where the gradients
of all parameters equal those of plain backwards, in the order of micro-batches, bit for bit.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from random import Random

import torch
from torch import Tensor, distributed, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

sys.path.insert(0, str(Path(__file__).parents[2]))

from pipeplan import exporters, planner
from pipeplan.baselines.listed import listed_plan
from pipeplan.baselines.splits import to_stages
from pipeplan.baselines.timed import Setting
from pipeplan.chain import Chain, Layer
from pipeplan.cluster import uniform
from pipeplan.plan import Plan
from pipeplan.testing.plans import budgeted, scheduled
from pipeplan.torch_schedules import torch_lists
from tests.forked import run_ranks

WIDTH, ROWS, LAYERS = 6, 5, 8
PLACES = {2: [0, 1, 0, 1, 1, 0], 4: [2, 1, 0, 3, 1, 0]}
"""The GPUs of six stages of a periodic plan."""


class Part(nn.Module):
    """(f(x), x) behind a first layer, (f(x) + skip) before the last: boundaries of two tensors."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.norm = nn.LayerNorm(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, value: Tensor, *skip: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """One layer of the row."""
        made = torch.tanh(self.linear(self.norm(value)))
        if self.number % 3 == 0:
            return made, value * 2
        return made + skip[0] if self.number % 3 == 1 and skip else made


class Stage(nn.Module):
    """Consecutive layers."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, *values: Tensor) -> Tensor | tuple[Tensor, ...]:
        """One after the other."""
        for layer in self.layers:
            result = layer(*values)
            values = result if isinstance(result, tuple) else (result,)
        return values if len(values) > 1 else values[0]


def model() -> list[nn.Module]:
    """Eight layers with the same weights at each call."""
    torch.manual_seed(5)
    return [Part(number) for number in range(LAYERS)]


def batch(microbatches: int) -> tuple[Tensor, Tensor]:
    """Rows of a whole step and what they shall give."""
    generator = torch.Generator().manual_seed(microbatches)
    rows = (microbatches * ROWS, WIDTH)
    return torch.randn(rows, generator=generator), torch.randn(rows, generator=generator)


def chain() -> Chain:
    """Made-up times and bytes: plans of all kinds shall come, none is timed."""
    return Chain(
        name="row",
        input_bytes=8,
        layers=tuple(
            Layer(
                name=f"layers.{index}",
                forward_ns=20 + 7 * (index % 3),
                backward_ns=50 + 5 * (index % 2),
                backward_weight_ns=20,
                saved_for_weight_bytes=8,
                weight_bytes=40,
                gradient_bytes=40,
                output_bytes=8,
                saved_bytes=30,
            )
            for index in range(LAYERS)
        ),
    )


def plans(ranks: int) -> Iterator[tuple[str, Plan]]:
    """A periodic plan, a step with split backwards; of four ranks also the planner's."""
    cluster = uniform(ranks, 2**40, bandwidth_bytes_per_s=10**9)
    places = PLACES[ranks]
    drawn = scheduled(Random(1), chain(), cluster, to_stages([1, 2, 3, 5, 6, 8], places), k=2)
    flush = drawn.model_copy(update={"semantics": "flush", "microbatches": 7})
    yield "periodic", budgeted(Random(1), flush)
    forth = list(range(ranks))
    ends = [LAYERS * (part + 1) // (2 * ranks) for part in range(2 * ranks)]
    stages = to_stages(ends, [*forth, *reversed(forth)])
    outline = Setting(chain(), cluster).outline(stages, "flush", "test")
    yield "step", listed_plan(outline, torch_lists(ranks, 6, "ZBVZeroBubble", 2), 6)
    for memory in (800, 1000, 1400) if ranks == 4 else ():
        config = planner.Config(
            semantics="flush", microbatches=8, deterministic=True, time_limit_s=2.0, workers=1
        )
        yield f"planned {memory}", planner.solve(chain(), uniform(ranks, memory), config)


def gradients(parts: list[nn.Module]) -> list[Tensor]:
    """Of all parameters."""
    return [parameter.grad for part in parts for parameter in part.parameters()]


def plain(microbatches: int) -> list[list[Tensor]]:
    """Of each layer: the gradients of plain backwards, one micro-batch after the other."""
    layers = model()
    whole = Stage(layers)
    inputs, target = batch(microbatches)
    for rows, wanted in zip(inputs.split(ROWS), target.split(ROWS), strict=True):
        nn.functional.mse_loss(whole(rows), wanted).backward()
    return [gradients([layer]) for layer in layers]


def is_exact(plan: Plan, rank: int, file: Path) -> bool:
    """Whether this rank's gradients are those of plain backwards."""
    gpu, layers = exporters.rank_gpus(plan)[rank], model()
    mine = [stage for stage in plan.stages if stage.gpu == gpu]
    stages = [
        PipelineStage(
            Stage(layers[stage.first : stage.last + 1]),
            stage.id,
            len(plan.stages),
            torch.device("cpu"),
        )
        for stage in mine
    ]
    schedule = _PipelineScheduleRuntime(
        stages, plan.microbatches, loss_fn=nn.functional.mse_loss, scale_grads=False
    )
    schedule._load_csv(str(file))
    inputs, target = batch(plan.microbatches)
    first, last = stages[0].is_first, stages[-1].is_last
    schedule.step(*[inputs] * first, target=target if last else None)
    expected = plain(plan.microbatches)
    return all(
        torch.equal(one, other)
        for stage in mine
        for index in range(stage.first, stage.last + 1)
        for one, other in zip(gradients([layers[index]]), expected[index], strict=True)
    )


def work(given: list[tuple[str, Plan, Path]], rank: int, ranks: int, store: str) -> None:
    """All plans on one rank."""
    torch.set_num_threads(1)
    place = distributed.FileStore(store, ranks)
    distributed.init_process_group("gloo", store=place, rank=rank, world_size=ranks)
    for name, plan, file in given:
        told: list[bool | None] = [None] * ranks
        distributed.all_gather_object(told, is_exact(plan, rank, file))
        if rank == 0:
            stages = " ".join(str(stage.gpu) for stage in plan.stages)
            split = "split" if plan.splits else "whole"
            how = "exact" if all(told) else f"differs on {told}"
            print(f"{name}: stages on {stages}, {split} backwards: {how}", flush=True)
    distributed.destroy_process_group()


def main(ranks: int) -> None:
    """Every plan as a file, then the ranks that run them."""
    with tempfile.TemporaryDirectory() as folder:
        given = []
        for name, plan in plans(ranks):
            file = Path(folder, f"{name}.csv")
            file.write_text(exporters.torch_csv(plan))
            given.append((name, plan, file))
        run_ranks(partial(work, given), ranks, ranks)


if __name__ == "__main__":
    main(int(sys.argv[1]))
