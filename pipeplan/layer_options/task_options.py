"""Options of all layers of a task, beside the chain that was profiled."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from pipeplan.capture.boundary_trace import call_layer
from pipeplan.capture.estimation.layer_signature import layer_signature
from pipeplan.capture.fake_tensors.fake_model import (
    ProcessorKernels,
    weightless,
    weightless_twin,
)
from pipeplan.capture.layer_costs.device_clock import device_of
from pipeplan.capture.layer_costs.layer_run import LayerRun, layer_run
from pipeplan.capture.layer_costs.micro_batches import MicroBatches
from pipeplan.capture.split import split
from pipeplan.capture.user_model.module_attributes import restored
from pipeplan.chain import Chain
from pipeplan.devices import Device
from pipeplan.errors import InputError
from pipeplan.layer_options.layer_search import LayerSearch
from pipeplan.nested import MicroBatch
from pipeplan.operators import Captured
from pipeplan.rehearsal import check_agreement, estimated, measured
from pipeplan.repeat import seed_all
from pipeplan.split_model import SplitModel
from pipeplan.task import Task, load

Progress = Callable[[str], None]
SECONDS = 120.0
"""For the search of programs, where nothing else is said."""


def add_options(
    chain: Chain,
    reference: str,
    *,
    device: Device | None = None,
    seed: int = 0,
    threads: int = 1,
    max_layers: int | None = None,
    seconds: float = SECONDS,
    progress: Progress | None = None,
) -> Chain:
    """`chain` with options of its layers: programs that keep less and take longer (V5).

    Bytes are measured as those of the layers are. Times are the layers' own and those of what runs
    again. A layer that no graph can hold has no options; the chain's facts of its device say why.

    Args:
        chain: of the task, as `pipeplan.capture.profile` or `estimate` gave it.
        reference: the task.
        device: what an estimated chain's times are for; None for a measured one.
        seed: as for the profile, like `threads` and `max_layers`.
        threads: of torch.
        max_layers: of the split.
        seconds: for the search of programs, in all.
        progress: told what happens, one line at a time.

    Raises:
        InputError: if the task is not the chain's.
    """
    say = progress or _silent
    seed_all(seed)
    if device is not None:
        with weightless():
            task = load(reference, seed)
        return _estimated(chain, task, device, max_layers, seconds, say)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        task = load(reference, seed)
        return task_options(chain, task, max_layers=max_layers, seconds=seconds, progress=say)
    finally:
        torch.set_num_threads(before)


def task_options(
    chain: Chain,
    task: Task,
    *,
    max_layers: int | None = None,
    seconds: float = SECONDS,
    progress: Progress | None = None,
) -> Chain:
    """`add_options` of a measured chain for a task without a reference; its model stays as it is.

    Raises:
        InputError: if the task is not the chain's.
    """
    say = progress or _silent
    place = device_of(task.model)
    task = place.bring(task)
    model = _split(chain, task, max_layers)

    def timed(run: LayerRun, captured: Captured) -> Captured:
        return measured(run.layer, captured)

    def check(run: LayerRun, captured: Captured) -> None:
        check_agreement(run.layer, captured)

    search = LayerSearch(chain, model, task.accumulate, timed, check, seconds, say)
    with torch.random.fork_rng(devices=place.random_devices), restored(model.layers):
        batch = MicroBatches(task).fetch(0)
        for index, run in enumerate(_runs(model, task, batch, search)):
            search.look_at(index, run)
    return search.chain()


def _estimated(
    chain: Chain,
    task: Task,
    device: Device,
    max_layers: int | None,
    seconds: float,
    say: Progress,
) -> Chain:
    with torch.random.fork_rng(devices=[]):
        twin, mode = weightless_twin(task)
        model = _split(chain, twin, max_layers)

        def timed(run: LayerRun, captured: Captured) -> Captured:
            return estimated(run.layer, captured, device)

        search = LayerSearch(
            chain, model, task.accumulate, timed, _unchecked, seconds, say, ProcessorKernels
        )
        batch = MicroBatches(task).fetch(0)
        with mode:
            fakes = batch.mapped(mode.from_tensor)
            for index, run in enumerate(_runs(model, twin, fakes, search)):
                alike, _ = layer_signature(run)
                search.look_at(index, run, (*alike, len(run.inputs), run.loss is not None))
    return search.chain()


def _silent(_: str) -> None:
    """Tells nobody."""


def _unchecked(run: LayerRun, captured: Captured) -> None:
    """Without values there are no bits to compare."""


def _split(chain: Chain, task: Task, max_layers: int | None) -> SplitModel:
    """For training; where eval mode has parameters of its own, the digest needs both modes."""
    for evaluates in (False, True):
        model = split(task, max_layers, evaluates=evaluates)
        if model.digest() == chain.task_digest:
            return model
    raise InputError(
        f"profile: options of layers: got a task with digest {model.digest()[:12]}, need"
        f" {(chain.task_digest or 'none')[:12]}, the chain's. Profile this task again."
    )


def _runs(
    model: SplitModel, task: Task, batch: MicroBatch, search: LayerSearch
) -> Iterator[LayerRun]:
    """Each layer with what the layers before it compute."""
    values = model.entry(batch.inputs)
    for index in range(len(model.layers)):
        run = layer_run(model, index, values, batch, task.loss)
        yield run
        with torch.no_grad():
            given = tuple(value.clone() for value in (*values, *run.fed))
            outputs = call_layer(run.name, run.layer, given, run.autocast)
            if not all(each.is_contiguous() for each in outputs):
                search.leave_out(index + 1, "it takes a tensor that is not contiguous")
            values = tuple(value.contiguous().clone() for value in outputs)
