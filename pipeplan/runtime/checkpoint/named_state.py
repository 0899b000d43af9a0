"""Checkpoints keyed by parameter name, so that any plan of the same task can go on from them.

Keys: `model.NAME` (newest weights and buffers), `previous.NAME` (2bw: the version before),
`master.NAME` (of the newest weights, in 32 bits), `optimizer.NAME.FIELD`, `group.NAME.FIELD` (what
steps of an optimizer have written into the group of a parameter). Their files: `storage`; what
becomes of nested fields there: `nesting`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.optim import Optimizer

from pipeplan.errors import InputError
from pipeplan.nested import mapped
from pipeplan.runtime.build import Worker
from pipeplan.runtime.checkpoint import completeness, nesting
from pipeplan.runtime.checkpoint.storage import CheckpointReader, read_meta
from pipeplan.runtime.parameters.weights import Weights
from pipeplan.runtime.stages.stage import StageRunner
from pipeplan.whole_file import replacing


def state_of(stages: Iterable[StageRunner]) -> dict[str, Any]:
    """What a rank with these `stages` adds to a checkpoint; not copied.

    Call it with an empty pipeline.

    Raises:
        InputError: if an optimizer has a field without a name that keys can have.
    """
    state: dict[str, Any] = {}
    for stage in stages:
        state |= _weights(stage) | _optimizer(stage)
    return state


def load(path: Path, step: int, worker: Worker) -> None:
    """Put the checkpoint at `path`, made after `step` steps, into `worker`, bit for bit.

    Raises:
        InputError: if it lacks something the stages need, or cannot be read.
    """
    reading = CheckpointReader(path)
    if worker.scaler:
        meta = read_meta(path)
        _restore_scaler(worker, step, meta.scales, meta.good_steps, str(path))
    for stage in worker.stages.values():
        if step:
            completeness.check_optimizer(
                stage,
                reading.metadata.state_dict_metadata,
                _stored_kinds(reading),
                str(path),
                skips=worker.scaler is not None,
            )
        _load_stage(reading, step, stage)


def put(
    worker: Worker,
    step: int,
    state: Mapping[str, Any],
    scales: Sequence[float],
    good_steps: int,
) -> None:
    """Put a state in memory, keyed as in a checkpoint, into `worker`, bit for bit.

    Raises:
        InputError: if it lacks something the stages need.
    """
    known = {
        key: completeness.kind_of(value)
        for key, value in state.items()
        if isinstance(value, Tensor)
    }
    for stage in worker.stages.values():
        completeness.check_weights(stage, _weights(stage), known, "state_dict")
        if step:
            completeness.check_optimizer(
                stage, state, known, "state_dict", skips=worker.scaler is not None
            )
    _restore_scaler(worker, step, scales, good_steps, "state_dict")
    for stage in worker.stages.values():
        wanted = _begin(stage, step)
        with torch.no_grad():
            for key, tensor in wanted.items():
                tensor.copy_(state[key])
        for unit in stage.units:
            unit.take_newest()
            kept = {
                key: nesting.copied(state[key])
                for key in _optimizer_keys(state.keys(), stage, unit)
            }
            _restore_optimizer(stage, unit, kept)


def _restore_scaler(
    worker: Worker, step: int, scales: Sequence[float], good_steps: int, where: str
) -> None:
    if worker.scaler:
        if not scales:
            raise InputError(f"{where}: has no loss scale: its task had no loss_scale")
        worker.scaler.restore(step, scales, good_steps)


def _begin(stage: StageRunner, step: int) -> dict[str, Tensor]:
    """The weights of `stage`, to be filled in place."""
    for unit in stage.units:
        unit.restore(step)
    return _weights(stage)


def _load_stage(reading: CheckpointReader, step: int, stage: StageRunner) -> None:
    """Stage by stage: two of them may hold copies of one parameter under one name."""
    state: dict[str, Any] = _begin(stage, step)
    completeness.check_weights(stage, state, _stored_kinds(reading), str(reading.path))
    for unit in stage.units:
        keys = _optimizer_keys(reading.metadata.state_dict_metadata, stage, unit)
        optimizer = {key: reading.blank(key) for key in keys}
        state |= optimizer
        reading.fill(state)
        unit.take_newest()
        kept = nesting.nested({key: state[key] for key in keys}, str(reading.path))
        _restore_optimizer(stage, unit, kept)


def _stored_kinds(reading: CheckpointReader) -> dict[str, completeness.Kind]:
    """Those of the tensors in a checkpoint, by key."""
    return {
        key: (tuple(stored.size), stored.properties.dtype)
        for key, stored in reading.metadata.state_dict_metadata.items()
        if isinstance(stored, TensorStorageMetadata)
    }


def export_weights(
    path: Path, target: Path, names: Mapping[str, str], rest: Mapping[str, Any]
) -> None:
    """Write the newest weights of the checkpoint at `path` as a plain `state_dict` file.

    The model need not fit into memory: its tensors lie in files beside `target` meanwhile.

    Args:
        path: a complete checkpoint.
        target: replaced in one step, if it exists.
        names: key of the user's `model.state_dict()` -> name in the checkpoint; tied weights have
            several keys for one name.
        rest: further entries, written as they are.
    """
    reading = CheckpointReader(path)
    with (
        TemporaryDirectory(prefix=".model-", dir=target.parent) as scratch,
        replacing(target) as partial,
    ):
        loaded: dict[str, Tensor] = {}
        for number, name in enumerate(dict.fromkeys(names.values())):
            key = f"model.{name}"
            loaded[key] = _in_file(Path(scratch, str(number)), reading.blank(key))
            reading.fill({key: loaded[key]})
        state = {key: loaded[f"model.{name}"] for key, name in names.items()} | dict(rest)
        torch.save(state, partial)


def _in_file(file: Path, like: Tensor) -> Tensor:
    """A tensor of the shape of `like` whose bytes are those of a new file."""
    if not like.numel():
        return like
    flat = torch.from_file(str(file), shared=True, size=like.numel(), dtype=like.dtype)
    return flat.view(like.shape)


def _weights(stage: StageRunner) -> dict[str, Tensor]:
    older = {
        f"previous.{stage.names[parameter]}": value
        for unit in stage.units
        for parameter, value in zip(unit.parameters, unit.previous(), strict=False)
    }
    masters = {
        f"{completeness.MASTER}{stage.names[parameter]}": master.detach()
        for unit in stage.units
        for parameter, master in unit.masters().items()
    }
    return {f"model.{name}": value for name, value in stage.state().items()} | older | masters


def _optimizer(stage: StageRunner) -> dict[str, Any]:
    own = {
        f"optimizer.{stage.names[unit.weight_of(parameter)]}.{_named(field)}": value
        for unit in stage.units
        for parameter, optimizer in unit.optimizers.parameters()
        for field, value in optimizer.state.get(parameter, {}).items()
    }
    of_groups = {
        f"group.{stage.names[unit.weight_of(parameter)]}.{_named(field)}": value
        for unit in stage.units
        for parameter, fields in unit.optimizers.entries()
        for field, value in fields.items()
    }
    return own | of_groups


def _named(field: object) -> str:
    """The name of a field, which ends a key.

    Raises:
        InputError: if it could not be told from the rest of the key.
    """
    if not isinstance(field, str) or "." in field or "/" in field:
        raise InputError(
            f"checkpoint: an optimizer keeps {field!r} of a parameter, need fields with names that"
            " have neither dots nor slashes: a state is keyed by parameter and field. Let the"
            " optimizer call it otherwise."
        )
    return field


def _optimizer_keys(known: Iterable[str], stage: StageRunner, unit: Weights) -> list[str]:
    names = [stage.names[parameter] for parameter in unit.parameters]
    wanted = {f"{kind}.{name}" for kind in completeness.OF_OPTIMIZERS for name in names}
    return [key for key in known if key.rpartition(".")[0] in wanted]


def _restore_optimizer(stage: StageRunner, unit: Weights, state: Mapping[str, Any]) -> None:
    on_device = {p for optimizer in unit.optimizers.each for p in _steps_on_device(optimizer)}
    of_groups: dict[nn.Parameter, dict[str, Any]] = {}
    for parameter, optimizer in unit.optimizers.parameters():
        name, moves = stage.names[unit.weight_of(parameter)], parameter in on_device
        of_groups[parameter] = _fields(f"group.{name}", parameter, state, moves=moves)
        if fields := _fields(f"optimizer.{name}", parameter, state, moves=moves):
            optimizer.state[parameter] = fields
    unit.optimizers.put_entries(of_groups)


def _fields(
    prefix: str, parameter: nn.Parameter, state: Mapping[str, Any], *, moves: bool
) -> dict[str, Any]:
    """What `state` has behind `prefix`, by the last part of its name."""
    return {
        key.rpartition(".")[2]: _beside(parameter, key, value, moves=moves)
        for key, value in state.items()
        if key.rpartition(".")[0] == prefix
    }


def _steps_on_device(optimizer: Optimizer) -> set[Tensor]:
    """Parameters whose number of steps their kernel reads on their device."""
    return {
        parameter
        for group in optimizer.param_groups
        if group.get("fused") or group.get("capturable")
        for parameter in group["params"]
    }


def _beside(parameter: Tensor, key: str, value: Any, *, moves: bool) -> Any:
    """Optimizer state lies with its parameter; of steps the number only if it `moves`."""
    if key.endswith(".step") and not moves:
        return value
    return mapped(lambda tensor: tensor.to(parameter.device), value)
