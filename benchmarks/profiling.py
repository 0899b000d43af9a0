"""How well measured profiles repeat, and what an estimated one costs.

    python -m benchmarks.profiling

Each task is profiled several times, each time in a process of its own; the table shows the largest
difference of total times between two runs, beside the noise that the profiles saw. The last line
estimates a Llama of 7 billion parameters.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from itertools import pairwise

TASKS = ("examples/mlp.py:task", "examples/gpt2_stdlib.py:task", "pipeplan.tasks:resnet")
LLAMA = "pipeplan.tasks:llama(size='7b', dtype='bfloat16')"

_MEASURE = """
import json, sys
from pipeplan.capture import profile
chain = profile(sys.argv[1])
total = sum(layer.forward_ns + layer.backward_ns for layer in chain.layers)
sizes = [value for layer in chain.layers for name, value in layer if name.endswith("_bytes")]
print(json.dumps([total, sizes, chain.device["noise"]]))
"""
_ESTIMATE = """
import json, resource, sys, time
begin = time.perf_counter()
from pipeplan.capture import estimate
from pipeplan.devices import find_device
chain = estimate(sys.argv[1], find_device("h100"))
used = resource.getrusage(resource.RUSAGE_SELF)
weights = sum(layer.weight_bytes for layer in chain.layers)
seconds = time.perf_counter() - begin
print(json.dumps([seconds, used.ru_utime + used.ru_stime, used.ru_maxrss * 1024, weights]))
"""


def run(code: str, reference: str) -> list[float]:
    """What `code` prints for a task, in a process of its own."""
    command = [sys.executable, "-c", code, reference]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: list[float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--runs", type=int, default=4, help="profiles of each task (4)")
    runs = parser.parse_args().runs
    print("| task | total time, ms | differences of neighbours | noise | bytes |")
    print("|---|---|---|---|---|")
    for reference in TASKS:
        found = [run(_MEASURE, reference) for _ in range(runs)]
        totals = [one[0] for one in found]
        steps = ", ".join(f"{abs(b / a - 1):.1%}" for a, b in pairwise(totals))
        times = ", ".join(f"{total / 1e6:.2f}" for total in totals)
        noise = ", ".join(f"{one[2]:.0%}" for one in found)
        same = "equal" if all(one[1] == found[0][1] for one in found) else "DIFFER"
        print(f"| `{reference}` | {times} | {steps} | {noise} | {same} |", flush=True)
    seconds, cpu, resident, weights = run(_ESTIMATE, LLAMA)
    print(
        f"\n{LLAMA}: {seconds:.1f} s ({cpu:.1f} s of processor), {resident / 2**30:.2f} GiB"
        f" of memory, {weights:.0f} bytes of weights"
    )


if __name__ == "__main__":
    main()
