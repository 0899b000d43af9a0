"""Images, signals and grids: convolutions, batch norm, skips, generators."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import cross_entropy, mse_loss
from torch.nn.utils import parametrizations

from tests.zoo.architecture import SIDE, Architecture, classes, floats, supervised

WIDTH = 8


def pictures(number: int) -> tuple[Tensor, Tensor]:
    """Images and classes."""
    return floats(number, 3, SIDE, SIDE), classes(number, 10)


def block(inside: int, outside: int, stride: int = 1) -> nn.Sequential:
    """Convolution, batch norm, activation in place."""
    return nn.Sequential(
        nn.Conv2d(inside, outside, 3, stride, 1, bias=False),
        nn.BatchNorm2d(outside),
        nn.ReLU(inplace=True),
    )


class GoogLeNetOutputs(NamedTuple):
    """Of three heads."""

    logits: Tensor
    first: Tensor
    second: Tensor


class GoogLeNet(nn.Module):
    """Parallel branches and two auxiliary heads while it trains (Szegedy et al. 2015)."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = block(3, WIDTH, 2)
        self.branches = nn.ModuleList(
            nn.ModuleList([nn.Conv2d(2 * WIDTH if i else WIDTH, WIDTH, k, padding=k // 2)
                           for k in (1, 3)]) for i in range(3)
        )  # fmt: skip
        self.heads = nn.ModuleList(nn.Linear(2 * WIDTH, 10) for _ in range(3))

    def forward(self, images: Tensor) -> GoogLeNetOutputs | Tensor:
        value, found = self.stem(images), []
        for branches, head in zip(self.branches, self.heads, strict=True):
            value = functional.relu(torch.cat([branch(value) for branch in branches], 1))
            found.append(head(value.mean((2, 3))))
        return GoogLeNetOutputs(found[2], found[0], found[1]) if self.training else found[2]


def with_auxiliary(outputs: GoogLeNetOutputs, target: Tensor) -> Tensor:
    """Heads in the middle count for less."""
    inner = cross_entropy(outputs.first, target) + cross_entropy(outputs.second, target)
    return cross_entropy(outputs.logits, target) + 0.3 * inner


class Pyramid(nn.Module):
    """Maps of three sizes as a list, each with a score (deep supervision)."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(
            [block(3, WIDTH, 2), block(WIDTH, WIDTH, 2), block(WIDTH, WIDTH, 2)]
        )
        self.side = nn.ModuleList(nn.Conv2d(WIDTH, WIDTH, 1) for _ in range(3))
        self.score = nn.Conv2d(WIDTH, 1, 3, padding=1)

    def forward(self, images: Tensor) -> list[Tensor]:
        maps, value = [], images
        for down in self.down:
            value = down(value)
            maps.append(value)
        top, found = None, []
        for each, side in zip(reversed(maps), self.side, strict=True):
            top = (
                side(each)
                if top is None
                else side(each) + functional.interpolate(top, scale_factor=2)
            )
            found.append(self.score(top))
        return found


def deep_supervision(found: list[Tensor], target: Tensor) -> Tensor:
    """Each map against the target in its size."""
    sizes = [functional.interpolate(target, size=each.shape[2:]) for each in found]
    return sum(mse_loss(one, other) for one, other in zip(found, sizes, strict=True))


class Adversary(nn.Module):
    """A generator whose images a fixed discriminator judges: one half of a GAN's step."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(
            nn.Linear(16, WIDTH * 64),
            nn.Unflatten(1, (WIDTH, 8, 8)),
            nn.ConvTranspose2d(WIDTH, WIDTH, 4, 2, 1),
            nn.BatchNorm2d(WIDTH),
            nn.ReLU(),
            nn.ConvTranspose2d(WIDTH, 3, 4, 2, 1),
            nn.Tanh(),
        )
        self.judge = discriminator().requires_grad_(False)

    def forward(self, noise: Tensor) -> Tensor:
        return self.judge(self.generator(noise))


def discriminator() -> nn.Sequential:
    """Spectral norms and leaky activations."""
    return nn.Sequential(
        parametrizations.spectral_norm(nn.Conv2d(3, WIDTH, 4, 2, 1)),
        nn.LeakyReLU(0.2, inplace=True),
        parametrizations.spectral_norm(nn.Conv2d(WIDTH, WIDTH, 4, 2, 1)),
        nn.LeakyReLU(0.2, inplace=True),
        nn.Flatten(),
        parametrizations.spectral_norm(nn.Linear(WIDTH * 64, 1)),
    )


def judged(logits: Tensor, target: Tensor) -> Tensor:
    """Real or not."""
    return functional.binary_cross_entropy_with_logits(logits, target)


class ConvNeXtBlock(nn.Module):
    """Depthwise convolution, norm of the last dimension, scale by a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(WIDTH, WIDTH, 7, padding=3, groups=WIDTH)
        self.norm, self.scale = nn.LayerNorm(WIDTH), nn.Parameter(torch.full((WIDTH,), 0.1))
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, value: Tensor) -> Tensor:
        made = self.norm(self.depthwise(value).permute(0, 2, 3, 1))
        made = self.scale * self.narrow(functional.gelu(self.wide(made)))
        return value + made.permute(0, 3, 1, 2)


class WaveNet(nn.Module):
    """Dilated causal convolutions with gates and skips (van den Oord et al. 2016)."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv1d(1, WIDTH, 1)
        self.gates = nn.ModuleList(nn.Conv1d(WIDTH, 2 * WIDTH, 2, dilation=2**i) for i in range(4))
        self.outs = nn.ModuleList(nn.Conv1d(WIDTH, 2 * WIDTH, 1) for _ in range(4))
        self.last = nn.Conv1d(WIDTH, 1, 1)

    def forward(self, wave: Tensor) -> Tensor:
        value, skips = self.first(wave), []
        for number, (gate, out) in enumerate(zip(self.gates, self.outs, strict=True)):
            one, two = gate(functional.pad(value, (2**number, 0))).chunk(2, 1)
            more, skip = out(torch.tanh(one) * torch.sigmoid(two)).chunk(2, 1)
            value = value + more
            skips.append(skip)
        return self.last(functional.relu(torch.stack(skips).sum(0)))


