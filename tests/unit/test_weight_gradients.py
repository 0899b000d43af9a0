"""A backward in two halves gives the gradients of one backward, to the bit."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from pipeplan.autograd_cut import Slot, enter_some, leave, run_backward
from pipeplan.gradients import give_sum, sum_of
from pipeplan.livebytes import LiveBytes
from pipeplan.precision import casting
from pipeplan.weight_gradients import InnerBackwardError, WeightGradients
from tests import models

CPU = torch.device("cpu")
Layers = Sequence[Callable[..., Tensor | tuple[Tensor, ...]]]


@dataclass
class Halves:
    """Layers behind a boundary, with micro-batches under way; `split`: backwards in two halves."""

    layers: Sequence[nn.Module]
    split: bool
    fed: Callable[[int], tuple[Tensor, ...]] = lambda _: ()
    autocast: torch.dtype | None = None
    arrived: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.under_way: dict[int, tuple[Slot, Slot, Tensor, WeightGradients]] = {}
        for parameter in self.parameters():
            give_sum(parameter, torch.zeros_like(parameter))

    def parameters(self) -> list[nn.Parameter]:
        """Each once."""
        every = (p for layer in self.layers for p in layer.parameters() if p.requires_grad)
        return list(dict.fromkeys(every))

    def forward(self, number: int, boundary: Sequence[Tensor]) -> None:
        """With random numbers of its own."""
        torch.manual_seed(number)
        entry, exit_, waiting = Slot(), Slot(), WeightGradients()
        flags = [tensor.is_floating_point() for tensor in boundary]
        value = enter_some(entry, [tensor.clone() for tensor in boundary], flags)
        for index, layer in enumerate(self.layers):
            with casting(self.autocast, CPU):
                if self.split:
                    with waiting.deferring(layer):
                        value = layer(*value, *self.fed(index))
                else:
                    value = layer(*value, *self.fed(index))
            value = value if isinstance(value, tuple) else (value,)
        ends = [tensor for tensor in value if tensor.requires_grad]
        generator = torch.Generator().manual_seed(number)
        exit_.put([torch.randn(x.shape, generator=generator).to(x.dtype) for x in ends])
        self.under_way[number] = (entry, exit_, leave(exit_, ends), waiting)

    def first(self, number: int) -> None:
        """The gradients of activations; all of them without `split`."""
        entry, _, root, waiting = self.under_way.pop(number)
        if self.split:
            with waiting.activations():
                run_backward(root)
        else:
            run_backward(root)
        self.under_way[number] = (Slot(), Slot(), torch.empty(0), waiting)
        self.arrived += entry.take() or []

    def second(self, number: int) -> None:
        """Those of weights."""
        *_, waiting = self.under_way.pop(number)
        waiting.weights()

    def gradients(self) -> list[Tensor | None]:
        """Sums of all so far, per parameter."""
        return [sum_of(parameter) for parameter in self.parameters()]


ORDER = ["F0", "F1", "I0", "I1", "W0", "F2", "W1", "I2", "W2"]


def trained(halves: Halves, boundary: Callable[[int], Sequence[Tensor]]) -> list[Tensor | None]:
    """Gradients of inputs and weights, buffers, after three micro-batches that interleave."""
    act = {
        "F": lambda number: halves.forward(number, boundary(number)),
        "I": halves.first,
        "W": halves.second,
    }
    for each in ORDER:
        act[each[0]](int(each[1:]))
    buffers = [buffer for layer in halves.layers for buffer in layer.buffers()]
    return [*halves.arrived, *halves.gradients(), *buffers]


def check_equal(one: Sequence[Tensor | None], other: Sequence[Tensor | None]) -> None:
    """To the bit."""
    for a, b in zip(one, other, strict=True):
        assert (a is None) == (b is None)
        assert a is None or b is None or torch.equal(a, b)


@pytest.mark.parametrize("family", models.FAMILIES)
def test_families(family: str) -> None:
    """Models of six families: inputs' and weights' gradients, and buffers."""
    split, task = models.make(family)
    first, *rest = (copy.deepcopy(layer) for layer in split.layers)  # what is tied is parted

    def boundary(number: int) -> Sequence[Tensor]:
        torch.manual_seed(number)
        with torch.no_grad():
            found = copy.deepcopy(first)(task.data(number)[0])
        return found if isinstance(found, tuple) else (found,)

    def fed(index: int) -> tuple[Tensor, ...]:
        return (task.data(0)[0],) if split.fed_to(index + 1) else ()

    plain = trained(Halves(copy.deepcopy(rest), False, fed), boundary)
    check_equal(trained(Halves(copy.deepcopy(rest), True, fed), boundary), plain)


class _Function(nn.Module):
    """A layer from a function of value and two square weights."""

    def __init__(self, function: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.one, self.two = (nn.Parameter(torch.randn(6, 6) / 3) for _ in range(2))
        self.function = function

    def forward(self, value: Tensor) -> Tensor:
        return self.function(value, self.one, self.two)


class _Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, value: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(value, weight)  # type: ignore[attr-defined]
        return (value @ weight).to(value.dtype)

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> tuple[Tensor, Tensor]:
        value, weight = ctx.saved_tensors  # type: ignore[attr-defined]
        gradient = gradient.to(weight.dtype)
        return gradient @ weight.T, value.flatten(0, 1).T @ gradient.flatten(0, 1)


class _Attention(nn.Module):
    """torch's own, which is Python inside."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(6, 2, dropout=0.1, batch_first=True)

    def forward(self, value: Tensor) -> Tensor:
        return self.inner(value, value, value)[0]


