"""Calibrating with processes of this machine, started by torchrun."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from pipeplan.cluster import Cluster
from pipeplan.errors import RankError


def measure_here(ranks: int, memory_bytes: int) -> Cluster:
    """The cluster that `ranks` processes on this machine form.

    Args:
        ranks: processes, one per GPU of the cluster.
        memory_bytes: what each may use; not measured.

    Raises:
        RankError: if the processes fail; the message ends with what they said.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "cluster.json"
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", str(ranks), "-m", "pipeplan.calibrate"),
            *("--memory", str(memory_bytes), "-o", str(file)),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode or not file.exists():
            said = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
            raise RankError(
                f"calibrate: {ranks} processes failed: {(said or done.stderr.splitlines())[-1:]}."
                f" Run it by hand: {' '.join(command[1:-1])} cluster.json"
            )
        return Cluster.read(file)
