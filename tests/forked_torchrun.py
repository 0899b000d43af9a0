"""torchrun whose ranks are forked from it: all import torch, in seconds, once.

`python forked_torchrun.py FLAGS -m MODULE WORDS..`, or a script in place of `-m MODULE`. It is
torch's own agent, with a function to run in place of a command. A process that forks must not have
begun to compute; this one has only imported.
"""

from __future__ import annotations

import runpy
import sys
import uuid
from pathlib import Path

import torch._dynamo
import torch.distributed.checkpoint.filesystem  # noqa: F401
from torch.distributed.launcher.api import elastic_launch
from torch.distributed.run import config_from_args, parse_args

from pipeplan import Pipeline, capture  # noqa: F401
from pipeplan.launch import train  # noqa: F401


def rank(is_module: bool, script: str, words: list[str]) -> None:
    """What one rank runs."""
    sys.argv = [script, *words]
    try:
        if is_module:
            sys.path[0] = str(Path.cwd())
            runpy.run_module(script, run_name="__main__", alter_sys=True)
        else:
            sys.path[0] = str(Path(script).parent)
            runpy.run_path(script, run_name="__main__")
    except SystemExit as ended:
        if ended.code:
            raise


def main() -> None:
    """As `torch.distributed.run`."""
    given = parse_args(sys.argv[1:])
    if given.standalone:
        given.rdzv_backend, given.rdzv_endpoint = "c10d", "localhost:0"
        given.rdzv_id = str(uuid.uuid4())
    config, _, _ = config_from_args(given)
    config.start_method = "fork"
    elastic_launch(config, rank)(given.module, given.training_script, given.training_script_args)


if __name__ == "__main__":
    main()
