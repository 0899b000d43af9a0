"""One stage that offloads: what leaves, what others hold, what comes back, what goes wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from itertools import pairwise
from random import Random

import pytest
import torch
from torch import Tensor, nn

from pipeplan.capture import profile_task
from pipeplan.chain import Chain
from pipeplan.errors import InternalError
from pipeplan.host_copy import Copies, CopyEngine
from pipeplan.livebytes import LiveBytes
from pipeplan.plan import LayerRanges, OpKind
from pipeplan.runtime.data.feed import TaskFeed, Uses
from pipeplan.runtime.dry_run.clock import VirtualClock
from pipeplan.runtime.dry_run.planned_times import PlannedTimes
from pipeplan.runtime.dry_run.run import HostUpdates, TimedStage
from pipeplan.runtime.dry_run.sleeping import EmulatedHostLinks
from pipeplan.runtime.instrument import CountedFeed
from pipeplan.runtime.parameters.optimizer_factory import OptimizerFactory
from pipeplan.runtime.parameters.ownership import ParameterOwnership
from pipeplan.runtime.stages.saved_tensors import FreedStorage, SavedTensors
from pipeplan.runtime.stages.segment import Fed
from pipeplan.runtime.stages.stage import StageRunner, StageSpec
from pipeplan.split_model import SplitModel
from pipeplan.task import Task
from tests import capture_tasks, handmade_offload, pipelines
from tests.captured import captured, chain_of
from tests.unit.runtime import test_recompute_runs
from tests.unit.runtime.test_exact import Recomputed

TASKS: dict[str, Callable[[], Task]] = {
    "mlp": capture_tasks.mlp,
    "conv": capture_tasks.conv,
    "transformer": capture_tasks.transformer,
    "skips": capture_tasks.skips,
    **test_recompute_runs.TASKS,
}
RIDES = {"t5"}
"""Its encoder's output is the input of several layers that save it: (M2) counts it for each."""


class Alone:
    """All layers of a model as one stage."""

    def __init__(
        self, model: SplitModel, task: Task, runs: LayerRanges, duplex: bool = True
    ) -> None:
        self.live = LiveBytes()
        fed = [i for i in range(len(model.layers)) if model.fed_to(i)]
        feed = TaskFeed(task, model, Uses(inputs=(1 + len(fed),), targets=1))
        self.feed = CountedFeed(feed, self.live)
        ownership = ParameterOwnership(
            [], OptimizerFactory(task.optimizer, None), versions=1, microbatches=8, deferred=False
        )
        self.held = ownership.hold(model.layers, 0)
        spec = StageSpec(
            index=0,
            first_layer=0,
            layers=model.layers,
            fqns=model.fqns,
            boundaries=model.boundaries,
            outputs=(),
            loss=task.loss,
            seed=1,
            fed={i: Fed(model.boundaries[0], self.feed.input) for i in fed},
            offload=runs,
            host=CopyEngine(torch.device("cpu"), duplex=duplex),
        )
        self.stage = StageRunner(spec, 8, self.held)
        states = [t for x in model.layers for t in (*x.parameters(), *x.buffers())]
        self.live.count([*states, *(t for x in self.stage.slots for t in x.tensors())])
        self.states = self.live.live

    def __enter__(self) -> Alone:
        self.live.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.live.__exit__(*error)
        for leaves in self.stage.slots:
            leaves.release()

    def forward(self, microbatch: int) -> None:
        self.stage.forward(microbatch, self.feed.input(microbatch), self.feed.target)

    def gradients(self) -> list[Tensor]:
        return [gradient.clone() for gradient in self.held.weights.gradients(0)]

    def kept(self) -> int:
        return self.live.live - self.states


def inner(chain: Chain, first: int, last: int) -> int:
    """(H1) of one run."""
    layers = chain.layers[first : last + 1]
    ends = (max(a.saved_output_bytes, b.saved_input_bytes) for a, b in pairwise(layers))
    return sum(layer.saved_bytes for layer in layers) + sum(ends)


def drawn(rng: Random, chain: Chain) -> LayerRanges:
    """One or two runs apart that keep something."""
    cuts = sorted(rng.sample(range(len(chain.layers) + 1), rng.choice([2, 2, 4])))
    runs = tuple((a, b - 1) for a, b in zip(cuts[::2], cuts[1::2], strict=True))
    return runs if sum(inner(chain, *run) for run in runs) else drawn(rng, chain)


@pytest.mark.parametrize("name", TASKS)
def test_what_leaves_is_what_the_model_says(name: str) -> None:
    """FREE_O gives (H1) back, PREFETCH takes it, nothing else does; gradients are the same bits.

    Where (M2) counts a storage more than once, what is left is at most what it says.
    """
    rng, chain = Random(name), chain_of(TASKS[name])
    model, task = captured(TASKS[name])
    all_kept = inner(chain, 0, len(chain.layers) - 1)
    all_kept += chain.layers[0].saved_input_bytes + chain.layers[-1].saved_output_bytes
    with Alone(model, task, ()) as plain:
        plain.forward(0)
        plain.stage.backward(0, [])
        expected = plain.gradients()
    for _ in range(4):
        runs = drawn(rng, chain)
        away = sum(inner(chain, *run) for run in runs)
        with Alone(model, task, runs) as one:
            one.forward(0)
            before = one.kept()
            one.stage.offload(0)
            assert one.kept() == before
            one.stage.free(0)
            spare = all_kept - away - one.kept()
            assert 0 <= spare <= all_kept - before
            assert name in RIDES or all_kept == before
            one.stage.prefetch(0)
            assert one.kept() == before
            one.stage.backward(0, [])
            assert one.kept() == 0
            assert all(map(torch.equal, expected, one.gradients()))


