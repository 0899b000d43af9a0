"""Estimated times: launches, bytes moved, floating-point operations; figures of devices."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from pipeplan.capture.layer_costs import roofline
from pipeplan.capture.layer_costs.layer_run import LayerRun
from pipeplan.capture.layer_costs.layer_timer import gradient_buffers
from pipeplan.capture.layer_costs.roofline import Roofline
from pipeplan.devices import BUILT_IN, Device, DeviceTable, find_device
from pipeplan.errors import InputError

ROOT = Path(__file__).parents[3]
SLOW = Device(
    name="slow",
    flops_per_s={"float32": 10**9, "float16": 2 * 10**9},
    bandwidth_bytes_per_s=10**9,
    launch_ns=100,
    compute_share=0.5,
    bandwidth_share=0.5,
)


def cost(work: object) -> tuple[int, int]:
    """(nanoseconds, flops) that SLOW would take for a function."""
    mode = Roofline(SLOW)
    with mode:
        work()  # type: ignore[operator]
    return round(mode.ns), mode.flops


def test_a_product_is_bound_by_compute() -> None:
    """2 m n k operations at half of 1 GFLOP/s, beside one launch."""
    left, right = torch.ones(64, 128), torch.ones(128, 32)
    assert cost(lambda: left @ right) == (100 + 2 * 64 * 128 * 32 * 2, 2 * 64 * 128 * 32)


def test_a_sum_is_bound_by_memory() -> None:
    """Two inputs and one output at half of 1 GB/s; in place, the input is written again."""
    one, two = torch.ones(1000), torch.ones(1000)
    assert cost(lambda: one + two) == (100 + 3 * 4000 * 2, 0)
    assert cost(lambda: one.add_(two)) == (100 + 3 * 4000 * 2, 0)


def test_expanded_tensors_are_read_as_stored() -> None:
    """A row that is added to all rows is read once."""
    rows, row = torch.ones(100, 10), torch.ones(1, 10).expand(100, 10)
    assert cost(lambda: rows + row) == (100 + (4000 + 40 + 4000) * 2, 0)


def test_views_cost_nothing() -> None:
    """Another shape of the same memory, and memory left open, take no time."""
    value = torch.ones(8, 8)
    assert cost(lambda: (value.t(), value.view(64), value[1:], torch.empty(100))) == (0, 0)


def test_lookups_read_what_they_write() -> None:
    """Ten rows of a large table cost ten rows, not the table."""
    table, rows = torch.ones(10**6, 4), torch.arange(10)
    ns, _ = cost(lambda: functional.embedding(rows, table))
    assert ns == 100 + (160 + 80 + 160) * 2


def test_types_have_their_own_peak() -> None:
    """Half precision runs at its peak where the device has one, else at float32's."""
    half = torch.ones(64, 64, dtype=torch.float16)
    brain = half.bfloat16()
    operations = 2 * 64**3
    assert cost(lambda: half @ half)[0] == 100 + operations
    assert cost(lambda: brain @ brain)[0] == 100 + 2 * operations


class Attention(nn.Module):
    """Projections around torch's attention."""

    def __init__(self) -> None:
        super().__init__()
        self.all = nn.Linear(32, 96)
        self.out = nn.Linear(32, 32)

    def forward(self, value: Tensor) -> Tensor:
        """Causal attention of four heads."""
        parts = (x.unflatten(-1, (4, 8)).transpose(1, 2) for x in self.all(value).chunk(3, -1))
        mixed = functional.scaled_dot_product_attention(*parts, is_causal=True)
        result: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return result


@pytest.mark.parametrize(
    ("layer", "shape"),
    [(Attention(), (2, 16, 32)), (nn.Conv2d(3, 8, 3), (2, 3, 16, 16)), (nn.Linear(8, 4), (5, 8))],
)
def test_operations_are_those_of_torchs_counter(layer: nn.Module, shape: tuple[int, ...]) -> None:
    """Forward and backward together: exactly FlopCounterMode's count, attention included."""
    ours = Roofline(SLOW)
    with ours:
        layer(torch.ones(shape, requires_grad=True)).sum().backward()
    theirs = FlopCounterMode(display=False)
    with theirs:
        layer(torch.ones(shape, requires_grad=True)).sum().backward()
    attention = 0
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    if isinstance(layer, Attention) and kernel not in flop_registry:
        # torch before 2.15 does not count the processor's kernel: forward 2 products, backward 5.
        attention = 7 * 2 * 2 * 4 * 16 * 16 * 8
    assert ours.flops == theirs.get_total_flops() + attention > 0


