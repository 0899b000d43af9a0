"""Measures a task: the chain with the time and the bytes of every layer."""

from __future__ import annotations

import contextlib
import os
import platform
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from pipeplan.capture import layer_bytes, optimizer_cost
from pipeplan.capture.companions import companions as running_companions
from pipeplan.capture.layer_bytes import LayerBytes
from pipeplan.capture.layer_run import LayerRun
from pipeplan.capture.optimizer_cost import OptimizerCost
from pipeplan.capture.split import split
from pipeplan.capture.sweep import gradient_buffers, sweep
from pipeplan.capture.trace import call, unchanged_buffers
from pipeplan.chain import Chain, Layer
from pipeplan.errors import InputError
from pipeplan.livebytes import storage_bytes
from pipeplan.task import SplitModel, Task, load

Progress = Callable[[str], None]

ROUND = 5
"""Consecutive micro-batches whose medians are taken together."""
NOISY = 0.25
"""Share by which rounds may usually be slower than the quietest before it is said."""


def profile(
    reference: str,
    *,
    seed: int = 0,
    repeats: int = 20,
    warmup: int = 3,
    threads: int = 1,
    companions: int = 0,
    progress: Progress | None = None,
) -> Chain:
    """The measured chain of the task that `reference` names.

    Args:
        reference: `package.module:function` or `path/to/file.py:function`.
        seed: of torch, set before the task is made, as `launch` does.
        repeats: micro-batches timed; each time is the median of the quietest five in a row.
        warmup: micro-batches run before.
        threads: of torch, as many as a rank will have.
        companions: processes that run the same layers meanwhile, one for each other rank that
            will share the machine.
        progress: told what happens, one line at a time.

    Raises:
        InputError: if the task cannot be loaded, split or run, or an argument is out of range.
    """
    _check(
        repeats=(repeats, 1), warmup=(warmup, 0), threads=(threads, 1), companions=(companions, 0)
    )
    with _threads(threads), contextlib.ExitStack() as stack:
        torch.manual_seed(seed)
        task = load(reference, seed)
        say = progress or _silent
        if companions:
            say(f"starting {companions} companion process{'es' if companions > 1 else ''}")
            stack.enter_context(running_companions(companions, reference, seed, threads))
        chain = profile_task(task, repeats=repeats, warmup=warmup, progress=say)
    place, _, function = reference.rpartition(":")
    return chain.model_copy(
        update={
            "name": f"{Path(place).stem if place.endswith('.py') else place}:{function}",
            "task": reference,
            "device": {**chain.device, "companions": companions, "seed": seed},
        }
    )


def profile_task(
    task: Task, *, repeats: int = 20, warmup: int = 3, progress: Progress | None = None
) -> Chain:
    """The measured chain of `task`, without a reference to find it again.

    The model is left as it was: values, buffers, random state; gradients are removed.

    Raises:
        InputError: if the task cannot be split or run.
    """
    say = progress or _silent
    model = split(task)
    _check_device(model)
    say(f"split into {len(model.layers)} layers")
    with (
        torch.random.fork_rng(devices=[]),
        unchanged_buffers(model.layers),
        gradient_buffers(model.layers),
    ):
        forward_ns, backward_ns, noise = _times(model, task, repeats, warmup, say)
        owned = _owned(model)
        if noise > NOISY:
            say(f"the machine is busy: times are usually {noise:.0%} above the quietest round's")
        say("measuring optimizer steps")
        steps = [
            optimizer_cost.measure(task.optimizer, [p for p in mine if p.requires_grad], repeats)
            for mine in owned
        ]
        say("measuring bytes")
        sizes = _sizes(model, task)
    layers = tuple(
        _layer(model, index, (forward_ns[index], backward_ns[index]), size, owned[index], step)
        for index, (size, step) in enumerate(zip(sizes, steps, strict=True))
    )
    source, _ = task.microbatch(0)
    return Chain(
        name=type(task.model).__name__,
        source=f"measured with torch {torch.__version__}",
        task_digest=model.digest(),
        mode="measured",
        microbatch_size=model.microbatch_size,
        input_bytes=source.nbytes,
        device={
            "device": "cpu",
            "cpu": _cpu_name(),
            "cores": _cores(),
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "repeats": repeats,
            "noise": round(noise, 3),
        },
        layers=layers,
    )


