"""Networks whose operator graphs benchmarks plan: toy GPTs with their loss, GPT2-large layers."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipeplan.devices import Device
from pipeplan.operator_graph import OperatorGraph, StorageKind
from pipeplan.remat.programs import judge, keep_all


class OneKernelDropout(nn.Module):
    """Dropout as a GPU runs it: one kernel, whose mask has a byte per element."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, value: Tensor) -> Tensor:
        """Same shape."""
        result: Tensor = torch.native_dropout(value, self.rate, True)[0]
        return result


class Attention(nn.Module):
    """Causal self-attention, kernel by kernel, or fused."""

    def __init__(
        self, width: int, heads: int, tokens: int, dropout: nn.Module, fused: bool
    ) -> None:
        super().__init__()
        self.heads, self.fused, self.drop = heads, fused, dropout
        self.all, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        mask = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, value: Tensor) -> Tensor:
        """Same shape."""
        batch, tokens, width = value.shape
        parts = self.all(value).split(width, dim=2)
        q, k, v = (
            each.view(batch, tokens, self.heads, width // self.heads).transpose(1, 2)
            for each in parts
        )
        if self.fused:
            mixed = functional.scaled_dot_product_attention(q, k, v, None, 0.0, True)
        else:
            scores = (q @ k.transpose(-2, -1)) * (width // self.heads) ** -0.5
            scores = scores.masked_fill(self.mask, float("-inf"))
            mixed = self.drop(scores.softmax(-1)) @ v
        result: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, tokens, width))
        return result


class Layer(nn.Module):
    """A pre-norm transformer layer."""

    def __init__(
        self, width: int, heads: int, tokens: int, dropout: nn.Module, fused: bool
    ) -> None:
        super().__init__()
        self.before, self.behind = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, tokens, dropout, fused)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.drop = dropout

    def forward(self, value: Tensor) -> Tensor:
        """Same shape."""
        value = value + self.drop(self.attention(self.before(value)))
        result: Tensor = value + self.drop(self.mlp(self.behind(value)))
        return result


class ToyGpt(nn.Module):
    """GPT d 256, 4 heads, T 128, explicit attention, dropout 0.1; its output is the loss."""

    def __init__(self, layers: int, width: int = 256, vocabulary: int = 1024) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(128, width)
        self.drop = nn.Dropout(0.1)
        self.layers = nn.Sequential(
            *(Layer(width, 4, 128, nn.Dropout(0.1), False) for _ in range(layers))
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: Tensor, wanted: Tensor) -> Tensor:
        """The loss."""
        return next_token_loss(self.logits(ids), wanted)

    def logits(self, ids: Tensor) -> Tensor:
        """Of the next tokens."""
        value = self.drop(self.tokens(ids) + self.places.weight[: ids.shape[1]])
        result: Tensor = self.head(self.norm(self.layers(value)))
        return result


def next_token_loss(logits: Tensor, wanted: Tensor) -> Tensor:
    """Cross entropy."""
    return functional.cross_entropy(logits.flatten(0, 1), wanted.flatten())


class ToyLogits(ToyGpt):
    """The same GPT without its loss."""

    def forward(self, ids: Tensor) -> Tensor:  # type: ignore[override]
        """Logits."""
        return self.logits(ids)


def toy(layers: int, batch: int = 4) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """A toy GPT and a micro-batch."""
    torch.manual_seed(0)
    ids = torch.randint(1024, (batch, 129))
    return ToyGpt(layers), (ids[:, :-1].contiguous(), ids[:, 1:].contiguous())


def large(layers: int, device: Device, fused: bool = False) -> OperatorGraph:
    """Layers of GPT2-large, 8 rows of 1024 tokens in bfloat16, without memory; roofline times.

    Fused attention has no dropout of its own.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    from pipeplan.operators import capture
    from pipeplan.rehearsal import estimated

    with FakeTensorMode(allow_non_fake_inputs=True):
        torch.set_default_dtype(torch.bfloat16)
        try:
            drop = OneKernelDropout(0.1)
            model = nn.Sequential(*(Layer(1280, 20, 1024, drop, fused) for _ in range(layers)))
        finally:
            torch.set_default_dtype(torch.float32)
        value = torch.zeros(8, 1024, 1280, dtype=torch.bfloat16, requires_grad=True)
        return estimated(model, capture(model, value), device).graph


def static_bytes(graph: OperatorGraph) -> int:
    """What is there all the time: parameters, buffers, states, gradients of parameters, inputs."""
    inputs = (each.bytes for each in graph.storages if each.kind is StorageKind.INPUT)
    return graph.static_bytes + sum(inputs)


def moving_bytes(graph: OperatorGraph) -> int:
    """What comes and goes at most with every operation once."""
    return judge(graph, keep_all(graph)).peak_bytes - static_bytes(graph)
