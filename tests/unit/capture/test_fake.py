"""Mode fake: the bytes of a measured profile to the byte, without memory or computing."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn, optim
from torch.nn import functional

from pipeplan.capture import estimate, estimate_task, profile_task, split
from pipeplan.capture.fake_tensors.fake_model import weightless, weightless_twin
from pipeplan.capture.layer_costs import layer_bytes
from pipeplan.capture.layer_costs.layer_run import LayerRun
from pipeplan.capture.layer_costs.layer_timer import gradient_buffers
from pipeplan.capture.measurement.task_profile import LayerMeasurements, measure_layers
from pipeplan.chain import Chain, Layer
from pipeplan.devices import find_device
from pipeplan.errors import InputError
from pipeplan.task import Task
from tests import forked_commands, grids
from tests.capture_tasks import adamw, conv, gpt2, llama, mlp, sgd, skips, transformer
from tests.captured import captured

ROOT = Path(__file__).parents[3]
H100 = find_device("h100")
SHORT = partial(gpt2, blocks=1)


def bytes_of(chain: Chain | LayerMeasurements) -> list[dict[str, object]]:
    """Everything a chain says about its layers, but times."""
    fields = [name for name in Layer.model_fields if not name.endswith("_ns")]
    return [{name: getattr(layer, name) for name in fields} for layer in chain.layers]


@grids.first(5, make=[mlp, conv, transformer, partial(gpt2, blocks=2), skips, llama])
def test_bytes_are_those_of_a_measured_profile(make: Callable[[], Task]) -> None:
    """Weights, gradients, optimizer states, saved, working and boundary bytes: all equal."""
    torch.manual_seed(0)
    task = make()
    real = profile_task(task, repeats=1, warmup=0)
    fake = estimate_task(task, H100)
    assert bytes_of(fake) == bytes_of(real)
    assert fake.task_digest == real.task_digest
    assert fake.input_bytes == real.input_bytes


@pytest.mark.parametrize("kind", ["groups", "adagrad"])
@pytest.mark.parametrize("on_meta", [False, True])
def test_optimizers_know_parameters_by_identity(kind: str, on_meta: bool) -> None:
    """Layers of one shape with other options, and state that is made at once."""
    rows = torch.ones(4, 6)

    def made() -> Task:
        layers = [nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6)]
        heads = set(layers[2].parameters())

        def groups(parameters: Iterable[nn.Parameter]) -> optim.Optimizer:
            each = [{"params": [p], "momentum": 0.9 * (p in heads)} for p in parameters]
            return optim.SGD(each, lr=0.1)

        optimizer = groups if kind == "groups" else optim.Adagrad
        return replace(mlp(), model=layers, optimizer=optimizer, data=lambda _: (rows, rows))

    with weightless() if on_meta else nullcontext():
        task = made()
    assert not isinstance(task.model, nn.Module)
    kept = [
        (each, each.data_ptr(), each.device) for each in nn.ModuleList(task.model).parameters()
    ]
    assert bytes_of(estimate_task(task, H100)) == bytes_of(
        profile_task(made(), repeats=1, warmup=0)
    )
    assert all(each.data_ptr() == at and each.device == place for each, at, place in kept)


def test_two_profiles_agree_in_bytes() -> None:
    """Measuring twice gives the same bytes, although dropout draws other numbers."""
    model, task = captured(SHORT)
    first, second = (
        measure_layers(model, task, repeats=repeats, warmup=repeats - 1, say=lambda _: None)
        for repeats in (1, 2)
    )
    assert bytes_of(first) == bytes_of(second)


class Odd(nn.Module):
    """Calls a function on its input and its submodules."""

    def __init__(self, function: Callable[..., Tensor], *parts: nn.Module) -> None:
        super().__init__()
        self.function, self.parts = function, nn.ModuleList(parts)

    def forward(self, value: Tensor) -> Tensor:
        """What the function says."""
        return self.function(value, *self.parts)


def checkpointed(value: Tensor, part: nn.Module) -> Tensor:
    """`part`, computed again in its backward."""
    result: Tensor = torch.utils.checkpoint.checkpoint(part, value, use_reentrant=False)
    return result


def attend(value: Tensor, **options: object) -> Tensor:
    """Attention of a value to itself, in four heads."""
    heads = value.unflatten(-1, (4, 8)).transpose(1, 2)
    return functional.scaled_dot_product_attention(heads, heads, heads, **options)  # type: ignore[arg-type]


ROWS = torch.ones(2, 16, 32)
IMAGE = torch.ones(4, 8, 16, 16)
KINDS: dict[str, tuple[nn.Module, Tensor]] = {
    "strided convolution": (nn.Conv2d(8, 16, 3, stride=2), IMAGE),
    "grouped convolution": (nn.Conv2d(8, 8, 3, groups=8), IMAGE),
    "transposed convolution": (nn.ConvTranspose2d(8, 4, 2, stride=2), IMAGE),
    "group norm": (nn.GroupNorm(2, 8), IMAGE),
    "instance norm": (nn.InstanceNorm2d(8, affine=True, track_running_stats=True), IMAGE),
    "max pooling": (nn.MaxPool2d(3, stride=2, padding=1), IMAGE),
    "adaptive pooling": (nn.AdaptiveAvgPool2d(3), IMAGE),
    "upsampling": (nn.Upsample(scale_factor=2, mode="bilinear"), IMAGE),
    "gated recurrence": (Odd(lambda x, m: m(x)[0], nn.GRU(32, 16)), ROWS),
    "attention weights": (
        Odd(lambda x, m: m(x, x, x)[0], nn.MultiheadAttention(32, 4, dropout=0.1)),
        ROWS,
    ),
    "attention with dropout": (Odd(lambda x: attend(x, dropout_p=0.1)), ROWS),
    "causal attention": (Odd(lambda x: attend(x, is_causal=True)), ROWS),
    "checkpoint": (Odd(checkpointed, nn.Sequential(nn.Linear(32, 64), nn.GELU())), ROWS),
    "bfloat16": (nn.Linear(32, 8).bfloat16(), ROWS.bfloat16()),
    "half-precision attention": (Odd(lambda x: attend(x, is_causal=True)), ROWS.bfloat16()),
    "squared error": (Odd(lambda x: functional.mse_loss(x, x.sin())), ROWS),
    "smooth error": (Odd(lambda x: functional.smooth_l1_loss(x, x.sin())), ROWS),
    "binary entropy": (
        Odd(lambda x: functional.binary_cross_entropy(x.sigmoid(), x.detach().sigmoid())),
        ROWS,
    ),
    "margin": (Odd(lambda x: functional.soft_margin_loss(x, x.detach().sign())), ROWS),
}


@pytest.mark.parametrize("kind", KINDS)
def test_kernels_keep_what_fake_ones_keep(kind: str) -> None:
    """One layer of many kinds each: fake bytes are real bytes."""
    layer, source = KINDS[kind]
    tail = Odd(lambda x, m: m(x.flatten().float()[:1].expand(4)), nn.Linear(4, 1))
    task = Task(
        model=[nn.Identity(), layer, tail],
        loss=lambda output, _: output.sum(),
        optimizer=sgd,
        data=lambda _: (source, source),
    )
    assert bytes_of(estimate_task(task, H100)) == bytes_of(profile_task(task, repeats=1, warmup=0))


def test_known_exceptions_are_told() -> None:
    """What a kernel keeps beyond its shapes is not guessed in silence."""
    recurrent = Odd(lambda x, m: m(x)[0], nn.LSTM(32, 1))
    task = Task(
        model=[recurrent, nn.Linear(1, 1)],
        loss=functional.l1_loss,
        optimizer=sgd,
        data=lambda _: (ROWS, ROWS[..., :1]),
    )
    lines: list[str] = []
    chain = estimate_task(task, H100, lines.append)
    assert chain.device["inexact_bytes"] == "aten.mkldnn_rnn_layer"
    assert any("mkldnn_rnn_layer" in line for line in lines)


def test_task_is_not_touched() -> None:
    """The user's model keeps its own real parameters, without gradients."""
    task = conv()
    assert isinstance(task.model, nn.Module)
    before = {name: value.clone() for name, value in task.model.state_dict().items()}
    estimate_task(task, H100)
    for name, value in task.model.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert all(parameter.grad is None for parameter in task.model.parameters())


