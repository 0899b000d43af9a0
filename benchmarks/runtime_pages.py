"""Pages of results on the executor: sleeping layers beside an ideal executor and beside torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.markdown import table


def runtime(found: dict[str, Any]) -> Iterator[str]:
    """The executor beside an ideal one and beside torch's."""
    yield "# The executor's speed"
    yield (
        "The command `python -m benchmarks.runtime` puts the executor on sleeping layers beside an"
        " ideal one (`replay`: makespan over that of an executor without any cost, with the limit"
        " it must keep) and beside `torch.distributed.pipelining` on the same work in the same"
        " run,"
        f" best of three. {_machine(found)}"
    )

    head = ("ranks x stages", "op", "replay", "at most", "torch's replay")
    rows = (
        (
            f"{each['ranks']} x {each['stages_per_rank']}",
            f"{each['forward_ms']} ms",
            _number(each["replay"]),
            _number(each["replay_limit"]),
            _number(each["torch_replay"]),
            _number(each["steady"]),
            _number(each["2bw"]),
        )
        for each in found["cases"]
    )
    yield table((*head, "torch's step / ours, steady", "2BW / torch's flush"), rows)
    costs = ", ".join(f"{value:.1f} us on {n} ranks" for n, value in found["dispatch_us"].items())
    yield f"All actions of one round in one process cost {costs} of CPU beside their messages."


def steps(found: dict[str, Any]) -> Iterator[str]:
    """Step plans beside torch's zero-bubble schedules."""
    yield "# Whole steps of sleeping layers"
    yield (
        "The command `python -m benchmarks.runtime_steps` runs step plans of the planner on layers"
        " that sleep: forward, gradient of the input and gradient of the weight equally long, two"
        " layers a rank, 16 micro-batches a step. `planned`: the planned step over the sleeps of a"
        " rank, with what a layer takes beside them (`pipeplan profile`: it copies and multiplies"
        " a little, slowly behind a sleep) and what an action costs (`pipeplan"
        " calibrate`). `measured`: the measured step over the planned one, `aim`: what we want."
        " Then the steps of `torch.distributed.pipelining` on the same sleeps in the same run over"
        f" ours. Best of six steps each. {_machine(found)}"
    )
    rivals = list(found["cases"][0]["torch"])
    rows = (
        (
            str(each["ranks"]),
            f"{each['forward_ms']} ms",
            f"{each['overhead_us']:.0f} us",
            *(_number(each[name]) for name in ("ideal", "step", "limit")),
            *(_number(each["torch"][name]) for name in rivals),
        )
        for each in found["cases"]
    )
    head = ("ranks", "sleep", "an action", "planned", "measured", "aim")
    yield table((*head, *(f"torch's {name} / ours" for name in rivals)), rows)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _machine(found: dict[str, Any]) -> str:
    host = found["host"]
    return (
        f"{host['cores']} cores ({host['machine']}), torch {host['torch']}, load average"
        f" {host['load'][0]:.1f}."
    )
