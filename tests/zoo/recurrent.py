"""Recurrent networks."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from tests.zoo.architecture import (
    LENGTH,
    WORDS,
    Architecture,
    classes,
    mask,
    supervised,
)

WIDTH, HEADS = 16, 4


def words(number: int) -> tuple[Tensor, Tensor]:
    """Ids and the ids behind them."""
    window = classes(number, WORDS, LENGTH + 1)
    return window[:, :-1], window[:, 1:]


def labelled(number: int) -> tuple[Tensor, Tensor]:
    """Ids and one class."""
    return classes(number, WORDS, LENGTH), classes(number + 7, 5)


def next_word(logits: Tensor, target: Tensor) -> Tensor:
    """Of (rows, positions, words)."""
    return cross_entropy(logits.flatten(0, 1), target.flatten())


class Recurrent(nn.Module):
    """A language model of LSTM, GRU or RNN layers."""

    def __init__(self, kind: type[nn.RNNBase], *, both: bool = False) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.inner = kind(WIDTH, WIDTH, num_layers=2, batch_first=True, bidirectional=both)
        self.again = kind(2 * WIDTH if both else WIDTH, WIDTH, batch_first=True)
        self.out = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        value, _ = self.inner(self.words(ids))
        return self.out(self.again(value)[0])


class PackedLayer(nn.LSTM):
    """A module that packs what it is given."""

    def forward(self, value: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(value, lengths, batch_first=True, enforce_sorted=False)
        return pad_packed_sequence(
            super().forward(packed)[0], batch_first=True, total_length=LENGTH
        )[0]


class Packed(nn.Module):
    """An LSTM over sequences of different lengths, packed."""

    def __init__(self, *, apart: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.inner = (PackedLayer if apart else nn.LSTM)(WIDTH, WIDTH, batch_first=True)
        self.out = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 5))

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        value = self.words(ids)
        if isinstance(self.inner, PackedLayer):
            made = self.inner(value, lengths)
        else:
            packed = pack_padded_sequence(value, lengths, batch_first=True, enforce_sorted=False)
            made, _ = pad_packed_sequence(
                self.inner(packed)[0], batch_first=True, total_length=LENGTH
            )
        return self.out(made.sum(1) / lengths[:, None])


def packed_words(number: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Ids and lengths, classes."""
    ids, target = labelled(number)
    return (ids, mask(number).sum(1)), target


class Cells(nn.Module):
    """A GRU cell step by step, which reads its own output (no teacher)."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.words, self.cell = nn.Embedding(WORDS, WIDTH), nn.GRUCell(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        state = self.encoder(self.words(ids))[1][0]
        last, found = ids[:, 0], []
        for _ in range(6):
            state = self.cell(self.words(last), state)
            found.append(self.out(state))
            last = found[-1].argmax(-1)
        return torch.stack(found, 1)


def first_words(logits: Tensor, target: Tensor) -> Tensor:
    """Against as many words as there are logits."""
    return next_word(logits, target[:, : logits.shape[1]])


RECURRENT = (
    Architecture("lstm language model", supervised(partial(Recurrent, nn.LSTM), next_word, words)),
    Architecture(
        "gru, both directions", supervised(partial(Recurrent, nn.GRU, both=True), next_word, words)
    ),
    Architecture("elman rnn", supervised(partial(Recurrent, nn.RNN), next_word, words)),
    Architecture(
        "lstm over packed sequences",
        supervised(partial(Packed, apart=False), cross_entropy, packed_words),
        "packed in a module of its own",
        supervised(partial(Packed, apart=True), cross_entropy, packed_words),
    ),
    Architecture("gru cell that reads its own output", supervised(Cells, first_words, words)),
)