def test_estimate_of_a_layer_adds_forward_and_backward() -> None:
    """A linear layer's backward has two products and the sums into its gradients."""
    layer = nn.Linear(64, 64, bias=False)
    run = LayerRun(name="x", layer=layer, inputs=(torch.ones(64, 64),), differentiable=(True,))
    with gradient_buffers([layer]):
        forward, backward, light = roofline.estimate_times(run, SLOW)
    product = 100 + 2 * 64**3 * 2
    assert forward == light == product
    assert backward == 2 * product + (100 + 3 * 64 * 64 * 4 * 2)


def test_built_in_devices_are_ordered_as_their_data_sheets() -> None:
    """Each generation is faster; the names are those of the help."""
    names = [device.name for device in BUILT_IN]
    assert names == ["v100", "a100", "h100", "h200", "cpu"]
    peaks = [find_device(name).peak_flops("torch.float16") for name in names[:4]]
    assert peaks == sorted(peaks)
    assert find_device("v100").peak_flops("torch.bfloat16") == find_device("v100").peak_flops(
        "float32"
    )


def test_unknown_devices_are_named_with_the_known_ones() -> None:
    """A device that is in no table is refused, with what to do."""
    with pytest.raises(InputError, match=r"got 'b9', need one of v100.*cpu, slow.*--device-table"):
        find_device("b9", [SLOW])


def test_a_table_adds_and_replaces_devices(tmp_path: Path) -> None:
    """A file's device wins over a built-in one of the same name."""
    file = tmp_path / "devices.json"
    table = DeviceTable(devices=(SLOW, SLOW.model_copy(update={"name": "a100"})))
    file.write_text(table.to_json())
    own = DeviceTable.read(file).devices
    assert find_device("slow", own) == SLOW
    assert find_device("a100", own).launch_ns == 100
    assert find_device("h100", own) == find_device("h100")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"flops_per_s": {"float16": 1}}, r"devices\[0\]\.flops_per_s: got float16, need float32"),
        ({"flops_per_s": {"float32": 0}}, "need at least 1"),
        ({"flops_per_s": {"int8": 5}}, "int8"),
        ({"bandwidth_share": 1.5}, "bandwidth_share: got 1.5, need at most 1"),
        ({"bandwidth_bytes_per_s": None}, "bandwidth_bytes_per_s: got null, need an integer"),
    ],
)
def test_wrong_tables_are_refused(change: dict[str, object], message: str) -> None:
    """A table's faults are named with their place."""
    data = json.loads(DeviceTable(devices=(SLOW,)).to_json())
    data["devices"][0] |= change
    with pytest.raises(InputError, match=message):
        DeviceTable.from_data(data)


def test_two_devices_of_one_name_are_refused() -> None:
    """A name means one device."""
    data = json.loads(DeviceTable(devices=(SLOW,)).to_json())
    data["devices"] *= 2
    with pytest.raises(InputError, match="got the name 'slow' twice"):
        DeviceTable.from_data(data)


def test_documented_table_and_figures_are_true() -> None:
    """The example of docs/explanation/capture.md has the figures that are built in."""
    text = (ROOT / "docs" / "explanation" / "capture.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"^```json\n(.*?)^```", text, re.M | re.S)
    assert (
        find_device("mine", DeviceTable.from_json(example).devices).peak_flops("bfloat16")
        == 16 * 10**13
    )
    rows = re.findall(r"^\| `(\w+)` .*?\| ([\d.]+) \|.*?\| (\d+) \| (\d+) us \|$", text, re.M)
    assert [row[0] for row in rows] == [device.name for device in BUILT_IN]
    for name, tera, giga, launch in rows:
        device = find_device(name)
        assert device.peak_flops("float32") == round(float(tera) * 10**12)
        assert device.bandwidth_bytes_per_s == int(giga) * 10**9
        assert device.launch_ns == int(launch) * 1000
