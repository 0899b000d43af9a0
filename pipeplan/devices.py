"""Figures of devices, from which times are estimated where nothing can be measured. Data only.

A few public figures are built in; a file in the same form adds devices or replaces them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from pipeplan.document import Count, Document, Positive, Record
from pipeplan.errors import InputError

FloatType = Literal["float64", "float32", "float16", "bfloat16"]
Share = Annotated[float, Field(gt=0, le=1)]


class Device(Record):
    """What the roofline of docs/explanation/capture.md needs to know of one device."""

    name: Annotated[str, Field(min_length=1)]
    flops_per_s: dict[FloatType, Positive]
    """Peak of matrix products per type; a type that is missing runs at float32's peak."""
    bandwidth_bytes_per_s: Positive
    """Peak of its memory."""
    launch_ns: Count
    """What every operation costs, however small."""
    compute_share: Share = 0.6
    """Part of the compute peak that large matrix products reach."""
    bandwidth_share: Share = 0.8
    """Part of the memory's peak that large operations reach."""
    source: str = ""
    """Where the figures come from, for people."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if "float32" not in self.flops_per_s:
            given = ", ".join(self.flops_per_s) or "nothing"
            raise ValueError(
                f"flops_per_s: got {given}, need float32 too: types that are missing run at it"
            )
        return self

    def peak_flops(self, dtype: str) -> int:
        """Peak for a type as torch names it, such as `torch.bfloat16` or `bfloat16`."""
        name = dtype.removeprefix("torch.")
        found = {str(known): value for known, value in self.flops_per_s.items()}
        return found.get(name, found["float32"])


class DeviceTable(Document):
    """A file of devices."""

    format: Literal["pipeplan-devices/1"] = "pipeplan-devices/1"
    devices: Annotated[tuple[Device, ...], Field(min_length=1)]

    @model_validator(mode="after")
    def _check(self) -> Self:
        names = [device.name for device in self.devices]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ValueError(f"devices: got the name {twice!r} twice, need distinct names")
        return self


def _gpu(name: str, source: str, bandwidth: int, **tera: float) -> Device:
    return Device(
        name=name,
        flops_per_s={_TYPES[short]: round(value * 10**12) for short, value in tera.items()},
        bandwidth_bytes_per_s=bandwidth * 10**9,
        launch_ns=4000,
        source=source,
    )


_TYPES: dict[str, FloatType] = {
    "f64": "float64",
    "f32": "float32",
    "f16": "float16",
    "bf16": "bfloat16",
}

BUILT_IN: tuple[Device, ...] = (
    _gpu("v100", "NVIDIA V100 SXM2 data sheet", 900, f64=7.8, f32=15.7, f16=125),
    _gpu("a100", "NVIDIA A100 SXM 80GB data sheet", 2039, f64=9.7, f32=19.5, f16=312, bf16=312),
    _gpu("h100", "NVIDIA H100 SXM data sheet", 3350, f64=34, f32=67, f16=989, bf16=989),
    _gpu("h200", "NVIDIA H200 SXM data sheet", 4800, f64=34, f32=67, f16=989, bf16=989),
    Device(
        name="cpu",
        flops_per_s={"float64": 40 * 10**9, "float32": 80 * 10**9},
        bandwidth_bytes_per_s=12 * 10**9,
        launch_ns=3000,
        source="one core of a server processor: 2 FMA units of 256 bits at 2.5 GHz",
    ),
)
"""Peaks without sparsity; float32 without TF32, which torch leaves off."""


def find_device(name: str, own: Sequence[Device] = ()) -> Device:
    """The device `name`, of `own` before the built-in ones.

    Raises:
        InputError: if there is none of that name.
    """
    known = {device.name: device for device in (*BUILT_IN, *own)}
    if name not in known:
        raise InputError(
            f"device: got {name!r}, need one of {', '.join(known)}."
            " Give its figures with --device-table FILE."
        )
    return known[name]
