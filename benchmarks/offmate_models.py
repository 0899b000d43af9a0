"""Llama2-7B on one consumer GPU, as section 4.8 of X. Zhao's thesis trains it.

Sizes of parameters are those of the published model. The thesis gives bytes of activations, one
time and the machine's speeds; how its time spreads over layers follows operations per layer.
"""

from __future__ import annotations

from dataclasses import dataclass

from pipeplan.remat.states.problem import (
    DeviceAndHost,
    ParameterGroup,
    StateBlock,
    StateBlockOption,
    StateProblem,
    StateTensor,
)

GIB = 2**30
WIDTH, FEED_FORWARD, HEADS, VOCABULARY, LAYERS = 4096, 11008, 32, 32000, 32
BATCH, LENGTH = 4, 512
VALUE = 4
"""Bytes of a number in 32 bits."""
ACTIVATIONS = int(40.8 * GIB)
"""Table 4.2, of the whole model; the thesis counts 6.7 billion parameters of 4 bytes as 25 GB."""
WITHOUT_LIMITS = 13.1 / 1.203
"""Seconds of a step without limits: table 4.2, time over overhead."""
MEMORY_SPEED = 0.75 * 360e9
"""Bytes per second of operations that only move: three quarters of an RTX 3060's 360 GB/s."""
RTX_3060 = DeviceAndHost(
    device_bytes=10 * GIB,
    host_bytes=128 * 10**9,
    bandwidth=10_400_000_000,
    device_update=16_600_000_000,
    host_update=1_100_000_000,
    management_ns=50_000_000,
)
"""Table 4.2 and section 4.8: 12 GB less the 2 GB that the thesis leaves; H of section 4.8.2."""
RTX_4080 = DeviceAndHost(
    device_bytes=14 * GIB,
    host_bytes=128 * 10**9,
    bandwidth=2 * RTX_3060.bandwidth,
    device_update=2 * RTX_3060.device_update,
    host_update=RTX_3060.host_update,
    management_ns=RTX_3060.management_ns,
)
"""Figure 4.9: 16 GB less 2, twice the bandwidth. The rest is not told: the device's updates take
half the time, as its memory is twice as fast (717 GB/s); the host is taken for the same."""