def test_weightless_models_are_split_like_real_ones() -> None:
    """A model made without memory has the digest that `launch` will compare with."""
    for make in (conv, partial(llama, blocks=1)):
        with weightless():
            twin, _ = weightless_twin(make())
        assert split(twin, evaluates=False).digest() == split(make()).digest()


def test_weightless_parameters_survive_what_tasks_do_to_models() -> None:
    """Casts change the type, moves change nothing, buffers stay real."""
    with weightless():
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        model.to("cpu", torch.float64).to(torch.bfloat16).cpu()
        nn.init.normal_(model[0].weight)
    assert model[0].weight.is_meta
    assert model[0].weight.dtype == torch.bfloat16
    assert isinstance(model[1].running_mean, Tensor)
    assert model[1].running_mean.device.type == "cpu"
    assert not nn.Linear(2, 2).weight.is_meta


def test_blocks_that_differ_are_not_taken_for_equal() -> None:
    """Same modules, but one block drops, one recomputes, one is frozen: each has its own bytes."""

    def block() -> nn.Module:
        return nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16))

    blocks = [block() for _ in range(6)]
    blocks[2] = Odd(lambda x, m: functional.dropout(m(x), 0.1), blocks[2])
    blocks[3] = Odd(checkpointed, blocks[3])
    blocks[4].requires_grad_(False)
    task = Task(
        model=blocks,
        loss=functional.mse_loss,
        optimizer=sgd,
        data=lambda _: (torch.ones(8, 16), torch.ones(8, 16)),
    )
    lines: list[str] = []
    fake = estimate_task(task, H100, lines.append)
    assert bytes_of(fake) == bytes_of(profile_task(task, repeats=1, warmup=0))
    # The first has an input that needs no gradient, the last one the loss.
    assert any("6 of 6 layers differ" in line for line in lines)
    assert len({layer.saved_bytes for layer in fake.layers[1:5]}) == 4


