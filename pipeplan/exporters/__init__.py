"""Plans as files that other tools read: one file here for each format.

A file has a rank for each GPU that hosts a stage, in the order of their first stages
(`rank_gpus`). What a tool cannot do is refused by name, never left out.
"""

from collections.abc import Callable, Mapping

from pipeplan.exporters.deepspeed import deepspeed
from pipeplan.exporters.expressible import rank_gpus
from pipeplan.exporters.megatron import megatron
from pipeplan.exporters.torch_csv import torch_csv
from pipeplan.exporters.torchtitan import torchtitan
from pipeplan.plan import Plan

__all__ = ["FORMATS", "deepspeed", "megatron", "rank_gpus", "torch_csv", "torchtitan"]

FORMATS: Mapping[str, Callable[[Plan], str]] = {
    "torch-csv": torch_csv,
    "torchtitan": torchtitan,
    "megatron": megatron,
    "deepspeed": deepspeed,
}
"""The text of a plan in each format."""
