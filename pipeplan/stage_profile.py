"""What the fused stages of a plan really take, and a chain corrected by it.

A chain's times are measured layer by layer. A stage runs its layers back to back, which may be
faster or slower than their sum (caches, launches that overlap). `profile --stages` measures the
stages of a plan; `refine` puts what it found into the chain, for the next plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from pipeplan.chain import Chain, Layer
from pipeplan.document import Count, Document, Record
from pipeplan.errors import InputError


class StageMeasure(Record):
    """One stage alone on its device, for one micro-batch; `layers` is [first, last], 0-based."""

    layers: tuple[Count, Count]
    forward_ns: Count
    backward_ns: Count
    optimizer_ns: Count
    kept_bytes: Count
    """Between forward and backward."""
    forward_peak_bytes: Count
    """Beyond the states, while the forward runs."""
    backward_peak_bytes: Count
    predicted_forward_peak_bytes: Count
    """What the chain says of the same, (M3) of docs/reference/model.md."""
    predicted_backward_peak_bytes: Count

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.layers[0] > self.layers[1]:
            raise ValueError(f"layers: got {list(self.layers)}, need first <= last")
        return self


class StageProfile(Document):
    """The stages of a plan, measured: a file."""

    format: Literal["pipeplan-stages/1"] = "pipeplan-stages/1"
    source: str = ""
    """Where the numbers come from, for people."""
    task: str | None = None
    task_digest: str | None = None
    device: dict[str, str | int | float | bool | None] = Field(default_factory=dict)
    stages: Annotated[tuple[StageMeasure, ...], Field(min_length=1)]

    @model_validator(mode="after")
    def _check(self) -> Self:
        """Stages must not overlap: a layer has one correction."""
        end = -1
        for index, stage in enumerate(self.stages):
            if stage.layers[0] <= end:
                raise ValueError(
                    f"stages[{index}].layers: got {list(stage.layers)}, need a first layer after"
                    f" {end}, the last one of the stage before it"
                )
            end = stage.layers[1]
        return self


def refine(chain: Chain, profile: StageProfile) -> Chain:
    """`chain` with its layers' times scaled such that each stage takes what was measured.

    Within a stage, layers keep their shares: layer l of a stage with measured time T gets
    T * t_l / sum(t), rounded such that the sum is exactly T. Where a stage was seen to hold more
    than predicted, the difference is added to the workspaces of its layers; where it held less,
    nothing is taken away, since another stage may need it. Refining again with the same profile
    changes nothing. Source: ours.

    Args:
        chain: the one that was planned with, or one of the same layers.
        profile: what `profile --stages` measured of a plan for it.

    Raises:
        InputError: if the stages are of another task, or beyond the chain.
    """
    _check_fits(chain, profile)
    digest = profile.digest()
    if chain.device.get("refined_by") == digest:
        return chain
    layers = list(chain.layers)
    for stage in profile.stages:
        first, end = stage.layers[0], stage.layers[1] + 1
        layers[first:end] = _refined(layers[first:end], stage)
    return chain.model_copy(
        update={
            "layers": tuple(layers),
            "source": f"{chain.source}; as {len(profile.stages)} stages {profile.source}",
            "device": {**chain.device, "refined_by": digest},
        }
    )


def _check_fits(chain: Chain, profile: StageProfile) -> None:
    last = profile.stages[-1].layers[1]
    if last >= len(chain.layers):
        raise InputError(
            f"refine: got a stage up to layer {last}, need one of the chain's {len(chain.layers)}"
            " layers (0-based). Measure the stages of a plan for this chain."
        )
    pair = chain.task_digest, profile.task_digest
    if None not in pair and pair[0] != pair[1]:
        raise InputError(
            f"refine: the stages were measured of another task: got digest {pair[1]}, need"
            f" {pair[0]}. Run pipeplan profile --stages on a plan for this chain."
        )


def _refined(layers: Sequence[Layer], stage: StageMeasure) -> list[Layer]:
    times = {
        name: proportional_shares([getattr(layer, name) for layer in layers], getattr(stage, name))
        for name in ("forward_ns", "backward_ns", "optimizer_ns")
    }
    forward = max(0, stage.forward_peak_bytes - stage.predicted_forward_peak_bytes)
    backward = max(0, stage.backward_peak_bytes - stage.predicted_backward_peak_bytes)
    return [
        layer.model_copy(
            update={
                **{name: values[index] for name, values in times.items()},
                "forward_workspace_bytes": layer.forward_workspace_bytes + forward,
                "backward_workspace_bytes": layer.backward_workspace_bytes + backward,
                "forward_light_workspace_bytes": (
                    None
                    if layer.forward_light_workspace_bytes is None
                    else layer.forward_light_workspace_bytes + forward
                ),
                **_parts(layer, times["forward_ns"][index], times["backward_ns"][index]),
            }
        )
        for index, layer in enumerate(layers)
    ]


def _parts(layer: Layer, forward: int, backward: int) -> dict[str, int | None]:
    """Other times of `layer`, which go with what its forward and its backward take now."""
    weight = _like(layer.backward_weight_ns, layer.backward_ns, backward)
    split = _like(layer.forward_split_ns, layer.forward_ns, forward)
    inputs = _like(layer.backward_input_ns, layer.backward_ns, backward)
    return {
        "forward_light_ns": _like(layer.forward_light_ns, layer.forward_ns, forward),
        "forward_split_ns": None if split is None else max(split, forward),
        "backward_weight_ns": weight,
        "backward_input_ns": None if inputs is None else max(inputs, backward - (weight or 0)),
    }


def _like(time: int | None, was: int, now: int) -> int | None:
    """`time`, which goes with another one that `was` and `now` is."""
    return time if time is None or was == 0 else time * now // was


def proportional_shares(parts: Sequence[int], total: int) -> list[int]:
    """`total` divided in proportion to `parts` (evenly if all are zero), in integers.

    Cut at the rounded running sums, so that every part is within one of its exact share.
    """
    weights = parts if any(parts) else [1] * len(parts)
    whole = sum(weights)
    ends, running = [0], 0
    for weight in weights:
        running += weight
        ends.append(total * running // whole)
    return [after - before for before, after in pairwise(ends)]
