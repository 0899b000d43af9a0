"""What a rank tells the others about itself before they train together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields

import torch
from torch import Tensor

from pipeplan import __version__
from pipeplan.plan import Plan
from pipeplan.repeat import fingerprint
from pipeplan.runtime.startup.handshake import Fact, Facts
from pipeplan.split_model import SplitModel
from pipeplan.task import Task

_SHOWN = 12
"""Characters of a digest that people are shown, which is what ranks compare."""
_DATA_WAY_OUT = (
    "task.data must give the same tensors for the same number on every rank, whatever the rank,"
    " the machine and the moment: seed what shuffles or draws, read the same files."
)


def compute_facts() -> dict[str, Fact]:
    """Of what computes."""
    way_out = "Install the same version for all ranks."
    return {
        "version of pipeplan": Fact(__version__, way_out),
        "version of torch": Fact(str(torch.__version__), way_out),
    }


def planned_facts(plan: Plan) -> dict[str, Fact]:
    """Of what is executed."""
    return {"plan": Fact(plan.digest()[:_SHOWN], "Give all ranks the same plan.")}


def trained(
    plan: Plan,
    split: SplitModel,
    task: Task,
    *,
    seed: int,
    data: str,
    flags: Mapping[str, object],
    witness: Mapping[str, str] | None = None,
) -> Facts:
    """All that ranks of one training must have alike.

    Args:
        plan: what is executed.
        split: the model; of weights without memory (`meta`) nothing is told.
        task: its plain settings are compared.
        seed: of what layers draw.
        data: a fingerprint of the first micro-batches; empty: of no matter.
        flags: whatever else was asked for, by name.
        witness: fingerprints of weights that are not here any more, by name.
    """
    same_code = "Start all ranks with the same task, from the same code."
    same_flags = "Give it alike to all ranks."
    alike = {
        **planned_facts(plan),
        "task": Fact(split.digest()[:_SHOWN], same_code),
        "settings of the task": Fact(_settings(task), same_code),
        "seed": Fact(str(seed), "Give all ranks the same seed."),
        **{name: Fact(str(value), same_flags) for name, value in flags.items()},
        "data of micro-batches 0 and 1": Fact(data[:_SHOWN], _DATA_WAY_OUT),
    }
    return Facts(alike, {**(witness or {}), **weights(split)})


def weights(split: SplitModel) -> dict[str, str]:
    """Fingerprints of the parameters that are here, by name in the user's model, and buffers.

    Copies of a tied parameter have its name. A buffer's may be that of its layer alone, so the
    layer's is put before it.
    """
    found: dict[str, str] = {}
    for layer, name, fqns in zip(split.layers, split.names, split.fqns, strict=True):
        named: dict[str, Tensor] = {fqns[x]: tensor for x, tensor in layer.named_parameters()}
        named |= {f"{name}: {fqns[local]}": buffer for local, buffer in layer.named_buffers()}
        for key, tensor in named.items():
            if key not in found and not tensor.is_meta:
                found[key] = fingerprint([tensor])
    return found


def _settings(task: Task) -> str:
    """Fields of `task` that are plain values; what functions do shows in data and weights.

    Callbacks are of no matter: one rank alone calls its own.
    """
    names = [each.name for each in fields(task) if each.name not in ("model", "callbacks")]
    values = {name: getattr(task, name) for name in names}
    return ", ".join(f"{name}={value}" for name, value in values.items() if not callable(value))