@dataclass(frozen=True)
class Llama:
    """The model at a batch size.

    Attributes:
        batch: sequences of 512 tokens.
        layers: transformer layers.
        products: how much faster than an RTX 3060 the device multiplies.
        moves: how much faster it reads and writes its memory.
    """

    batch: int = BATCH
    layers: int = LAYERS
    products: float = 1.0
    moves: float = 1.0

    @property
    def tokens(self) -> int:
        """Of a batch."""
        return self.batch * LENGTH

    @property
    def hidden(self) -> int:
        """Bytes of a layer's output."""
        return self.tokens * WIDTH * VALUE

    @property
    def scores(self) -> int:
        """Bytes of the attention's probabilities of a layer."""
        return self.batch * HEADS * LENGTH * LENGTH * VALUE

    @property
    def inner(self) -> int:
        """Bytes of one tensor inside of the feed-forward part."""
        return self.tokens * FEED_FORWARD * VALUE

    @property
    def logits(self) -> int:
        """Bytes of the last product."""
        return self.tokens * VOCABULARY * VALUE

    def problem(self, machine: DeviceAndHost = RTX_3060, offload: bool = True) -> StateProblem:
        """The model on a machine; `offload`: whether activations may wait on the host."""
        dear = self._dear(machine) if offload else 0
        layers = [self._layer(number, dear) for number in range(self.layers)]
        blocks = (self._embedding(), *layers, self._head())
        groups = [ParameterGroup("embedding", (_table("embed_tokens"),), (0,))]
        groups += [
            ParameterGroup(f"layer {number}", _layer_tensors(number), (number + 1,))
            for number in range(self.layers)
        ]
        head = (_table("lm_head"), _tensor("norm", WIDTH))
        groups.append(ParameterGroup("head", head, (self.layers + 1,)))
        name = f"Llama2 of {self.layers} layers, batch {self.batch} x {LENGTH}"
        return StateProblem(blocks, tuple(groups), machine, 2, self.tokens * 8, name)

    def _moving_ns(self, size: int) -> int:
        """Time of operations that only move that many bytes."""
        return int(size / (MEMORY_SPEED * self.moves) * 1e9)

    def _product_ns(self, operations: int) -> int:
        return int(operations / (_operations_per_second() * self.products) * 1e9)

    def _embedding(self) -> StateBlock:
        time = self._moving_ns(2 * self.hidden)
        option = StateBlockOption("keep", time, time, 0)
        return StateBlock("embedding", (option,), self.hidden, self.hidden)

    def _dear(self, machine: DeviceAndHost) -> int:
        """Bytes of a layer that are copied rather than made again (section 4.4).

        Of products, those that take longer than their copy out and back: queries, keys, values
        and the attention's output product; both inner tensors.
        """
        made = {self.hidden: (4, WIDTH * WIDTH), self.inner: (2, WIDTH * FEED_FORWARD)}
        return sum(
            count * size
            for size, (count, weights) in made.items()
            if self._product_ns(2 * self.tokens * weights) > 2e9 * size / machine.bandwidth
        )

    def _layer(self, number: int, dear: int) -> StateBlock:
        """Section 4.4's three options; two where nothing is `dear`."""
        forward = self._product_ns(self.layer_operations)
        kept = self._kept
        gradients = max(3 * self.inner, 2 * self.scores)
        moved = 15 * self.hidden + 8 * self.inner + 6 * self.scores
        again = self._moving_ns(moved) + self._product_ns(self._attention_operations)
        options = [
            StateBlockOption("keep", forward, 2 * forward, kept, 0, self.scores, gradients),
            StateBlockOption(
                "recompute",
                forward,
                3 * forward,
                0,
                0,
                max(2 * self.scores + 3 * self.hidden, 3 * self.inner),
                kept + gradients,
            ),
        ]
        if dear:
            options.append(
                StateBlockOption(
                    "offload",
                    forward,
                    2 * forward + again,
                    0,
                    dear,
                    max(2 * self.scores, self.inner),
                    kept - dear + gradients,
                )
            )
        return StateBlock(f"layer {number}", tuple(options), self.hidden, self.hidden)

    @property
    def _kept(self) -> int:
        """What a layer keeps inside: the thesis's sum, without boundaries and the head."""
        whole = ACTIVATIONS * self.batch // BATCH
        return (whole - (LAYERS + 3) * self.hidden - 2 * self.logits) // LAYERS

    @property
    def _attention_operations(self) -> int:
        return 4 * self.batch * LENGTH * LENGTH * WIDTH

    @property
    def layer_operations(self) -> int:
        """Of a layer's forward."""
        products = 2 * self.tokens * (4 * WIDTH * WIDTH + 3 * WIDTH * FEED_FORWARD)
        return products + self._attention_operations

    def _head(self) -> StateBlock:
        forward = self._product_ns(2 * self.tokens * WIDTH * VOCABULARY)
        kept = 2 * self.hidden + 2 * self.logits
        options = (
            StateBlockOption("keep", forward, 2 * forward, kept, 0, 0, self.logits),
            StateBlockOption("recompute", forward, 3 * forward, 0, 0, 2 * self.logits, kept),
        )
        return StateBlock("head", options, VALUE, VALUE)


def _table(name: str) -> StateTensor:
    return _tensor(name, VOCABULARY * WIDTH)


def _tensor(name: str, values: int) -> StateTensor:
    return StateTensor(name, values * VALUE)


def _layer_tensors(number: int) -> tuple[StateTensor, ...]:
    square, inner = WIDTH * WIDTH, WIDTH * FEED_FORWARD
    sizes = {
        "q_proj": square,
        "k_proj": square,
        "v_proj": square,
        "o_proj": square,
        "gate_proj": inner,
        "up_proj": inner,
        "down_proj": inner,
        "input_norm": WIDTH,
        "post_attention_norm": WIDTH,
    }
    return tuple(_tensor(f"layer {number} {name}", size) for name, size in sizes.items())


def _operations_per_second() -> float:
    """What makes the full model's step on the RTX 3060 the thesis's."""
    llama = Llama()
    values = LAYERS * sum(each.bytes for each in _layer_tensors(0)) + 2 * _table("").bytes
    update = values / RTX_3060.device_update
    whole = 3 * (LAYERS * llama.layer_operations + 2 * llama.tokens * WIDTH * VOCABULARY)
    lookup = 4 * llama.hidden / MEMORY_SPEED
    return whole / (WITHOUT_LIMITS - update - lookup)
