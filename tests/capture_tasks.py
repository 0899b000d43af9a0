"""Small tasks of different kinds, for the tests of capture."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

from pipeplan.task import Task


def sgd(parameters: Iterable[nn.Parameter]) -> Optimizer:
    """Momentum, one state tensor per weight."""
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adamw(parameters: Iterable[nn.Parameter]) -> Optimizer:
    """Two moments and a counter per weight."""
    return torch.optim.AdamW(parameters, lr=1e-3)


def next_token(logits: Tensor, target: Tensor) -> Tensor:
    """Mean cross entropy."""
    return functional.cross_entropy(logits.flatten(0, -2), target.flatten())


def rows(number: int, *shape: int) -> Tensor:
    """Normal random numbers of this shape, always the same ones."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(number))


def classes(number: int) -> Tensor:
    """Four of ten classes, always the same ones."""
    return torch.randint(10, (4,), generator=torch.Generator().manual_seed(number))


def tokens(microbatch: int) -> tuple[Tensor, Tensor]:
    """Two rows of 16 tokens of 64, and the ones that follow them: views of one tensor."""
    generator = torch.Generator().manual_seed(microbatch)
    window = torch.randint(64, (2, 17), generator=generator)
    return window[:, :-1], window[:, 1:]


def mlp(times: int = 2) -> Task:
    """Linear, ReLU, dropout, linear, GELU, so many times."""
    layers = [
        layer
        for _ in range(times)
        for layer in (
            nn.Linear(64, 128),
            nn.ReLU(),
            nn.Dropout(0.1),
            nn.Linear(128, 64),
            nn.GELU(),
        )
    ]
    return Task(
        model=nn.Sequential(*layers),
        loss=functional.mse_loss,
        optimizer=adamw,
        data=lambda number: (rows(number, 32, 64), rows(~number, 32, 64)),
    )


class Residual(nn.Module):
    """A convolution with batch norm and a skip inside."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(8, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)

    def forward(self, value: Tensor) -> Tensor:
        """Input plus what was learnt."""
        return value + functional.relu(self.norm(self.conv(value)))


def conv() -> Task:
    """Convolutions with batch norm, an in-place ReLU, pooling, flatten."""
    return Task(
        model=nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
            Residual(),
            Residual(),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
            nn.Linear(32, 10),
        ),
        loss=functional.cross_entropy,
        optimizer=sgd,
        data=lambda number: (rows(number, 4, 3, 16, 16), classes(number)),
    )


def transformer() -> Task:
    """An encoder layer of torch, in a list."""
    return Task(
        model=[
            nn.Embedding(64, 32),
            nn.LayerNorm(32),
            nn.TransformerEncoderLayer(32, 2, 64, batch_first=True),
            nn.Linear(32, 64),
        ],
        loss=next_token,
        optimizer=sgd,
        data=tokens,
    )


class Fork(nn.Module):
    """Passes a tensor on beside a new one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, skip: Tensor, value: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(the same tensor, a new one)."""
        return skip, torch.tanh(self.linear(skip if value is None else value))


class Join(nn.Module):
    """Adds what was passed on."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, skip: Tensor, value: Tensor) -> Tensor:
        """One tensor out of two."""
        return skip + self.linear(value)


def skips() -> Task:
    """A tensor passes over two layers."""
    return Task(
        model=[nn.Linear(8, 16), Fork(), Fork(), Join(), nn.ReLU(), nn.Linear(16, 1)],
        loss=functional.mse_loss,
        optimizer=sgd,
        data=lambda number: (rows(number, 32, 8), rows(~number, 32, 1)),
    )


def gpt2(*, tied: bool = False, dropout: float = 0.1, blocks: int = 3) -> Task:
    """Hugging Face's GPT-2."""
    import transformers

    config = transformers.GPT2Config(
        vocab_size=64,
        n_positions=32,
        n_embd=32,
        n_layer=blocks,
        n_head=2,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        tie_word_embeddings=tied,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = transformers.GPT2LMHeadModel(config).train()
    return Task(model=model, loss=next_token, optimizer=adamw, data=tokens)


def llama(*, blocks: int = 3) -> Task:
    """Hugging Face's Llama with grouped keys."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=blocks,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = transformers.LlamaForCausalLM(config).train()
    return Task(model=model, loss=next_token, optimizer=adamw, data=tokens)