def test_equal_blocks_are_examined_once() -> None:
    """Of many equal layers one is examined, beside the first (no gradient) and the last (loss)."""
    task = Task(
        model=[nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(12)],
        loss=functional.mse_loss,
        optimizer=sgd,
        data=lambda _: (torch.ones(8, 16), torch.ones(8, 16)),
    )
    lines: list[str] = []
    estimate_task(task, H100, lines.append)
    assert any("3 of 12 layers differ" in line for line in lines)


def test_frozen_weights_have_neither_gradient_nor_state() -> None:
    """LoRA: only the small matrices are trained, and frozen ones keep no input."""

    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = nn.Linear(32, 32).requires_grad_(False)
            self.down = nn.Linear(32, 2, bias=False)
            self.up = nn.Linear(2, 32, bias=False)

        def forward(self, value: Tensor) -> Tensor:
            return self.base(value) + self.up(self.down(value))

    task = Task(
        model=[Adapted(), Adapted()],
        loss=functional.mse_loss,
        optimizer=adamw,
        data=lambda _: (torch.ones(8, 32), torch.ones(8, 32)),
    )
    real = profile_task(task, repeats=1, warmup=0)
    assert bytes_of(estimate_task(task, H100)) == bytes_of(real)
    trained, frozen = 2 * 2 * 32 * 4, (32 * 32 + 32) * 4
    for layer in real.layers:
        assert layer.weight_bytes == layer.gradient_bytes == trained
        assert layer.optimizer_bytes == 2 * trained + 2 * 4 + frozen


def test_gradients_have_the_type_of_their_weights() -> None:
    """A bfloat16 module has gradients and moments of half the size."""
    model = nn.Sequential(nn.Linear(16, 16).bfloat16(), nn.Linear(16, 16).bfloat16())
    rows = torch.ones(8, 16, dtype=torch.bfloat16)
    task = Task(
        model=model, loss=functional.mse_loss, optimizer=adamw, data=lambda _: (rows, rows)
    )
    real = profile_task(task, repeats=1, warmup=0)
    assert bytes_of(estimate_task(task, H100)) == bytes_of(real)
    size = (16 * 16 + 16) * 2
    assert [layer.weight_bytes for layer in real.layers] == [size, size]
    assert [layer.gradient_bytes for layer in real.layers] == [size, size]
    assert real.layers[0].optimizer_bytes == 2 * size + 2 * 4
    assert real.layers[0].output_gradient_bytes is None


def test_models_that_look_at_values_are_told_to_measure() -> None:
    """Control flow on data has no answer without data."""
    picky = Odd(lambda x, m: m(x) if x.sum() > 0 else x, nn.Linear(16, 16))
    task = Task(
        model=[nn.Linear(16, 16), picky],
        loss=functional.mse_loss,
        optimizer=sgd,
        data=lambda _: (torch.ones(8, 16), torch.ones(8, 16)),
    )
    with pytest.raises(InputError, match=r"layer '1:Odd'.*only shapes.*--mode measured"):
        estimate_task(task, H100)


