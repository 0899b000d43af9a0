"""Several micro-batch sizes of one model: the plan with the most samples per second."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pipeplan.chain import Chain, Layer
from pipeplan.cli import main
from pipeplan.cluster import uniform
from pipeplan.errors import InfeasibleError, InputError
from pipeplan.microbatch_sizes import plan_sizes
from pipeplan.planner import Config

CONFIG = Config(time_limit_s=0.3, workers=1, deterministic=True)
CLUSTER = uniform(2, 100, bandwidth_bytes_per_s=10**9)


def chain(size: int, fixed_ns: int = 10, layers: int = 4) -> Chain:
    """Layers that take `fixed_ns` and a ns per sample, and save 5 bytes per sample."""
    layer: dict[str, Any] = {
        "forward_ns": fixed_ns + size,
        "backward_ns": 2 * (fixed_ns + size),
        "saved_bytes": 5 * size,
        "output_bytes": size,
        "weight_bytes": 4,
    }
    made = tuple(Layer(name=f"layer {number}", **layer) for number in range(layers))
    return Chain(name=f"of {size}", layers=made, microbatch_size=size, input_bytes=size)


@pytest.mark.parametrize("semantics", ["2bw", "flush"])
def test_the_most_samples_per_second_come_first(semantics: Any) -> None:
    """A larger micro-batch pays fixed times less often; one that does not fit comes last."""
    config = Config(semantics=semantics, time_limit_s=0.3, workers=1, deterministic=True)
    found = plan_sizes([chain(1), chain(8), chain(2)], CLUSTER, config)
    assert [each.chain.microbatch_size for each in found] == [2, 1, 8]
    two, one, eight = found
    assert two.samples_per_ns > one.samples_per_ns > 0
    assert (eight.plan, eight.samples_per_ns) == (None, 0)
    assert isinstance(eight.error, InfeasibleError)


def test_a_batch_gives_each_size_its_microbatches() -> None:
    """All steps have the samples asked for; a size that does not divide them has no plan."""
    config = Config(semantics="flush", time_limit_s=0.3, workers=1, deterministic=True)
    found = plan_sizes([chain(1), chain(2), chain(3)], CLUSTER, config, batch=8)
    counts = {each.chain.microbatch_size: each.plan and each.plan.microbatches for each in found}
    assert counts == {1: 8, 2: 4, 3: None}
    assert "need a multiple of 3" in str(found[-1].error)


def test_sizes_that_cannot_be_compared_are_refused() -> None:
    """Other layers, one size twice, a batch beside micro-batches or of no size."""
    with pytest.raises(InputError, match="got other layers than chain 0"):
        plan_sizes([chain(1), chain(2, layers=3)], CLUSTER, CONFIG)
    with pytest.raises(InputError, match="got micro-batches of 2, as"):
        plan_sizes([chain(2), chain(2)], CLUSTER, CONFIG)
    with pytest.raises(InputError, match="need one of the two"):
        plan_sizes([chain(2)], CLUSTER, Config(microbatches=4), batch=8)
    with pytest.raises(
        InputError, match=r"need a multiple of a micro-batch size \(2, 4\), such as 8 or 10"
    ):
        plan_sizes([chain(4), chain(2)], CLUSTER, CONFIG, batch=9)


def test_an_interrupt_keeps_the_sizes_that_have_a_plan() -> None:
    """Ctrl-C while the second size is planned gives the first."""

    def interrupt(*row: Any) -> None:
        if row[4].startswith("micro-batches of 2"):
            raise KeyboardInterrupt

    found = plan_sizes([chain(2), chain(1)], CLUSTER, CONFIG, progress=interrupt)
    assert found[0].chain.microbatch_size == 1
    assert found[0].plan is not None


def test_plan_writes_the_best_and_shows_all(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The verb takes several chains; what it cannot compare is a usage error."""
    files = []
    for size in (1, 2, 8):
        files.append(str(tmp_path / f"{size}.json"))
        Path(files[-1]).write_text(chain(size).to_json(), encoding="utf-8")
    out = str(tmp_path / "plan.json")
    machine = ["--gpus", "2", "--memory", "100", "--bandwidth", "1GB/s", "--time-limit", "0.3s"]
    asked = ["plan", *files, *machine, "--deterministic", "-o", out]
    assert main([*asked, "--batch", "8", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [row["microbatch_size"] for row in told["sizes"]] == [2, 1, 8]
    assert told["samples_per_second"] == told["sizes"][0]["samples_per_second"]
    assert "no plan exists" in told["sizes"][2]["reason"]
    assert main([*asked, "--force"]) == 0
    assert "micro-batch sizes" in capsys.readouterr().out
    for more in (["--gpus", "2,3"], ["--resume", out]):
        assert main([*asked, *more, "--force"]) == 2
        assert "need one" in capsys.readouterr().err