def _times(
    model: SplitModel, task: Task, repeats: int, warmup: int, say: Progress
) -> tuple[list[int], list[int], float]:
    """Forward and backward nanoseconds of each layer, and how much slower it usually was.

    Whatever else the machine does only lengthens times, so they are the medians of the quietest
    round of `ROUND` consecutive micro-batches. A run is judged by its best window likewise.
    """
    sweeps = []
    for number in range(warmup + repeats):
        times = sweep(model, task, number)
        if number >= warmup:
            sweeps.append(times)
        done = number + 1 - warmup
        if done > 0 and (done % 10 == 0 or done == repeats):
            say(f"timed {done} of {repeats} micro-batches")
    starts = range(0, max(1, repeats - ROUND + 1), ROUND)
    rounds = [_medians(sweeps[start : start + ROUND]) for start in starts]
    totals = [sum(forward) + sum(backward) for forward, backward in rounds]
    forward, backward = rounds[totals.index(min(totals))]
    return forward, backward, statistics.median(totals) / max(1, min(totals)) - 1


def _medians(sweeps: Sequence[tuple[list[int], list[int]]]) -> tuple[list[int], list[int]]:
    """Layer by layer, of forward and of backward times."""
    forward, backward = (
        [round(statistics.median(row)) for row in zip(*rows, strict=True)]
        for rows in zip(*sweeps, strict=True)
    )
    return forward, backward


def _sizes(model: SplitModel, task: Task) -> list[LayerBytes]:
    """The bytes of each layer, fed with what the layers before it really compute."""
    source, target = task.microbatch(0)
    values: tuple[Tensor, ...] = (source,)
    sizes = []
    last = len(model.layers) - 1
    for index, (name, layer) in enumerate(zip(model.names, model.layers, strict=True)):
        run = LayerRun(
            name=name,
            layer=layer,
            inputs=values,
            differentiable=tuple(spec.differentiable for spec in model.boundaries[index]),
            loss=(task.loss, target) if index == last else None,
        )
        sizes.append(layer_bytes.measure(run))
        with torch.no_grad():
            outputs = call(name, layer, tuple(value.clone() for value in values))
            values = tuple(value.contiguous().clone() for value in outputs)
    return sizes


def _owned(model: SplitModel) -> list[list[nn.Parameter]]:
    """Per layer the parameters whose bytes it counts: a tied one counts in its first layer only.

    Layers that share a parameter sit on one GPU, which holds it once.
    """
    seen: set[int] = set()
    result = []
    for layer in model.layers:
        mine = [parameter for parameter in layer.parameters() if id(parameter) not in seen]
        seen.update(map(id, mine))
        result.append(mine)
    return result


def _layer(
    model: SplitModel,
    index: int,
    times: tuple[int, int],
    size: LayerBytes,
    owned: list[nn.Parameter],
    step: OptimizerCost,
) -> Layer:
    layer, fqns = model.layers[index], model.fqns[index]
    trainable = sum(p.nbytes for p in owned if p.requires_grad)
    constant = sum(p.nbytes for p in owned if not p.requires_grad) + storage_bytes(layer.buffers())
    return Layer(
        name=model.names[index],
        forward_ns=times[0],
        backward_ns=times[1],
        optimizer_ns=step.step_ns,
        weight_bytes=trainable,
        gradient_bytes=trainable,
        optimizer_bytes=step.state_bytes + constant,
        output_bytes=size.output,
        output_gradient_bytes=None
        if size.output_gradient == size.output
        else size.output_gradient,
        saved_input_bytes=size.saved_input,
        saved_bytes=size.saved,
        saved_output_bytes=size.saved_output,
        forward_workspace_bytes=size.forward_workspace,
        backward_workspace_bytes=size.backward_workspace,
        optimizer_workspace_bytes=step.workspace_bytes,
        parameters=tuple(dict.fromkeys(fqns[local] for local, _ in layer.named_parameters())),
    )


def _check(**arguments: tuple[int, int]) -> None:
    for name, (value, least) in arguments.items():
        if value < least:
            raise InputError(f"profile: {name}: got {value}, need at least {least}")


def _check_device(model: SplitModel) -> None:
    for name, layer in zip(model.names, model.layers, strict=True):
        for tensor in [*layer.parameters(), *layer.buffers()]:
            if tensor.device.type != "cpu":
                raise InputError(
                    f"profile: layer {name!r}: got a tensor on {tensor.device}, need cpu."
                    " Measuring on other devices is not supported."
                )


def _cores() -> int:
    """Cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _cpu_name() -> str:
    """The processor as Linux names it; elsewhere what Python knows."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


@contextlib.contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _silent(_: str) -> None:
    pass
