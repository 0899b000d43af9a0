"""Six families of models in miniature, as rows of layers: what pipelines must train exactly."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipeplan.split_model import SplitModel
from pipeplan.task import Task
from tests import pipelines

WIDTH, WORDS, LENGTH, ROWS = 8, 12, 6, 2


def _tokens(microbatch: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(microbatch)
    window = torch.randint(WORDS, (ROWS, LENGTH + 1), generator=generator)
    return window[:, :-1].contiguous(), window[:, 1:].contiguous()


def _images(microbatch: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(microbatch)
    images = torch.randn(ROWS + 1, 3, 8, 8, generator=generator)
    return images, torch.randint(4, (ROWS + 1,), generator=generator)


def _pairs(microbatch: int) -> tuple[Tensor, Tensor]:
    images, _ = _images(microbatch)
    return images, functional.avg_pool2d(images, 3, 1, 1)


def _next_word(logits: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), target.flatten())


class _Words(nn.Module):
    """Token and position embedding, dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.places = nn.Parameter(torch.randn(LENGTH, WIDTH) / 4)
        self.dropout = nn.Dropout(0.1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.dropout(self.words(ids) + self.places)


def _attend(query: Tensor, key: Tensor, value: Tensor, *, causal: bool) -> Tensor:
    heads = [x.unflatten(-1, (2, -1)).transpose(1, 2) for x in (query, key, value)]
    found = functional.scaled_dot_product_attention(*heads, is_causal=causal, dropout_p=0.1)
    return found.transpose(1, 2).flatten(2)


class _Block(nn.Module):
    """A transformer block; Llama's way has gates, RMS norms and rotated positions."""

    def __init__(self, *, causal: bool, llama: bool = False) -> None:
        super().__init__()
        norm: Callable[[int], nn.Module] = nn.RMSNorm if llama else nn.LayerNorm
        self.one, self.two = norm(WIDTH), norm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.gate = nn.Linear(WIDTH, 2 * WIDTH) if llama else None
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)
        self.causal, self.llama = causal, llama

    def forward(self, value: Tensor) -> Tensor:
        query, key, content = self.qkv(self.one(value)).chunk(3, -1)
        if self.llama:
            query, key = _rotate(query), _rotate(key)
        value = value + self.dropout(self.out(_attend(query, key, content, causal=self.causal)))
        wide = self.two(value)
        up = functional.gelu(self.up(wide))
        if self.gate is not None:
            up = functional.silu(self.gate(wide)) * self.up(wide)
        return value + self.dropout(self.down(up))