class _Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.LSTM(6, 6, batch_first=True)

    def forward(self, value: Tensor) -> Tensor:
        return self.inner(value)[0]


def _in_place(value: Tensor, one: Tensor, two: Tensor) -> Tensor:
    value = value.float() * 1
    product = value * 1
    product.add_(one[:5]).sub_(two.sum(0))
    return product[:, 0].addmm_(value[:, 1], two)


def _written(value: Tensor, one: Tensor, two: Tensor) -> Tensor:
    value = value.float() * 1
    value[:, 1] = one[1]
    value[:, :2] += two[:2]
    return value


DEFERRED: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(6, 6),
    "linear without bias": lambda: nn.Linear(6, 6, bias=False),
    "convolution": lambda: nn.Conv1d(5, 5, 3, padding=1),
    "transposed convolution": lambda: nn.ConvTranspose1d(5, 5, 3, padding=1),
    "bilinear": lambda: _Function(
        lambda x, a, b: functional.bilinear(x.float(), x.float(), torch.stack([a, b, a, b, a, b]))
    ),
    "matmul": lambda: _Function(lambda x, a, b: x @ a @ b),
    "one weight twice": lambda: _Function(lambda x, a, b: (x @ a).tanh() @ a.t() @ a + x @ b),
    "einsum": lambda: _Function(lambda x, a, b: torch.einsum("nij,jk,kl->nil", x, a, b)),
    "made of weights": lambda: _Function(lambda x, a, b: (x @ (a * b).tanh()) @ (a + b) @ (a * b)),
    "weight norm": lambda: parametrizations.weight_norm(nn.Linear(6, 6)),
    "operator": lambda: _Function(
        lambda x, a, b: torch.ops.aten.linear.default(torch.ops.aten.linear(x, a), b)
    ),
    "weight first": lambda: _Function(lambda x, a, b: a @ x.transpose(1, 2)[:, :, :5] @ x @ b),
    "keywords, a list": lambda: _Function(
        lambda x, a, b: functional.linear(input=x, weight=torch.cat([a, b]))[..., 3:9]
    ),
    "rows joined": lambda: _Function(
        lambda x, a, b: torch.cat([x, a.expand(len(x), 6, 6)], 1) @ b
    ),
    "attention": _Attention,
    "transformer": lambda: nn.TransformerEncoderLayer(6, 2, 12, batch_first=True),
    "in place behind": lambda: nn.Sequential(nn.Linear(6, 6), nn.ReLU(inplace=True)),
    "random operation": lambda: _Function(
        lambda x, a, b: functional.scaled_dot_product_attention(x @ a, x, x, dropout_p=0.5) @ b
    ),
}
NOT_DEFERRED: dict[str, Callable[[], nn.Module]] = {
    "vectors": lambda: nn.Sequential(
        nn.LayerNorm(6), nn.RMSNorm(6), nn.BatchNorm1d(5), nn.PReLU()
    ),
    "custom function": lambda: _Function(lambda x, a, b: _Square.apply(x.float(), a)),
    "recurrent": _Recurrent,
    "in place": lambda: _Function(_in_place),
    "written into": lambda: _Function(_written),
    "view like a weight": lambda: _Function(
        lambda x, a, b: x[:, :1].expand(4, 5, 6).view_as(a[:5].expand(4, 5, 6)) * 2
    ),
    "checkpoint": lambda: _Function(
        lambda x, a, b: checkpoint(lambda y: torch.tanh(y @ a) @ b, x, use_reentrant=False)
    ),
    "checkpoint, reentrant": lambda: _Function(
        lambda x, a, b: checkpoint(lambda y: torch.tanh(y @ a) @ b, x, use_reentrant=True)
    ),
    "nothing of the input": lambda: _Function(lambda x, a, b: (x.detach() @ a) @ b),
    "input to itself": lambda: nn.Identity(),
}


def _rows(number: int) -> list[Tensor]:
    return [torch.randn(4, 5, 6, generator=torch.Generator().manual_seed(number))]


