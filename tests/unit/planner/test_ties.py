"""A weight that the first and the last layer share: no contiguous plan uses more than one GPU."""

from __future__ import annotations

from pipeplan import planner
from pipeplan.chain import Chain, Layer
from pipeplan.cluster import uniform
from tests import handmade

_ROWS = (
    (174, 107, 128, 66, 2, 0),
    (597, 547, 100, 131, 66, 394),
    (959, 834, 396, 262, 131, 592),
    (893, 1033, 790, 328, 131, 395),
    (804, 1348, 788, 197, 0, 460),
    (609, 839, 197, 66, 0, 459),
    (220, 313, 67, 328, 0, 328),
    (139, 225, 66, 66, 262, 0),
    (506, 801, 2, 1, 0, 580),
)
"""Forward and backward in us; weights, output, saved input and saved bytes in kB."""


def _layer(index: int, row: tuple[int, ...]) -> Layer:
    forward, backward, weight, output, saved_input, saved = (1000 * value for value in row)
    return Layer(
        name=f"layer {index}",
        forward_ns=forward,
        backward_ns=backward,
        weight_bytes=weight,
        gradient_bytes=weight,
        optimizer_bytes=2 * weight,
        output_bytes=output,
        saved_input_bytes=saved_input,
        saved_bytes=saved,
        parameters=("table",) if index in (0, 8) else (),
    )


def test_tied_ends_do_not_keep_the_work_on_one_gpu() -> None:
    """Two GPUs share the work, though each contiguous plan leaves one of them idle."""
    layers = tuple(_layer(index, row) for index, row in enumerate(_ROWS))
    chain = Chain(name="tied ends", input_bytes=2000, layers=layers)
    machines = uniform(2, 12 * 2**20, bandwidth_bytes_per_s=2 * 10**9, latency_ns=50_000)
    config = planner.Config(k=1, time_limit_s=2, workers=1, deterministic=True)
    plan = planner.solve(chain, machines, config)
    work = sum(layer.forward_ns + layer.backward_ns for layer in layers)
    assert plan.period_ns < 0.6 * work


def test_no_time_goes_to_cycles_that_cannot_be() -> None:
    """Where ties rule out every contiguous plan, eager cycles of such plans are not sought."""
    fields = [{"saved_bytes": 4, "parameters": ("w",) if n in (0, 3) else ()} for n in range(4)]
    heard: list[str] = []
    plan = planner.solve(
        handmade.chain([(1, 2)] * 4, fields),
        uniform(2, 14),
        planner.Config(time_limit_s=2, workers=1, deterministic=True),
        lambda *now: heard.append(now[-1]),
    )
    assert plan.solver.contiguous_period_ns is None
    assert "assignment" in heard
    assert "kfkb" not in heard
