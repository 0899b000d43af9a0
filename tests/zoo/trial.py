"""One architecture from profile to trained weights, and beside it a plain loop of one process."""

from __future__ import annotations

import contextlib
import logging
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from pipeplan import Pipeline, cluster, planner
from pipeplan.capture import profile_task, split
from pipeplan.capture.tensor_distance import densified
from pipeplan.chain import Chain
from pipeplan.errors import PipeplanError
from pipeplan.nested import ModelArguments, loss_in
from pipeplan.plan import Plan
from pipeplan.repeat import seed_all
from pipeplan.runtime.transport.base import Transport
from pipeplan.task import Task
from pipeplan.testing import reference
from pipeplan.testing.in_process import run_ranks
from tests.zoo.architecture import Make

STEPS, M, SEED, GPUS = 2, 4, 3, 2
Verdict = Literal["equal", "rounding", "differs", "refused", "failed"]
_NOISE = 64
"""Units of rounding, of the largest number there is, below which a difference is rounding."""


@dataclass(slots=True)
class Trial:
    """What became of one form of an architecture."""

    verdict: Verdict
    layers: int = 0
    stages: int = 0
    difference: float = 0.0
    """The largest of a weight or buffer after all steps, over the largest change of a weight."""
    where: str = ""
    """The tensor that differs most."""
    notes: list[str] = field(default_factory=list)
    """What the profile says of how the model was cut."""
    message: str = ""
    """Of a refusal or a failure."""

    def row(self) -> dict[str, Any]:
        """As it is kept, without what is not there."""
        return {name: value for name, value in asdict(self).items() if value}


def tried(make: Make, *, draws: bool = False) -> Trial:
    """Profile, plan for two GPUs, two steps of the runtime, compared with one process.

    Args:
        make: makes the task, from the same random state at each call.
        draws: whether one process trains the layers with the seeds of a run.
    """
    trial = Trial("failed")
    try:
        with _quiet(), _checked_distributions():
            chain = _profiled(make, trial)
            plan = planned(chain)
            trial.layers, trial.stages = len(chain.layers), len(plan.stages)
            got = _pipelined(make, plan)
            first, expected = _alone(make, draws=draws)
        _judge(trial, first, expected, got)
    except PipeplanError as error:
        internal = type(error).__name__ in ("InternalError", "RankError", "DeadlockError")
        trial.verdict = "failed" if internal else "refused"
        trial.message = str(error)
    except Exception as error:
        (*_, last) = traceback.extract_tb(error.__traceback__)
        trial.message = f"{type(error).__name__} in {last.name}: {error}"
    return trial


def planned(chain: Chain) -> Plan:
    """Two GPUs with memory enough, flush; the search ends after little work."""
    config = planner.Config(
        semantics="flush", microbatches=M, time_limit_s=1, workers=1, deterministic=True, gap=0.05
    )
    return planner.solve(chain, cluster.uniform(GPUS, 2**36), config)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Warnings of libraries about old interfaces are nobody's here."""
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)


@contextlib.contextmanager
def _checked_distributions() -> Iterator[None]:
    """Distributions check what they are given, unless the task says otherwise, and then again.

    It says so for the whole process, and others may have.
    """
    kind = torch.distributions.Distribution
    before = kind._validate_args
    kind.set_default_validate_args(__debug__)
    try:
        yield
    finally:
        kind.set_default_validate_args(before)


def _made(make: Make) -> Task:
    seed_all(SEED)
    return make()


def _profiled(make: Make, trial: Trial) -> Chain:
    said: list[str] = []
    task = _made(make)
    chain = profile_task(task, repeats=2, warmup=1, progress=said.append)
    trial.notes = said[1 : said.index("comparing the layers with the model")]
    assert chain.agreement is not None
    if not chain.agreement.is_exact:
        trial.notes.append(
            f"in one process layer by layer: {chain.agreement.largest_relative_difference:.1e}"
        )
    return chain


def _pipelined(make: Make, plan: Plan) -> dict[str, Tensor]:
    """Weights and buffers that the ranks hold in the end; each makes the task for itself.

    The first one is given a function and builds what it hosts, the second one a whole task.
    """

    def rank(transport: Transport) -> dict[str, Any]:
        seed_all(SEED)
        given = make() if transport.rank else make
        with Pipeline(given, plan, seed=SEED, transport=transport) as pipeline:
            pipeline.run(STEPS)
            return {
                name.removeprefix("model."): value.detach().clone()
                for name, value in pipeline.state_dict().items()
                if name.startswith("model.")
            }

    return {name: value for each in run_ranks(GPUS, rank) for name, value in each.items()}


def _alone(make: Make, *, draws: bool) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Weights and buffers of one process at first and after all steps."""
    task = _made(make)
    model = task.model if isinstance(task.model, nn.Module) else nn.ModuleList(task.model)
    first = _states(model)
    if draws:
        seed_all(SEED)
        return first, reference.train_flush(split(task), task, STEPS, M, SEED).weights
    _plain_loop(task)
    return first, _states(model)


def _states(model: nn.Module) -> dict[str, Tensor]:
    named = [*model.named_parameters(), *model.named_buffers()]
    return {
        name.replace("_orig_mod.", ""): densified(value.detach()).clone() for name, value in named
    }


def _plain_loop(task: Task) -> None:
    """What a user writes who has one GPU."""
    model = task.model if isinstance(task.model, nn.Module) else nn.Sequential(*task.model)
    optimizer = task.optimizer(model.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        for number in range(step * M, (step + 1) * M):
            given = task.data(number)
            source, target = given if task.loss else (given, None)
            with torch.autocast("cpu", task.autocast, enabled=task.autocast is not None):
                result = ModelArguments.of(source).call(model)
                loss = task.loss(result, target) if task.loss else loss_in(result)
            (loss / M).backward()
        optimizer.step()


def _judge(
    trial: Trial, first: dict[str, Tensor], expected: dict[str, Tensor], got: dict[str, Tensor]
) -> None:
    """Set the verdict, and how far the tensors are apart; what no rank holds has not changed."""
    got = {name.replace("_orig_mod.", ""): densified(value) for name, value in got.items()}
    lost = [name for name in expected if name not in got]
    got |= {name: first[name] for name in lost if name in first}
    change = max(_far(first[name], expected[name]) for name in expected if name in first)
    worst, beyond = 0.0, False
    for name, want in expected.items():
        far = _far(want, got[name])
        if far > worst:
            worst, trial.where = far, name
        beyond |= far > _allowed(first.get(name, want), want, change)
    trial.difference = worst / change if change else worst
    trial.verdict = "differs" if beyond else "rounding" if worst else "equal"


def _allowed(first: Tensor, want: Tensor, change: float) -> float:
    """How far rounding may carry a tensor: a share of its own change, or noise of the largest."""
    if not want.is_floating_point():
        return 0.0
    unit = torch.finfo(want.dtype).eps
    largest = float(want.abs().max()) if want.numel() else 0.0
    return max(unit**0.5 * _far(first, want), _NOISE * unit * max(largest, change))


def _far(one: Tensor, other: Tensor) -> float:
    """The largest difference; infinite where a shape differs or one is not a number."""
    if one.shape != other.shape:
        return float("inf")
    if not one.numel() or torch.equal(one, other):
        return 0.0
    wide = torch.complex128 if one.is_complex() else torch.float64
    return float((one.to(wide) - other.to(wide)).abs().nan_to_num(nan=float("inf")).max())
