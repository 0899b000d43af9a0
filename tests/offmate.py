"""Small steps of training whose states do not fit the device."""

from __future__ import annotations

from random import Random

from pipeplan.remat.states.problem import (
    DeviceAndHost,
    ParameterGroup,
    StateBlock,
    StateBlockOption,
    StateProblem,
    StateTensor,
)

G = 10**9
"""Bytes, and ns, of most things here."""


def step_of_training(
    blocks: int = 4,
    device: int = 45,
    host: int = 1000,
    bandwidth: int = 20,
    host_update: int | None = 4,
    management_s: float = 0.0,
) -> StateProblem:
    """Equal blocks of three tensors; sizes in 10^9 bytes, speeds in 10^9 bytes a second."""

    def options(last: bool) -> tuple[StateBlockOption, ...]:
        found = (
            StateBlockOption("keep", G, 2 * G, 8 * G, 0, G, 2 * G),
            StateBlockOption("recompute", G, 3 * G, 0, 0, G, 10 * G),
            StateBlockOption("offload", G, 2 * G, 0, 8 * G, G, 2 * G),
        )
        return found[:2] if last else found

    made = tuple(StateBlock(f"b{b}", options(b == blocks - 1), G, G) for b in range(blocks))
    groups = tuple(
        ParameterGroup(
            f"w{b}",
            tuple(StateTensor(f"w{b}.{n}", size * G) for n, size in enumerate((3, 2, 1))),
            (b,),
        )
        for b in range(blocks)
    )
    machine = DeviceAndHost(
        device * G,
        host * G,
        bandwidth * G,
        20 * G,
        None if host_update is None else host_update * G,
        int(management_s * G),
    )
    return StateProblem(made, groups, machine, 2, G)


def random_step(seed: int) -> StateProblem:
    """Unequal blocks; tensors that are frozen, and some that two blocks share."""
    random = Random(seed)
    count = random.randint(2, 5)
    blocks = []
    for b in range(count):
        kept = random.randint(1, 9)
        forward, backward = random.randint(1000, 5000), random.randint(1000, 9000)
        options = [
            StateBlockOption(
                "keep", forward, backward, kept, 0, random.randint(0, 3), 1, random.random() < 0.3
            ),
            StateBlockOption("recompute", forward, forward + backward, 0, 0, 1, kept + 1),
        ]
        if b < count - 1:
            options.append(StateBlockOption("offload", forward, backward, 0, kept, 1, 1))
        boundary = random.randint(1, 3)
        blocks.append(StateBlock(f"b{b}", tuple(options), boundary, boundary))
    groups = []
    for b in range(count):
        tensors = tuple(
            StateTensor(
                f"w{b}.{n}", random.randint(1, 9), random.random() < 0.8, random.choice((0, 0, 14))
            )
            for n in range(random.randint(1, 4))
        )
        users = {b, random.randrange(count)} if random.random() < 0.3 else {b}
        groups.append(ParameterGroup(f"w{b}", tensors, tuple(sorted(users))))
    machine = DeviceAndHost(
        10**6,
        10**6,
        random.randint(1, 8) * G // 1000,
        random.randint(5, 20) * G // 1000,
        random.choice((None, random.randint(1, 5) * G // 1000)),
        random.choice((0, 500)),
    )
    return StateProblem(tuple(blocks), tuple(groups), machine, random.randint(0, 2), 2)