class Fourier(nn.Module):
    """Complex weights on the lowest frequencies (Li et al. 2021)."""

    def __init__(self) -> None:
        super().__init__()
        self.lift, self.project = nn.Conv1d(1, WIDTH, 1), nn.Conv1d(WIDTH, 1, 1)
        shape = (WIDTH, WIDTH, 6)
        self.spectra = nn.ParameterList(torch.randn(shape, dtype=torch.cfloat) / 8 for _ in "123")
        self.local = nn.ModuleList(nn.Conv1d(WIDTH, WIDTH, 1) for _ in "123")

    def forward(self, value: Tensor) -> Tensor:
        value = self.lift(value)
        for spectrum, local in zip(self.spectra, self.local, strict=True):
            modes = torch.fft.rfft(value)
            kept = torch.zeros_like(modes)
            kept[..., :6] = torch.einsum("bix,iox->box", modes[..., :6], spectrum)
            value = functional.gelu(torch.fft.irfft(kept, n=value.shape[-1]) + local(value))
        return self.project(value)


class SuperResolution(nn.Module):
    """Sub-pixel convolutions and a global residual (Shi et al. 2016)."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, WIDTH, 5, padding=2), nn.PReLU(), nn.Conv2d(WIDTH, WIDTH, 3, padding=1),
            nn.PReLU(), nn.Conv2d(WIDTH, 12, 3, padding=1), nn.PixelShuffle(2),
        )  # fmt: skip

    def forward(self, small: Tensor) -> Tensor:
        return self.body(small) + functional.interpolate(small, scale_factor=2, mode="bilinear")


def sequence_of(*parts: nn.Module) -> nn.Sequential:
    """A classifier of images."""
    return nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(WIDTH, 10))


def waves(number: int) -> tuple[Tensor, Tensor]:
    """A signal and the same one step on."""
    wave = floats(number, 1, 65)
    return wave[..., :-1], wave[..., 1:]


def videos(number: int) -> tuple[Tensor, Tensor]:
    """Eight frames and a class."""
    return floats(number, 3, 8, 16, 16), classes(number, 10)


def noise(number: int) -> tuple[Tensor, Tensor]:
    """Noise that shall be judged as real."""
    return floats(number, 16), torch.ones(2, 1)


def real(number: int) -> tuple[Tensor, Tensor]:
    """Images, one real and one not."""
    return floats(number, 3, SIDE, SIDE), torch.tensor([[1.0], [0.0]])


def small_images(number: int) -> tuple[Tensor, Tensor]:
    """A small image and a larger one."""
    return floats(number, 3, 16, 16), floats(number + 100, 3, SIDE, SIDE)


CONVOLUTIONAL = (
    Architecture(
        "vgg, a sequential with batch norm",
        supervised(
            lambda: sequence_of(
                block(3, WIDTH, 2), block(WIDTH, WIDTH), nn.MaxPool2d(2), block(WIDTH, WIDTH)
            ),
            cross_entropy,
            pictures,
        ),
    ),
    Architecture(
        "googlenet with auxiliary heads", supervised(GoogLeNet, with_auxiliary, pictures)
    ),
    Architecture(
        "feature pyramid, a list of maps",
        supervised(
            Pyramid,
            deep_supervision,
            lambda n: (floats(n, 3, SIDE, SIDE), floats(n, 1, SIDE, SIDE)),
        ),
    ),
    Architecture(
        "convnext blocks",
        supervised(
            lambda: sequence_of(nn.Conv2d(3, WIDTH, 4, 4), ConvNeXtBlock(), ConvNeXtBlock()),
            cross_entropy,
            pictures,
        ),
    ),
    Architecture(
        "gan, generator before a fixed discriminator", supervised(Adversary, judged, noise)
    ),
    Architecture("gan, discriminator with spectral norm", supervised(discriminator, judged, real)),
    Architecture("wavenet", supervised(WaveNet, mse_loss, waves)),
    Architecture("fourier neural operator, complex weights", supervised(Fourier, mse_loss, waves)),
    Architecture(
        "super-resolution, pixel shuffle", supervised(SuperResolution, mse_loss, small_images)
    ),
    Architecture(
        "video, 3d convolutions",
        supervised(
            lambda: nn.Sequential(
                nn.Conv3d(3, WIDTH, 3, 2, 1),
                nn.GroupNorm(2, WIDTH),
                nn.ReLU(),
                nn.Conv3d(WIDTH, WIDTH, 3, 2, 1),
                nn.Flatten(),
                nn.Linear(WIDTH * 32, 10),
            ),
            cross_entropy,
            videos,
        ),
    ),
    Architecture(
        "channels last",
        supervised(
            lambda: sequence_of(block(3, WIDTH, 2), block(WIDTH, WIDTH)).to(
                memory_format=torch.channels_last
            ),
            cross_entropy,
            lambda n: (pictures(n)[0].to(memory_format=torch.channels_last), pictures(n)[1]),
        ),
    ),
)