class Table(nn.Module):
    """Multiplies by a table that it makes once and keeps, as caches of positions are kept."""

    def __init__(self) -> None:
        super().__init__()
        self.table: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.linspace(1, 2, x.shape[1])
        return x * self.table


def with_table() -> tuple[SplitModel, Task]:
    """Linear, table, tanh, linear."""
    torch.manual_seed(1)
    return pipelines.split_by_hand([nn.Linear(6, 6), Table(), nn.Tanh(), nn.Linear(6, 6)], "sgd")


@pytest.mark.parametrize("duplex", [True, False])
def test_what_others_hold_stays_with_them(duplex: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer's table is used by other micro-batches meanwhile: it does not leave.

    Nor is it copied, from the second micro-batch on: capture counts it for none.
    """
    away: list[int] = []
    out = CopyEngine.out

    def counted(way: CopyEngine, parts: list[Tensor]) -> Future[Copies]:
        away.append(sum(part.nbytes for part in parts))
        return out(way, parts)

    monkeypatch.setattr(CopyEngine, "out", counted)
    of_one = inner(profile_task(with_table()[1], repeats=1, warmup=0), 0, 3)
    with Alone(*with_table(), ()) as plain:
        for microbatch in range(3):
            plain.forward(microbatch)
        for microbatch in range(3):
            plain.stage.backward(microbatch, [])
        expected = plain.gradients()
    with Alone(*with_table(), ((0, 3),), duplex) as one:
        for microbatch in range(3):
            one.forward(microbatch)
            one.stage.offload(microbatch)
            one.stage.free(microbatch)
        table = one.stage.spec.layers[1].table
        assert isinstance(table, Tensor)
        assert one.kept() == 3 * pipelines.data(0)[0].nbytes + table.nbytes
        assert away == [of_one + table.nbytes, of_one, of_one]
        for microbatch in range(3):
            one.stage.prefetch(microbatch)
            one.stage.backward(microbatch, [])
        assert one.kept() == table.nbytes
        assert torch.equal(table, torch.linspace(1, 2, 6))
        assert all(map(torch.equal, expected, one.gradients()))


def test_torchs_checkpointing_in_a_run() -> None:
    """A layer with hooks of its own runs as it does without offloading."""

    def gradients(runs: LayerRanges) -> list[Tensor]:
        torch.manual_seed(4)
        layers = [nn.Linear(6, 6), Recomputed(), nn.Tanh(), Recomputed(), nn.Linear(6, 3)]
        with Alone(*pipelines.split_by_hand(layers, "sgd"), runs) as one:
            one.forward(0)
            if runs:
                one.stage.offload(0)
                one.stage.free(0)
                one.stage.prefetch(0)
            one.stage.backward(0, [])
            return one.gradients()

    assert all(map(torch.equal, gradients(()), gradients(((0, 3),))))


class InPlace(nn.Module):
    """Writes to what the layer before saved for its backward."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(2)


MODIFIED = (
    "needed for the backward, was modified in place. Make the operation out of place, or plan"
    " without --offload."
)


def test_writing_to_what_is_saved_is_an_error() -> None:
    """As without offloading; behind hooks autograd does not look itself."""
    for offloads in (False, True):
        layers = [nn.Linear(6, 6), nn.Sigmoid(), InPlace(), nn.Linear(6, 3)]
        with Alone(*pipelines.split_by_hand(layers, "sgd"), ((0, 3),)) as one:
            one.forward(0)
            with pytest.raises(RuntimeError, match=rf"layer 1: .* of shape .5, 6., {MODIFIED}"):
                one.stage.offload(0) if offloads else one.stage.backward(0, [])


class Fading(nn.Module):
    """Multiplies by a table that fades with each micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.linspace(1, 2, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.table.mul_(0.99)


@pytest.mark.parametrize("back_before", [True, False])
def test_writing_to_what_others_hold_while_it_is_away_is_an_error(back_before: bool) -> None:
    """What a layer kept is not taken for what autograd saved, whenever it was written to."""
    torch.manual_seed(1)
    layers = [nn.Linear(6, 6), Fading(), nn.Tanh(), nn.Linear(6, 3)]
    with Alone(*pipelines.split_by_hand(layers, "sgd"), ((0, 3),)) as one:
        one.forward(0)
        one.stage.offload(0)
        one.stage.free(0)
        if back_before:
            one.stage.prefetch(0)
        one.forward(1)
        if not back_before:
            one.stage.prefetch(0)
        with pytest.raises(RuntimeError, match=rf"layer 1: .* of shape .6., {MODIFIED}"):
            one.stage.backward(0, [])


class Sparse(nn.Module):
    """Multiplies by a sparse matrix, which autograd saves; it has no storage."""

    def __init__(self, fades: bool = False) -> None:
        super().__init__()
        self.matrix = torch.eye(6).mul(2).to_sparse()
        self.fades = fades

    def forward(self, x: Tensor) -> Tensor:
        if self.fades:
            self.matrix.mul_(0.5)
        return torch.sparse.mm(self.matrix, x.T).T


def test_sparse_tensors_stay() -> None:
    """A layer that saves one runs as without offloading; writing to it is an error, too."""

    def gradients(runs: LayerRanges, fades: bool = False) -> list[Tensor]:
        torch.manual_seed(4)
        layers = [nn.Linear(6, 6), nn.Tanh(), Sparse(fades), nn.Tanh(), nn.Linear(6, 3)]
        one = Alone(
            *pipelines.split_by_hand(layers, "sgd"), runs
        )  # its meter knows no sparse ones
        one.forward(0)
        if runs:
            one.stage.offload(0)
            one.stage.free(0)
            one.stage.prefetch(0)
        if fades:
            one.forward(1)
        one.stage.backward(0, [])
        return one.gradients()

    assert all(map(torch.equal, gradients(()), gradients(((0, 4),))))
    with pytest.raises(RuntimeError, match=rf"layer 2: .* of shape .6, 6., {MODIFIED}"):
        gradients(((0, 4),), fades=True)


@pytest.mark.parametrize(
    ("actions", "missing"), [("ob", "PREFETCH"), ("ofb", "PREFETCH"), ("op", "FREE_O")]
)
def test_a_wrong_program_says_so(actions: str, missing: str) -> None:
    """A backward while its bytes are away, a way back before the way there."""
    with Alone(*pipelines.toy(), ((0, 7),)) as one:
        one.forward(0)
        does = {
            "o": one.stage.offload,
            "f": one.stage.free,
            "p": one.stage.prefetch,
            "b": lambda number: one.stage.backward(number, []),
        }
        *before, last = actions
        for action in before:
            does[action](0)
        with pytest.raises(InternalError, match=f"micro-batch 0 of stage 0 is .* no {missing}"):
            does[last](0)


def ends(ways: EmulatedHostLinks, clock: VirtualClock, kinds: Sequence[OpKind]) -> list[int]:
    """When transfers that all start at 10 end."""
    clock.until(10)
    pending = [ways.start(kind, 0, number) for number, kind in enumerate(kinds)]
    found = []
    for each in pending:
        each.wait()
        found.append(clock.now())
    return found


def test_emulated_ways_take_turns() -> None:
    """One transfer at a time, per direction under full duplex."""
    kinds = (OpKind.OFFLOAD, OpKind.OFFLOAD, OpKind.PREFETCH)
    lasting = {(OpKind.OFFLOAD, 0): 3, (OpKind.PREFETCH, 0): 8}
    full, half = VirtualClock(), VirtualClock()
    assert ends(EmulatedHostLinks(full, lasting, duplex=True), full, kinds) == [13, 16, 18]
    assert ends(EmulatedHostLinks(half, lasting, duplex=False), half, kinds) == [13, 16, 24]


def test_in_a_dry_run_an_input_leaves_with_its_forward() -> None:
    """OFFLOAD stands before F, whose input comes at 5; F takes 4 ns, the copy 6."""
    clock, times = VirtualClock(), PlannedTimes.of(handmade_offload.whole_input())
    lasting = {**times.ops, (OpKind.OFFLOAD, 0): 6}
    ways = EmulatedHostLinks(clock, lasting, duplex=True)
    stage = TimedStage(times, 0, clock, ways, HostUpdates())
    stage.offload(0)
    clock.until(5)
    stage.forward(0, [], lambda _: None)
    assert clock.now() == 5 + 4
    stage.free(0)
    assert clock.now() == 5 + 6
    assert stage.in_flight == 1


@pytest.mark.parametrize(("gate", "value"), [(3, 5), (5, 3), (4, 4)])
def test_two_stages_that_save_different_tensors_of_a_boundary(gate: int, value: int) -> None:
    """The more of what the two save leaves; what only the other one saves stays."""
    lender, borrower = SavedTensors(lending=0), SavedTensors(own_input=True)
    x = torch.ones(2, requires_grad=True)
    with lender.layer(0, [x]):
        outputs = torch.sigmoid(x.sum().expand(gate)), x.sum() * torch.ones(value)
    lender.made(0, outputs)
    given = [each.detach().requires_grad_() for each in outputs]
    with borrower.layer(0, given):
        output = given[0].sum() + (given[1] * given[1]).sum()
    borrower.made(0, [output])
    assert [saved.tensor().shape for saved in lender.lent()] == [(gate,)]
    leaving = borrower.kept((), lender.lent())
    assert [each.storage.nbytes() for each in leaving] == [4 * max(gate, value)]
    assert not lender.kept(())
    gone = [FreedStorage.of(each) for each in leaving]
    assert not lender.kept(())
    assert [each.come_back() is None for each in gone] == [True]
