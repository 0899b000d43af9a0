"""Modules that keep a budget: bit for bit the plain module, within the bytes that were planned."""

from __future__ import annotations

import copy
import gc
import subprocess
import sys
import threading
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from pipeplan import pinned, rematerialize, tasks
from pipeplan.errors import InfeasibleError, InputError
from pipeplan.host_copy import CopyEngine
from pipeplan.livebytes import peak_bytes
from pipeplan.pinned import PinnedPool
from pipeplan.remat import DeviceOpKind, HostLink, budgets
from pipeplan.rematerialized import units
from pipeplan.task import Task
from pipeplan.testing.refusals import least_bytes
from tests import grids, short_networks
from tests.lean_modules import LOSS, SAMPLE, by_layers, lean, row, source

FAST = {"offload": True, "host_bandwidth": "10000GB/s"}
"""So fast that to wait on the host is cheaper than to run again, whatever was measured."""
TINY = {
    "gpt2": {"sequence": 16},
    "llama": {},
    "vit": {},
    "mixer": {},
    "resnet": {"width": 8, "side": 32},
    "densenet": {},
    "inception": {},
    "unet": {"depth": 2, "width": 4, "side": 16},
    "tied": {"sequence": 16, "tied": True},
}
MODELS = {"tied": "gpt2"}
ALIKE = {"inception", "vit", "llama", "tied"}
FEW = [pytest.param(name, marks=pytest.mark.long) if name in ALIKE else name for name in TINY]
"""Inception joins branches as DenseNet and U-Net do, blocks of ViT and Llama are as GPT-2's,
and shared parameters have a test of their own."""
BETWEEN = ["gpt2", "mixer"]
"""Of which budgets between the least and all are tried, too; of the others when long."""


def tiny(name: str, **options: object) -> Task:
    """A task of the library with the same weights each time."""
    torch.manual_seed(0)
    make = MODELS.get(name, name)
    networks = short_networks if hasattr(short_networks, make) else tasks
    task: Task = getattr(networks, make)(0, **(options or TINY[name]))
    return task


def trained(module: nn.Module, task: Task, steps: int = 2) -> list[Tensor]:
    """All that two micro-batches leave: losses, gradients, buffers, the generator's state."""
    torch.manual_seed(5)
    losses = []
    for step in range(steps):
        source, target = task.microbatch(step)
        loss = task.loss(module(source), target)
        loss.backward()
        losses.append(loss.detach())
    gradients = [parameter.grad for parameter in module.parameters()]
    assert all(gradient is not None for gradient in gradients)
    found = [gradient.clone() for gradient in gradients if gradient is not None]
    buffers = [buffer.clone() for buffer in module.buffers()]
    return [*losses, *found, *buffers, torch.get_rng_state()]


def peak(module: nn.Module, task: Task) -> int:
    """Most live bytes of one micro-batch that adds to gradients that are there."""
    return peak_bytes(module, task.loss, *task.microbatch(0))


def least(task: Task) -> int:
    """The smallest budget."""
    assert isinstance(task.model, nn.Module)
    with pytest.raises(InfeasibleError) as refused:
        by_layers(task.model, task.microbatch(0), 1, loss=task.loss, repeats=1)
    return least_bytes(refused.value)


@pytest.mark.parametrize(
    "name",
    [each if each in BETWEEN else pytest.param(each, marks=pytest.mark.long) for each in TINY],
)
def test_a_module_within_a_budget_between_is_the_plain_module(name: str) -> None:
    """Between the least and all that is kept: bit-equal, too; the peak is as predicted."""
    task = tiny(name)
    assert isinstance(task.model, nn.Module)
    free = by_layers(task.model, task.microbatch(0), "1TiB", loss=task.loss, repeats=1)
    _, between, _ = budgets(free.rematerialization_costs, None, 3)
    check_within(task, [between])


@pytest.mark.parametrize("name", FEW)
def test_a_module_within_a_budget_is_the_plain_module(name: str) -> None:
    """Losses, gradients, statistics and random numbers are bit-equal; the peak is as predicted."""
    task = tiny(name)
    check_within(task, [least(task)])


def check_within(task: Task, limits: Sequence[int]) -> None:
    """The module within each of the budgets against the plain one."""
    assert isinstance(task.model, nn.Module)
    expected = trained(copy.deepcopy(task.model), task)
    for budget in limits:
        model = copy.deepcopy(task.model)
        lean = by_layers(model, task.microbatch(0), budget, loss=task.loss, repeats=1)
        found = trained(lean, task)
        assert all(map(torch.equal, expected, found))
        assert list(lean.state_dict()) == list(model.state_dict())
        assert all(a is b for a, b in zip(lean.parameters(), model.parameters(), strict=True))
        measured = peak(lean, task)
        assert measured <= budget
        assert measured <= lean.rematerialization.outcome.peak_bytes <= 1.001 * measured


