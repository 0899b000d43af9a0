"""`torchrun --nproc-per-node P -m pipeplan.calibrate --memory 16GiB -o cluster.json`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pipeplan import interrupts

if TYPE_CHECKING:
    from pathlib import Path

_TIMEOUT_NS = 120 * 10**9


def main(argv: Sequence[str] | None = None) -> int:
    """Measure on one rank; rank 0 writes the file. Returns the exit code."""
    speaks = interrupts.is_first_rank()
    return interrupts.exit_code_of("calibrate", lambda: _checked(argv), speaks=speaks)


def _checked(argv: Sequence[str] | None) -> int:
    import argparse
    from pathlib import Path

    from pipeplan.errors import PipeplanError
    from pipeplan.heap import give_back_large_blocks
    from pipeplan.units import parse_bytes

    parser = argparse.ArgumentParser(
        prog="torchrun --nproc-per-node P -m pipeplan.calibrate",
        description="Measure links and per-action overhead; write a cluster file.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--memory", required=True, metavar="SIZE", help="of each GPU, not measured"
    )
    parser.add_argument("-o", "--output", required=True, type=Path, metavar="FILE")
    args = parser.parse_args(argv)
    give_back_large_blocks(os.environ)  # as a run does, whose actions are measured
    try:
        memory = parse_bytes(args.memory, "--memory")
        _check_output(args.output)
        _measure(memory, args.output)
    except PipeplanError as error:
        if interrupts.is_first_rank():
            print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def _check_output(path: Path) -> None:
    """Refuse a file that exists, or could not be written after the work."""
    from pipeplan.errors import InputError

    if path.exists():
        raise InputError(f"{path}: exists and is not overwritten. Choose another file.")
    if not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise InputError(
            f"{path}: need a file in a folder that can be written to. Check the path."
        )


def _measure(memory_bytes: int, output: Path) -> None:
    import torch

    from pipeplan.calibrate import links, overhead
    from pipeplan.cluster import Cluster, Gpu
    from pipeplan.runtime.startup.process_group import join
    from pipeplan.runtime.transport.torchrun_env import TorchrunEnv
    from pipeplan.units import format_ns
    from pipeplan.whole_file import replace

    torch.set_num_threads(1)
    place = TorchrunEnv.of(os.environ)
    transport = join(place, _TIMEOUT_NS)
    measured = links.combine(links.measure_links(transport))
    cost_ns = overhead.measure_overhead(transport)
    if transport.rank == 0:
        gpus = tuple(Gpu(name=f"rank{i}", memory_bytes=memory_bytes) for i in range(place.size))
        cluster = Cluster(gpus=gpus, action_overhead_ns=cost_ns, links=measured)
        replace(output, cluster.to_json())
        rate = measured.bandwidth_bytes_per_s
        print(
            f"latency {format_ns(measured.latency_ns)},"
            f" bandwidth {f'{rate / 1e9:.2f} GB/s' if rate else 'inf'},"
            f" overhead per action {format_ns(cost_ns)}: {output}",
            file=sys.stderr,
        )
    transport.close()


if __name__ == "__main__":
    interrupts.leave(main())