LLAMA = """
import torch
import transformers
from pipeplan.task import Task

def task(blocks):
    config = transformers.LlamaConfig(
        vocab_size=32000, hidden_size=4096, intermediate_size=11008, num_hidden_layers=blocks
    )
    ids = torch.arange(2048).reshape(1, 2048)
    return Task(
        model=transformers.LlamaForCausalLM(config).train().to(torch.bfloat16),
        loss=lambda logits, target: torch.nn.functional.cross_entropy(logits[0], target[0]),
        optimizer=lambda parameters: torch.optim.AdamW(parameters),
        data=lambda _: (ids, ids),
    )
"""
MEASURE = """
import resource, sys
import torch._dynamo, transformers
from pipeplan.capture import estimate
from pipeplan.devices import find_device
imported = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
chain = estimate(sys.argv[1], find_device("h100"))
used = resource.getrusage(resource.RUSAGE_SELF)
print(sum(layer.weight_bytes for layer in chain.layers), chain.mode)
print((used.ru_maxrss - imported) * 1024, used.ru_utime + used.ru_stime)
"""


@grids.first(1, blocks=[1, 32])
def test_blocks_of_llama_7b_take_neither_memory_nor_time(tmp_path: Path, blocks: int) -> None:
    """Up to 27 GB of weights before their cast: profiled exactly, in 650 MB beside imports.

    All 32 blocks in 3 minutes.
    """
    file = tmp_path / "large.py"
    file.write_text(LLAMA, encoding="utf-8")
    command = forked_commands.client().command("-c", MEASURE, f"{file}:task(blocks={blocks})")
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    weights, mode, resident, seconds = done.stdout.split()
    assert int(weights) == 2 * (262_148_096 + blocks * 202_383_360)
    assert mode == "estimated"
    assert int(resident) < 650 * 10**6
    assert blocks < 32 or float(seconds) < 180


SMALL = """
import torch
from torch import nn
from pipeplan.task import Task

def task():
    return Task(
        model=nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)),
        loss=nn.functional.mse_loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters),
        data=lambda _: (torch.ones(1, 8), torch.ones(1, 8)),
    )
"""


def test_estimate_names_its_task(tmp_path: Path) -> None:
    """The chain names task, seed, device and that its times are estimates."""
    file = tmp_path / "own.py"
    file.write_text(SMALL, encoding="utf-8")
    chain = estimate(f"{file}:task", H100, seed=3)
    assert chain.task == f"{file}:task"
    assert chain.name == "own:task"
    assert chain.mode == "estimated"
    assert chain.source.startswith("estimated for h100")
    assert chain.device["device"] == "h100"
    assert chain.device["seed"] == 3
    assert all(layer.forward_ns and layer.backward_ns for layer in chain.layers)
    assert Chain.from_json(chain.to_json()) == chain


def test_layers_that_return_no_tensors_are_refused() -> None:
    """Mode fake says the same as a measured profile of a layer that returns something else."""
    wrong = Odd(lambda value: {"value": value})  # type: ignore[arg-type,return-value]
    task = Task(
        model=[nn.Linear(4, 4), wrong],
        loss=functional.mse_loss,
        optimizer=sgd,
        data=lambda _: (torch.ones(2, 4), torch.ones(2, 4)),
    )
    for look in (lambda: estimate_task(task, H100), lambda: profile_task(task)):
        with pytest.raises(InputError, match=r"layer '1:Odd': returned a dict, need a tensor"):
            look()


def test_models_that_cannot_be_copied_are_refused() -> None:
    """A model holding what Python cannot copy is told to be measured."""
    model = nn.Sequential(nn.Linear(4, 4))
    model.rows = (row for row in ())  # type: ignore[assignment]
    with pytest.raises(InputError, match="cannot be copied"):
        weightless_twin(Task(model=model, loss=functional.mse_loss, optimizer=sgd, data=print))  # type: ignore[arg-type]


def test_one_layer_measured_alone_is_left_without_gradients() -> None:
    """Gradient buffers live as long as they are needed."""
    layer = nn.Linear(4, 4)
    run = LayerRun(name="x", layer=layer, inputs=(torch.ones(2, 4),), differentiable=(True,))
    with gradient_buffers([layer]):
        first = layer_bytes.measure_bytes(run)
        assert layer_bytes.measure_bytes(run) == first
    assert layer.weight.grad is None
