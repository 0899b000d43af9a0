"""Pinned layers: how they are written, what is refused, what is explained, what is kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipeplan import planner
from pipeplan.chain import Chain
from pipeplan.cli.entry import main
from pipeplan.cluster import uniform
from pipeplan.errors import InfeasibleError, InputError
from pipeplan.plan import Plan
from pipeplan.planner.pins import resolve
from tests import handmade


def chain(count: int = 6, **fields: Any) -> Chain:
    """Layers of 2 + 2 ns that keep and send bytes."""
    return handmade.chain(
        [(2, 2)] * count, [{"saved_bytes": 2, "output_bytes": 1, **fields}] * count
    )


def homes(plan: Plan) -> list[int]:
    """GPU of each layer."""
    return [stage.gpu for stage in plan.stages for _ in range(stage.first, stage.last + 1)]


def plan(of: Chain, pins: dict[int | str, int], gpus: int = 3, **options: Any) -> Plan:
    """The planner's answer after little work, however busy the machine is."""
    given = {"time_limit_s": 5, "deterministic": True, "workers": 1, "pins": pins}
    config = planner.Config(**given | options)
    return planner.solve(of, uniform(gpus, 1000), config)


class TestWriting:
    """Indices, names, ranges."""

    def test_index_name_range(self) -> None:
        """A layer is meant by index, by name, or with others from a to b."""
        of = chain()
        name = of.layers[5].name
        cluster = uniform(3, 10)
        assert resolve({0: 2, "1..3": 0, name: 1}, of, cluster) == (
            (0, 2), (1, 0), (2, 0), (3, 0), (5, 1),
        )  # fmt: skip
        assert resolve({"4": 1}, of, cluster) == ((4, 1),)

    @pytest.mark.parametrize(
        ("pins", "said"),
        [
            ({0: 3}, "need 0..2"),
            ({6: 0}, "0..5"),
            ({"nothing": 0}, "got 'nothing'"),
            ({"3..1": 0}, "not behind"),
            ({0: 0, "0..1": 1}, "got GPUs 0 and 1 for layer 0"),
            ({-1: 0}, "0..5"),
        ],
    )
    def test_refused(self, pins: dict[int | str, int], said: str) -> None:
        """What names no layer, no GPU, or two GPUs is refused with what is there."""
        with pytest.raises(InputError, match=said):
            resolve(pins, chain(), uniform(3, 10))

    @pytest.mark.parametrize("other", [{"recompute": "auto"}, {"method": "paper-ilp"}])
    def test_not_with(self, other: dict[str, Any]) -> None:
        """Searches that know no pins refuse them."""
        with pytest.raises(InputError, match="pins"):
            plan(chain(), {0: 0}, **other)


class TestKept:
    """Every way to search."""

    @pytest.mark.parametrize("method", ["auto", "contiguous"])
    @pytest.mark.parametrize("pins", [{0: 2}, {0: 1, 5: 0}, {2: 2, 3: 2}])
    def test_equal_gpus(self, pins: dict[int | str, int], method: str) -> None:
        """Pins name GPUs although these are equal."""
        found = homes(plan(chain(), pins, method=method))
        assert all(found[int(layer)] == gpu for layer, gpu in pins.items())

    def test_first_and_last_together(self) -> None:
        """What no contiguous plan can do: both ends on one GPU, the middle on another."""
        found = plan(chain(), {0: 0, 5: 0, 2: 1}, gpus=2)
        assert [homes(found)[layer] for layer in (0, 2, 5)] == [0, 1, 0]
        assert found.period_per_microbatch == 12

    def test_long_chain(self) -> None:
        """A chain that is searched as groups keeps the pins of its layers."""
        of = chain(40)
        found = plan(of, {3: 2, 20: 0, 21: 1}, coarsen=8, time_limit_s=0.5)
        assert [homes(found)[layer] for layer in (3, 20, 21)] == [2, 0, 1]

    def test_tied_layers_follow(self) -> None:
        """A layer that shares a parameter with a pinned one sits on its GPU."""
        layers = [{"parameters": ("w",) if n in (0, 3) else ()} for n in range(4)]
        found = plan(handmade.chain([(2, 2)] * 4, layers), {0: 1}, gpus=2)
        assert homes(found)[3] == 1

    def test_sixteen_layers(self) -> None:
        """Where local search takes over from the joint model, pins hold too."""
        fields = [{"saved_bytes": 3, "output_bytes": 1}] * 16
        of = handmade.chain([(2, 3)] * 16, fields)
        config = planner.Config(
            time_limit_s=4, workers=1, pins={0: 1, 15: 1, "7..8": 0}, deterministic=True
        )
        found = planner.solve(of, uniform(2, 90), config)
        assert [homes(found)[layer] for layer in (0, 7, 8, 15)] == [1, 0, 0, 1]


class TestNoPlan:
    """Pins that leave none are explained."""

    def test_too_much_on_one_gpu(self) -> None:
        """The bytes that a GPU lacks for what is pinned to it."""
        with pytest.raises(InfeasibleError, match=r"pinned to GPU 1 .*needs .* bytes over"):
            planner.solve(
                chain(weight_bytes=10), uniform(2, 100), planner.Config(pins={"0..5": 1})
            )

    def test_tied_apart(self) -> None:
        """Two layers with one parameter on two GPUs."""
        of = handmade.chain([(2, 2)] * 2, [{"parameters": ("w",)}] * 2)
        with pytest.raises(InfeasibleError, match="layers 0 and 1 share a parameter"):
            plan(of, {0: 0, 1: 1})

    def test_contiguous(self) -> None:
        """No run of layers per GPU keeps both ends on one and the middle on another."""
        with pytest.raises(
            InfeasibleError, match="layers 0 and 5 are pinned to GPU 0, layer 3 between"
        ):
            plan(chain(), {0: 0, 3: 1, 5: 0}, method="contiguous")


class TestProofs:
    """Bounds of pinned plans are about these pins."""

    def test_resumed_without_pins(self) -> None:
        """What was proven under pins is not taken for plans without; the other way round it is."""
        of = chain()
        first = plan(of, {"0..4": 0}, gpus=2)
        assert first.period_per_microbatch == 20
        free = plan(of, {}, gpus=2, resume=first)
        assert free.period_per_microbatch < 20
        again = plan(of, {"0..4": 0}, gpus=2, resume=free)
        assert again.period_per_microbatch == 20
        assert "pinned layer" in " ".join(again.solver.notes)


def test_command_line(tmp_path: Path) -> None:
    """`--pin` takes indices, names and ranges, and the plan file says what was pinned."""
    path, out = tmp_path / "chain.json", tmp_path / "plan.json"
    path.write_text(chain().to_json())
    machines = ["--gpus", "3", "--memory", "1000", "--bandwidth", "inf"]
    args = ["plan", str(path), *machines, "--pin", "0=2, 4..5=1", "--time-limit", "2s"]
    assert main([*args, "-o", str(out)]) == 0
    assert Plan.read(str(out)).solver.pins == ((0, 2), (4, 1), (5, 1))
    with pytest.raises(SystemExit, match="2"):
        main(["plan", str(path), *machines, "--pin", "0=", "-o", str(tmp_path / "no.json")])
