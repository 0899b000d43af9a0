"""Lines of a run for people."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pipeplan.callbacks import StepMetrics
from pipeplan.launch.logs import TextLog

STEP = StepMetrics(
    step=2,
    loss=1.5,
    gradient_norm=0.25,
    learning_rates=(0.001,),
    step_ns=10**9,
    period_ns=None,
    units_per_s=8.0,
    memory_bytes=2**30,
    allocated_bytes=None,
    reserved_bytes=None,
)


@pytest.mark.parametrize(
    ("allocated", "told"), [(None, "resident 1.00 GiB"), (3 * 2**30, "GPU memory 3.00 GiB")]
)
def test_a_step_tells_the_memory_that_it_computes_in(
    allocated: int | None, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The GPU's where there is one: the host's says little there."""
    TextLog(4, "sample").step(replace(STEP, allocated_bytes=allocated))
    assert capsys.readouterr().err == (
        f"step 2/4  loss 1.5000  norm 0.25  lr 0.001  period -  8.0 samples/s  {told}\n"
    )