@grids.first(1, name=["mixer", "gpt2"])
def test_what_waits_on_the_host_comes_back_as_it_was(name: str) -> None:
    """With offloading everything is bit-equal, too, within budgets that need it."""
    task = tiny(name, **TINY[name], blocks=4)
    assert isinstance(task.model, nn.Module)
    expected = trained(copy.deepcopy(task.model), task)
    options = {"loss": task.loss, "repeats": 1, **FAST}
    free = by_layers(task.model, task.microbatch(0), "1TiB", **options)
    for budget in budgets(free.rematerialization_costs, HostLink(10**13), 4)[:1]:
        model = copy.deepcopy(task.model)
        lean = by_layers(model, task.microbatch(0), budget, **options)
        found = trained(lean, task)
        assert all(map(torch.equal, expected, found))
        kinds = {op.kind for op in lean.rematerialization.schedule.ops}
        assert DeviceOpKind.OFFLOAD in kinds
        assert peak(lean, task) <= budget


def host_workers() -> list[str]:
    """The threads that copy."""
    return [each.name for each in threading.enumerate() if each.name.startswith("pipeplan-host")]


def test_the_rehearsal_and_the_module_share_blocks_of_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a GPU a block is page-locked at its first use, which takes longer than its copy."""
    asked: list[int] = []
    make = PinnedPool.empty_like

    def counted(pool: PinnedPool, part: Tensor) -> Tensor:
        asked.append(id(pool))
        return make(pool, part)

    def buffer(way: CopyEngine, part: Tensor) -> Tensor:
        return way._pinned.empty_like(part)

    monkeypatch.setattr(CopyEngine, "_buffer", buffer)
    monkeypatch.setattr(PinnedPool, "empty_like", counted)
    monkeypatch.setattr(pinned, "_register", lambda *_: None)
    monkeypatch.setattr(pinned, "_unregister", lambda _: None)
    task = tiny("mixer")
    options = {"loss": task.loss, "repeats": 1, "method": "layers", "max_layers": 4, **FAST}
    plain, pair = task.model, task.microbatch(0)
    assert isinstance(plain, nn.Module)
    free = rematerialize(plain, pair, "1TiB", **options)
    budget, *_ = budgets(free.rematerialization_costs, HostLink(10**13), 2)
    module = rematerialize(plain, pair, budget, **options)
    rehearsed = len(asked)
    assert rehearsed
    trained(module, task)
    assert len(asked) > rehearsed
    assert len(set(asked)) == 1


def test_a_layer_that_fails_leaves_no_worker_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing waits for operations that do not run any more, or the process would never end."""
    waited: list[threading.Event] = []

    def event() -> threading.Event:
        waited.append(threading.Event())
        return waited[-1]

    def fails(*_: object) -> Tensor:
        raise ArithmeticError("odd number")

    task = tiny("mixer")
    assert isinstance(task.model, nn.Module)
    options = {"loss": task.loss, "repeats": 1, "max_layers": 4, **FAST}
    free = by_layers(task.model, task.microbatch(0), "1TiB", **options)
    budget, *_ = budgets(free.rematerialization_costs, HostLink(10**13), 2)
    lean = by_layers(task.model, task.microbatch(0), budget, **options)
    orders = lean._prepared.script.forward
    layer = next(order.op.index for order in orders if order.used_later)
    gc.collect()
    before = host_workers()
    monkeypatch.setattr(units, "Event", event)
    monkeypatch.setattr(lean._prepared.split.layers[layer], "forward", fails)
    try:
        with pytest.raises(ArithmeticError, match="odd number") as failed:
            lean(task.microbatch(0)[0])
        assert failed.tb is not None
        assert waited
        assert host_workers() == before
    finally:
        for each in waited:
            each.set()


def test_autocast_is_kept_when_layers_run_again() -> None:
    """Planned and called under autocast, gradients are the plain module's; without, refused."""
    task = tiny("mixer")
    model = task.model
    assert isinstance(model, nn.Module)
    other = copy.deepcopy(model)
    source, target = task.microbatch(0)
    with torch.autocast("cpu", torch.bfloat16):
        lean = by_layers(model, (source, target), least(task), loss=task.loss, repeats=1)
        losses = [task.loss(each(source), target) for each in (other, lean)]
    for loss in losses:
        loss.backward()
    for first, second in zip(other.parameters(), model.parameters(), strict=True):
        assert first.grad is not None
        assert second.grad is not None
        assert torch.equal(first.grad, second.grad)
    with pytest.raises(InputError, match="autocast"):
        lean(source)