def _rotate(value: Tensor) -> Tensor:
    angle = torch.arange(value.shape[1])[:, None] / 10.0 ** torch.arange(WIDTH // 2)
    one, two = value.chunk(2, -1)
    cosine, sine = angle.cos(), angle.sin()
    return torch.cat([one * cosine - two * sine, one * sine + two * cosine], -1)


class _Start(nn.Module):
    """T5: behind the encoder, the decoder's own ids are fed; the memory rides along."""

    def __init__(self) -> None:
        super().__init__()
        self.words = _Words()

    def forward(self, memory: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        return self.words(ids.roll(1, 1)), memory


class _Decoder(nn.Module):
    """Self attention and attention to the encoder's output, which is passed on."""

    def __init__(self, *, last: bool = False) -> None:
        super().__init__()
        self.block = _Block(causal=True)
        self.query, self.both = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.last = last

    def forward(self, value: Tensor, memory: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        value = self.block(value)
        key, content = self.both(memory).chunk(2, -1)
        value = value + _attend(self.query(value), key, content, causal=False)
        return value if self.last else (value, memory)


class _Patches(nn.Module):
    """ViT: patches of an image as tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.cut = nn.Conv2d(3, WIDTH, 4, 4)

    def forward(self, image: Tensor) -> Tensor:
        return self.cut(image).flatten(2).transpose(1, 2)


class _Classify(nn.Module):
    """The mean over positions or pixels, normalized, then classes."""

    def __init__(self, over: tuple[int, ...]) -> None:
        super().__init__()
        self.over = over
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4)

    def forward(self, value: Tensor) -> Tensor:
        return self.head(self.norm(value.mean(self.over)))


class _Residual(nn.Module):
    """ResNet: convolution, batch norm, skip."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(WIDTH, WIDTH, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(WIDTH)

    def forward(self, value: Tensor) -> Tensor:
        return functional.relu(value + self.norm(self.convolution(value)), inplace=True)


class _Down(nn.Module):
    """U-Net: what goes down is kept for the way up, beside what was kept before."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(inputs, WIDTH, 3, padding=1)

    def forward(self, value: Tensor, *kept: Tensor) -> tuple[Tensor, ...]:
        value = torch.tanh(self.convolution(value))
        return functional.max_pool2d(value, 2), *kept, value


class _Up(nn.Module):
    """U-Net: joins the newest of what was kept."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(2 * WIDTH, outputs, 3, padding=1)

    def forward(self, value: Tensor, *kept: Tensor) -> Tensor | tuple[Tensor, ...]:
        *others, newest = kept
        value = torch.cat([functional.interpolate(value, scale_factor=2.0), newest], 1)
        value = self.convolution(value)
        return (value, *others) if others else value


def gpt2(*, tied: bool = False) -> tuple[SplitModel, Task]:
    """Embedding, blocks, norm and head."""
    blocks = [_Block(causal=True) for _ in range(5)]
    head = nn.Linear(WIDTH, WORDS, bias=False)
    layers = [_Words(), *blocks, nn.LayerNorm(WIDTH), head]
    if tied:
        head.weight = layers[0].words.weight
    return pipelines.split_by_hand(layers, "adamw", data=_tokens, loss=_next_word)


def gpt2_tied() -> tuple[SplitModel, Task]:
    """Head and embedding share their weight, on whichever ranks they are."""
    split, task = gpt2(tied=True)
    return split, replace(task, tied="synchronize")


def llama() -> tuple[SplitModel, Task]:
    """Gates, RMS norms, rotary positions that each block computes anew."""
    blocks = [_Block(causal=True, llama=True) for _ in range(5)]
    layers = [nn.Embedding(WORDS, WIDTH), *blocks, nn.RMSNorm(WIDTH), nn.Linear(WIDTH, WORDS)]
    return pipelines.split_by_hand(layers, "adamw", data=_tokens, loss=_next_word)


def t5() -> tuple[SplitModel, Task]:
    """Encoder, decoder; ids are fed to the decoder's start; all share the word embedding."""
    start, head = _Start(), nn.Linear(WIDTH, WORDS, bias=False)
    encoder = [_Words(), _Block(causal=False), _Block(causal=False)]
    decoder = [_Decoder(), _Decoder(), _Decoder(last=True)]
    start.words.words.weight = head.weight = encoder[0].words.weight
    layers = [*encoder, start, *decoder, head]
    split, task = pipelines.split_by_hand(layers, "adamw", data=_tokens, loss=_next_word, fed=[3])
    return split, replace(task, tied="synchronize")


def vit() -> tuple[SplitModel, Task]:
    """Patches, blocks, classes."""
    layers = [_Patches(), *(_Block(causal=False) for _ in range(6)), _Classify((1,))]
    return pipelines.split_by_hand(layers, "sgd", data=_images)


def resnet() -> tuple[SplitModel, Task]:
    """Residual blocks with batch norm and an activation in place."""
    stem = nn.Sequential(nn.Conv2d(3, WIDTH, 3, padding=1), nn.BatchNorm2d(WIDTH), nn.ReLU())
    layers = [stem, *(_Residual() for _ in range(5)), nn.Dropout2d(0.1), _Classify((2, 3))]
    return pipelines.split_by_hand(layers, "sgd", data=_images)


def unet() -> tuple[SplitModel, Task]:
    """Three levels down, three up: up to four tensors at a boundary."""
    down = [_Down(3), _Down(WIDTH), _Down(WIDTH)]
    bottom = _Bottom()
    layers = [*down, bottom, _Up(WIDTH), _Up(WIDTH), _Up(WIDTH), nn.Conv2d(WIDTH, 3, 1)]
    return pipelines.split_by_hand(layers, "adamw", data=_pairs, loss=functional.mse_loss)


class _Bottom(nn.Module):
    """U-Net: works on what came down; the rest rides along."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(WIDTH, WIDTH, 3, padding=1)
        self.dropout = nn.Dropout(0.1)

    def forward(self, value: Tensor, *kept: Tensor) -> tuple[Tensor, ...]:
        return self.dropout(torch.relu(self.convolution(value))), *kept


FAMILIES: dict[str, Callable[[], tuple[SplitModel, Task]]] = {
    "GPT-2": gpt2,
    "GPT-2, tied": gpt2_tied,
    "Llama": llama,
    "T5": t5,
    "ViT": vit,
    "ResNet": resnet,
    "U-Net": unet,
}


def make(family: str) -> tuple[SplitModel, Task]:
    """A model of eight layers, always with the same weights, clipped by its global norm."""
    torch.manual_seed(11)
    split, task = FAMILIES[family]()
    assert len(split.layers) == 8
    return split, replace(task, clip_norm=0.2)
