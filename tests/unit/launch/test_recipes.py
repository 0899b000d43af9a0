"""Recipes of launch/: what they start is what torchrun and the launcher understand."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

from pipeplan.launch import options

ROOT = Path(__file__).parents[3]


def understood(words: list[str]) -> dict[str, object]:
    """The arguments of torchrun, whose module is the launcher, which takes what follows."""
    found = get_args_parser().parse_args(words)
    assert found.module
    assert found.training_script == "pipeplan.launch"
    options.parser().parse_args(found.training_script_args)
    return vars(found)


def test_kubernetes() -> None:
    """Pods, ranks and GPUs agree; ranks meet at the first pod, which the service names."""
    yaml = pytest.importorskip("yaml")
    text = (ROOT / "launch" / "kubernetes.yaml").read_text(encoding="utf-8")
    service, job = yaml.safe_load_all(text)
    pod = job["spec"]["template"]["spec"]
    (ranks,) = pod["containers"]
    assert ranks["command"] == ["torchrun"]
    given = understood(ranks["args"])
    pods = {job["spec"]["completions"], job["spec"]["parallelism"], int(str(given["nnodes"]))}
    assert len(pods) == 1
    assert ranks["resources"]["limits"]["nvidia.com/gpu"] == int(str(given["nproc_per_node"]))
    job_name, place = job["metadata"]["name"], service["metadata"]["name"]
    assert pod["subdomain"] == place
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": job_name}
    (port,) = service["spec"]["ports"]
    assert given["rdzv_endpoint"] == f"{job_name}-0.{place}:{port['port']}"


def test_slurm(tmp_path: Path) -> None:
    """The script with SLURM's commands as they answer: a dry run first, then srun torchrun."""
    log = tmp_path / "log"
    for name, does in (
        ("scontrol", 'echo "node7"; echo "node8"'),
        ("python", f'echo "python $@" >> {log}'),
        ("srun", f'echo "$@" >> {log}'),
    ):
        stub = tmp_path / name
        stub.write_text(f"#!/bin/sh\n{does}\n")
        stub.chmod(0o755)
    environ = os.environ | {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SLURM_JOB_NODELIST": "node[7-8]",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_ID": "31",
        "RANKS_PER_NODE": "4",
    }
    script = ROOT / "launch" / "slurm.sh"
    words = ["plan.json", "--steps", "3", "--out", "run"]
    bash = shutil.which("bash")
    assert bash is not None
    subprocess.run([bash, script, *words], env=environ, check=True, timeout=60)
    dry, started = log.read_text().splitlines()
    assert dry == f"python -m pipeplan.launch --plan {' '.join(words)} --dry-run"
    program, *rest = started.split()
    assert program == "torchrun"
    given = understood(rest)
    assert given["rdzv_endpoint"] == "node7:29400"
    assert (given["nnodes"], given["nproc_per_node"]) == ("2", "4")


def test_local(tmp_path: Path) -> None:
    """As many ranks as the dry run says, whatever the task prints before."""
    log = tmp_path / "log"
    for name, does in (
        ("torchrun", f'echo "$@" >> {log}'),
        ("python", f'echo "9 ranks: of the task"; echo "4 ranks: flush, ..";echo "$@" >> {log}'),
    ):
        stub = tmp_path / name
        stub.write_text(f"#!/bin/sh\n{does}\n")
        stub.chmod(0o755)
    words = ["plan.json", "--replicas", "2", "--json"]
    bash = shutil.which("bash")
    assert bash is not None
    environ = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    subprocess.run([bash, ROOT / "launch" / "local.sh", *words], env=environ, check=True)
    dry, started = log.read_text().splitlines()
    assert dry == f"-m pipeplan.launch --plan {' '.join(words)} --dry-run"
    assert understood(started.split())["nproc_per_node"] == "4"