def test_a_weight_used_twice_under_autocast() -> None:
    """Both uses of one forward share a cast, so their gradients add up in 16 bits, as without."""
    torch.manual_seed(0)
    shared = nn.Linear(6, 6)
    twice = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), shared, nn.Tanh(), shared)
    model = nn.Sequential(nn.Linear(6, 6), _Block(twice), nn.Linear(6, 6))
    other, source = copy.deepcopy(model), torch.randn(5, 6)
    with torch.autocast("cpu", torch.bfloat16):
        lean = by_layers(model, source, "1MiB", repeats=1)
        for each in (other, lean):
            each(source).float().sum().backward()
    for first, second in zip(other.parameters(), model.parameters(), strict=True):
        assert first.grad is not None
        assert second.grad is not None
        assert torch.equal(first.grad, second.grad)


class _Block(nn.Module):
    """Modules that are one layer."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, value: Tensor) -> Tensor:
        result: Tensor = self.part(value)
        return result


def test_shared_parameters_and_interleaved_micro_batches() -> None:
    """Two forwards before their backwards, onto gradients that are there, with tied weights."""
    found = []
    for budget in (None, "least"):
        task = tiny("tied")
        model = task.model
        assert isinstance(model, nn.Module)
        if budget:
            lean = by_layers(model, task.microbatch(0), least(task), loss=task.loss, repeats=1)
        else:
            lean = model
        torch.manual_seed(1)
        for _ in range(2):
            pairs = [task.microbatch(number) for number in range(2)]
            losses = [task.loss(lean(source), target) for source, target in pairs]
            for loss in losses:
                loss.backward()
        found.append([parameter.grad for parameter in model.parameters()])
    for first, second in zip(*found, strict=True):
        assert first is not None
        assert second is not None
        assert torch.equal(first, second)


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_on_a_shared_parameter_are_refused(register: str) -> None:
    """They would see the gradient of one layer after the other; on others they run as ever."""
    task = tiny("tied")
    model, (source, target) = task.model, task.microbatch(0)
    assert isinstance(model, nn.Module)
    lean = by_layers(model, (source, target), "1GiB", loss=task.loss, repeats=1)
    seen: list[Tensor] = []
    waiting = task.loss(lean(source), target)
    getattr(model.get_parameter("positions.weight"), register)(seen.append)
    hook = getattr(model.get_parameter("head.weight"), register)(seen.append)
    with pytest.raises(InputError, match=r"parameter 'tokens\.weight': got hooks on its gradient"):
        waiting.backward()
    with pytest.raises(InputError, match="several layers share it"):
        lean(source)
    assert not seen
    hook.remove()
    task.loss(lean(source), target).backward()
    assert len(seen) == 1


def test_a_budget_below_the_least_names_layer_and_least() -> None:
    """The refusal tells the smallest budget, which then holds, as Python is given it."""
    task = tiny("mixer")
    assert isinstance(task.model, nn.Module)
    options = {"loss": task.loss, "repeats": 1}
    with pytest.raises(InfeasibleError, match=r"layer \d+ \('.*'\) holds") as refused:
        by_layers(task.model, task.microbatch(0), "100KiB", **options)
    limit = least_bytes(refused.value)
    assert f"Give budget={limit}, a smaller micro-batch" in str(refused.value)
    lean = by_layers(task.model, task.microbatch(0), limit, **options)
    assert lean.rematerialization.outcome.peak_bytes == limit


def test_without_gradients_or_in_eval_mode_the_plain_module_runs() -> None:
    """Evaluation takes any shape and computes what the plain module computes."""
    task = tiny("mixer")
    assert isinstance(task.model, nn.Module)
    lean = by_layers(task.model, task.microbatch(0)[0], "1TiB", repeats=1)
    source = task.microbatch(1)[0][:1]
    with torch.no_grad():
        assert torch.equal(lean(source), task.model(source))
    lean.eval()
    task.model.eval()
    assert torch.equal(lean(source), task.model(source))


def test_nothing_but_the_budget_is_different_afterwards() -> None:
    """Measuring leaves weights, gradients, buffers and random numbers as they were."""
    task = tiny("resnet")
    assert isinstance(task.model, nn.Module)
    model = task.model
    trained(model, task, 1)
    before = [*model.parameters(), *(p.grad for p in model.parameters()), *model.buffers()]
    kept = [None if value is None else value.clone() for value in before]
    state = torch.get_rng_state()
    by_layers(model, task.microbatch(0), "1TiB", loss=task.loss, repeats=1)
    after = [*model.parameters(), *(p.grad for p in model.parameters()), *model.buffers()]
    assert torch.equal(state, torch.get_rng_state())
    for value, first, old in zip(after, before, kept, strict=True):
        assert value is first
        assert value is not None
        assert old is not None
        assert torch.equal(value, old)


def refusals() -> list[tuple[str, nn.Module, object, dict[str, object], str]]:
    """Name, module, sample, options, message."""
    linear = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    writes = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 4))
    x = torch.ones(2, 4)
    return [
        ("shape", linear, torch.ones(2, 3), {}, "forward failed"),
        ("no tensor", linear, [1], {}, "sample: got"),
        ("loss without target", linear, x, {"loss": nn.functional.mse_loss}, "sample: got"),
        ("target without loss", linear, (x, x), {}, "sample: got"),
        ("in place", writes, x, {}, "in place"),
        ("size", linear, x, {"budget": "8 apples"}, "budget"),
        ("sign", linear, x, {"budget": -1}, "budget"),
        ("repeats", linear, x, {"repeats": 0}, "repeats"),
        ("bandwidth alone", linear, x, {"host_bandwidth": "1GB/s"}, "offload"),
        ("method alone", linear, x, {"method": "pofo"}, "method pofo alone, need offload=True"),
        ("frozen", nn.Sequential(nn.ReLU(), nn.Tanh()), x, {}, "without gradients"),
    ]


@pytest.mark.parametrize("case", refusals(), ids=lambda case: case[0])
def test_what_cannot_be_done_is_said(
    case: tuple[str, nn.Module, object, dict[str, object], str],
) -> None:
    """Bad input is an InputError that names it."""
    _, module, sample, options, message = case
    with pytest.raises(InputError, match=message):
        rematerialize(module, sample, **{"budget": "1GiB", "repeats": 1, **options})  # type: ignore[arg-type]


def test_other_calls_than_the_planned_one_are_refused() -> None:
    """Another shape, frozen weights, a second backward, weights changed in between."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    source = torch.ones(2, 4)
    lean = by_layers(model, source, "1GiB", repeats=1)
    with pytest.raises(InputError, match=r"shape \[3, 4\]"):
        lean(torch.ones(3, 4))
    result = lean(source).sum()
    result.backward(retain_graph=True)
    with pytest.raises(InputError, match="second backward"):
        result.backward()
    result = lean(source).sum()
    with torch.no_grad():
        model[0].weight += 1
    with pytest.raises(InputError, match="weights changed"):
        result.backward()
    model[0].weight.requires_grad_(False)
    with pytest.raises(InputError, match="requires_grad of the parameters"):
        lean(source)


