"""Graph networks, with adjacency in all forms."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from tests.zoo.architecture import Architecture, classes, floats, supervised

WIDTH, NODES = 16, 20


def mlp(inside: int, outside: int, wide: int = 32) -> nn.Sequential:
    """Two linear layers."""
    return nn.Sequential(nn.Linear(inside, wide), nn.GELU(), nn.Linear(wide, outside))


def rows(number: int) -> tuple[Tensor, Tensor]:
    """Features and classes."""
    return floats(number, WIDTH), classes(number, 5)


def same(number: int) -> tuple[Tensor, None]:
    """No target."""
    return floats(number, WIDTH), None


def adjacency() -> Tensor:
    """A ring with chords, normalised, as a sparse matrix."""
    here = torch.arange(NODES)
    there = torch.cat([(here + 1) % NODES, (here * 3) % NODES, here])
    pairs = torch.stack([here.repeat(3), there])
    return torch.sparse_coo_tensor(
        pairs, torch.full((3 * NODES,), 1 / 3), (NODES, NODES)
    ).coalesce()


class GraphNet(nn.Module):
    """Two graph convolutions (Kipf, Welling 2017)."""

    def __init__(self, *, own: bool = False) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 5)
        if own:
            self.register_buffer("edges", adjacency())

    def forward(self, nodes: Tensor, edges: Tensor | None = None) -> Tensor:
        edges = self.edges if edges is None else edges
        value = torch.relu(torch.sparse.mm(edges, self.one(nodes)))
        return torch.sparse.mm(edges, self.two(value))


class EdgeNet(GraphNet):
    """The same, its matrix given as indices and values."""

    def forward(self, nodes: Tensor, pairs: Tensor, values: Tensor) -> Tensor:
        return super().forward(nodes, torch.sparse_coo_tensor(pairs, values, (NODES, NODES)))


class Messages(nn.Module):
    """Messages along edges, added up where they end (Gilmer et al. 2017)."""

    def __init__(self) -> None:
        super().__init__()
        self.message, self.update, self.out = (
            mlp(2 * WIDTH, WIDTH),
            nn.GRUCell(WIDTH, WIDTH),
            nn.Linear(WIDTH, 5),
        )

    def forward(self, nodes: Tensor, pairs: Tensor) -> Tensor:
        for _ in range(2):
            here, there = pairs
            sent = self.message(torch.cat([nodes[here], nodes[there]], -1))
            nodes = self.update(torch.zeros_like(nodes).index_add(0, there, sent), nodes)
        return self.out(nodes)


def nodes(number: int) -> Tensor:
    """Features of all nodes."""
    return floats(number, NODES, WIDTH)[0]


def kinds(number: int) -> Tensor:
    """Classes of all nodes."""
    return classes(number, 5, NODES)[0]


GRAPHS = (
    Architecture(
        "graph convolution, sparse adjacency as input",
        supervised(GraphNet, cross_entropy, lambda n: ((nodes(n), adjacency()), kinds(n))),
        "indices and values as two tensors",
        supervised(
            EdgeNet,
            cross_entropy,
            lambda n: ((nodes(n), adjacency().indices(), adjacency().values()), kinds(n)),
        ),
    ),
    Architecture(
        "graph convolution, sparse adjacency as buffer",
        supervised(lambda: GraphNet(own=True), cross_entropy, lambda n: (nodes(n), kinds(n))),
    ),
    Architecture(
        "message passing along edges",
        supervised(
            Messages, cross_entropy, lambda n: ((nodes(n), adjacency().indices()), kinds(n))
        ),
    ),
)
