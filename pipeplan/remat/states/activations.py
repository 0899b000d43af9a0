"""What forwards and backwards hold on the device beside parameters and optimizer states.

S_t and A_t of X. Zhao's thesis, (4.16) and section 4.5.1, with what an operation takes while it
runs and the gradients of parameters. Activations that wait on the host leave during the step
behind their forward and come back during the one before their backward.
"""

from __future__ import annotations

from pipeplan.remat.states.problem import StateProblem


def leaving_step(problem: StateProblem, block: int) -> int:
    """The step during which the activations of a block leave."""
    del problem
    return block + 1


def returning_step(problem: StateProblem, block: int) -> int:
    """The step during which the activations of a block come back."""
    return problem.steps - 2 - block


def device_bytes(problem: StateProblem, step: int) -> tuple[int, dict[tuple[int, int], int]]:
    """Bytes of a step: those of all plans, and those by block and option."""
    count = len(problem.blocks)
    running = problem.block_of(step)
    forward = step < count
    blocks = problem.blocks
    read = running + 1 if forward or running == count - 1 else running
    always = problem.input_bytes + sum(each.output_bytes for each in blocks[:read])
    if not forward:
        always += blocks[running].gradient_bytes
        always += blocks[running - 1].gradient_bytes if running else 0
        always += sum(_gradients(problem, step))
    by_option: dict[tuple[int, int], int] = {}
    for b in range(running + 1):
        here = step in (b, leaving_step(problem, b), returning_step(problem, b))
        here = here or step == problem.steps - 1 - b
        for o, option in enumerate(blocks[b].options):
            size = option.kept_bytes + (option.offloaded_bytes if here else 0)
            if b == running:
                workspaces = option.forward_workspace_bytes, option.backward_workspace_bytes
                size += workspaces[0 if forward else 1]
                if option.keeps_output and not forward and b < count - 1:
                    size += blocks[b].output_bytes
            by_option[b, o] = size
    if not forward:
        least = min(size for (b, _), size in by_option.items() if b == running)
        always += _more_for_updates(problem, step, least)
    return always, by_option


def _more_for_updates(problem: StateProblem, step: int, given_up: int) -> int:
    """What updates behind a backward may take beyond all that is given up before them.

    Args:
        problem: where the updates are.
        step: the backward.
        given_up: the least bytes of its block, with what it takes while it runs.
    """
    running = problem.block_of(step)
    before = problem.blocks[running - 1] if running else None
    given_up += problem.blocks[running].gradient_bytes
    if before is not None and not any(option.keeps_output for option in before.options):
        given_up += before.output_bytes
    workspaces = [
        tensor.update_workspace_bytes
        for group in problem.groups
        if problem.last_gradient(group) == step and not group.on_host
        for tensor in group.tensors
    ]
    return max(0, max(workspaces, default=0) - given_up)


def _gradients(problem: StateProblem, step: int) -> list[int]:
    """Of parameters, in a backward: what the step makes, beside what earlier ones made."""
    found = []
    for group in problem.groups:
        users = [problem.steps - 1 - block for block in group.blocks]
        first, last = users[-1], users[0]
        if first <= step <= last:
            made = step in users
            found.append(group.trained_bytes * (1 + (made and step > first)))
    return found