def test_the_input_gets_its_gradient() -> None:
    """A module inside of a larger one: gradients flow on in front of it."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)))
    source = torch.randn(3, 8, requires_grad=True)
    model(source).sum().backward()
    assert source.grad is not None
    expected, source.grad = source.grad, None
    lean = by_layers(model, source, "1GiB", repeats=1, method="revolve")
    lean(source).sum().backward()
    assert torch.equal(source.grad, expected)


def test_package_is_imported_without_torch() -> None:
    """`import pipeplan` stays light: torch comes with the first use of `rematerialize`."""
    code = "import sys, pipeplan; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


class _Table(nn.Module):
    """Multiplies by a tensor that all blocks hold, and by one that its first call makes."""

    def __init__(self, shared: Tensor) -> None:
        super().__init__()
        self.shared = shared
        self.made: dict[int, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        made = self.made.setdefault(len(x), torch.ones(len(x), 1))
        return torch.tanh(x * made) * self.shared


def test_tables_of_layers_stay_where_units_leave() -> None:
    """A tensor that is no buffer is nobody's to give up: another pass reads it meanwhile."""
    table = torch.linspace(0.5, 1.5, 8)
    module, plain = row(lambda: _Table(table)), row(lambda: _Table(table))
    lean_one = lean(module, method="swap", **FAST)
    assert lean_one._prepared.script.moved
    for each in (lean_one, plain):
        sum(LOSS(each(source() * share), SAMPLE[1]) for share in (1.0, 0.5)).backward()
    pairs = zip(module.parameters(), plain.parameters(), strict=True)
    assert all(torch.equal(first.grad, second.grad) for first, second in pairs)
    assert torch.equal(table, torch.linspace(0.5, 1.5, 8))