@pytest.mark.parametrize("name", [*DEFERRED, *NOT_DEFERRED])
@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_layers(name: str, autocast: torch.dtype | None) -> None:
    """Each kind of operation, alone between two others, under autocast as well."""
    torch.manual_seed(0)
    make = (DEFERRED | NOT_DEFERRED)[name]
    layers = [nn.Linear(6, 6), make(), nn.Tanh()]
    plain = trained(Halves(copy.deepcopy(layers), False, autocast=autocast), _rows)
    halves = Halves(copy.deepcopy(layers), True, autocast=autocast)
    check_equal(trained(halves, _rows), plain)


class _Passing(nn.Module):
    """Reads a table, and passes on what it makes of it; or multiplies by what is passed."""

    def __init__(self, *, reads: bool) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(6, 6) / 3)
        self.reads = reads

    def forward(self, value: Tensor, passed: Tensor | None = None) -> tuple[Tensor, ...]:
        if self.reads:
            copy = self.table.clone()
            return value + functional.embedding(torch.arange(5), copy), copy
        assert passed is not None
        return (value @ passed @ self.table,)


def test_what_another_layer_made_of_weights_is_an_activation() -> None:
    """As where a cut lies between the two layers: its gradient is one sum, in the first half."""
    torch.manual_seed(0)
    layers = [_Passing(reads=True), _Passing(reads=False)]
    plain = trained(Halves(copy.deepcopy(layers), False), _rows)
    halves = Halves(copy.deepcopy(layers), True)
    check_equal(trained(halves, _rows), plain)
    halves.forward(9, _rows(9))
    (first, second) = (sum_of(layer.table) for layer in halves.layers)
    assert first is not None
    assert second is not None
    before = first.clone(), second.clone()
    halves.first(9)
    assert not torch.equal(first, before[0])
    assert torch.equal(second, before[1])


@pytest.mark.parametrize("name", DEFERRED)
def test_matrices_wait(name: str) -> None:
    """No gradient of a matrix is there before the second half."""
    torch.manual_seed(0)
    halves = Halves([DEFERRED[name]()], True)
    halves.forward(0, _rows(0))
    halves.first(0)
    matrices = [p for p in halves.parameters() if p.dim() > 1 and p.shape[1] > 1]
    assert matrices
    assert not any(sum_of(matrix).any() for matrix in matrices)
    halves.second(0)
    assert any(sum_of(matrix).any() for matrix in matrices)


def test_hooks_run_once_per_microbatch() -> None:
    """Hooks of a weight that is used three times see one gradient, the sum; then the total."""
    seen: dict[bool, list[Tensor]] = {}
    for split in (False, True):
        torch.manual_seed(0)
        layer = DEFERRED["one weight twice"]()
        seen[split] = []
        layer.one.register_hook(lambda gradient, told=seen[split]: told.append(gradient.clone()))
        layer.one.register_post_accumulate_grad_hook(
            lambda leaf, told=seen[split]: told.append(leaf.grad.clone())
        )
        trained(Halves([layer], split), _rows)
        assert len(seen[split]) == 6
    check_equal(seen[True], seen[False])


def test_a_backward_in_a_forward_is_refused() -> None:
    """Its gradients would be taken for the stage's."""

    def energy(value: Tensor, one: Tensor, two: Tensor) -> Tensor:
        (slope,) = torch.autograd.grad((value @ one).square().sum(), value)
        return value + slope

    with pytest.raises(InnerBackwardError, match="split"):
        Halves([_Function(energy)], True).forward(0, _rows(0))


def test_what_weights_do_not_need_is_released() -> None:
    """Between the halves: input and gradient of each product, and no more."""
    layers = [nn.LayerNorm(64), nn.Linear(64, 64, bias=False), nn.GELU(), nn.Softmax(-1)]
    halves = Halves(layers, True)
    states = [t for p in halves.parameters() for t in (p, sum_of(p)) if t is not None]
    live = LiveBytes(states)
    base, size = live.live, 64 * 64 * 4
    with live:
        halves.forward(0, [torch.randn(64, 64)])
        saved = live.live - base
        halves.first(0)
        halves.arrived.clear()
        kept = live.live - base
        live.reset_peak()
        halves.second(0)
        assert live.peak - base == kept + size
    vectors = 2 * 64 * 4
    assert kept == 2 * size + vectors - vectors
    assert kept < saved
    assert live.live == base


def test_two_casts_of_one_weight_add_up_as_autocast_adds() -> None:
    """Uses of one cast add up in 16 bits, then go to the weight together."""
    layer = _Function(lambda x, a, b: (((x @ a) @ a) @ a).float() + x @ b)
    torch.manual_seed(0)
    plain, split = (
        trained(Halves([copy.deepcopy(layer)], s, autocast=torch.bfloat16), _rows)
        for s in (False, True)
    )
    check_equal(split, plain)
