"""How long the planner takes to find and prove the examples of paper 002, section 4.

Each is the golden test of the same name in tests/golden, run from its file, which asserts the
periods, their proofs and those of the contiguous plans beside them; some plan twice or more. CPU
seconds, of all threads: other work on the machine hardly stretches them.

    python -m benchmarks.paper_examples

prints a table and writes benchmarks/results/paper_examples.json.
"""

from __future__ import annotations

import json
import os
import platform
import runpy
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

RESULT = Path(__file__).parent / "results" / "paper_examples.json"
_FILE = Path(__file__).parents[1] / "tests" / "golden" / "test_paper_examples_planner.py"
_GOLDEN = runpy.run_path(str(_FILE))
EXAMPLES: dict[str, Callable[[], None]] = {
    "section 4.2.1, (1, 2, 1)": _GOLDEN["test_chain_121"],
    **{f"theorem 1, k = {k}": partial(_GOLDEN["test_theorem_1"], k) for k in (2, 3, 4, 5)},
    "lemma 2": _GOLDEN["test_lemma_2"],
    **{f"lemma 3, {gpus} GPUs": partial(_GOLDEN["test_lemma_3"], gpus) for gpus in (3, 4)},
    "figure 4": _GOLDEN["test_figure_4"],
    "figure 5": _GOLDEN["test_figure_5"],
}


def main() -> int:
    """Time each once, after one that loads the solver; 1 if one takes a second or more."""
    _GOLDEN["test_chain_121"]()
    seconds: dict[str, float] = {}
    for name, example in EXAMPLES.items():
        begin = time.process_time()
        example()
        seconds[name] = round(time.process_time() - begin, 4)
        print(f"{name:24} {seconds[name]:8.4f} CPU s")
    machine = {"python": platform.python_version(), "cores": os.cpu_count()}
    RESULT.write_text(json.dumps({"machine": machine, "cpu_seconds": seconds}, indent=1) + "\n")
    return int(max(seconds.values()) >= 1)


if __name__ == "__main__":
    sys.exit(main())
