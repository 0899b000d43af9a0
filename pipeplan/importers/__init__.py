"""Chains from profiles that other tools wrote: PipeDream graphs, CSV tables of layers."""

from pipeplan.importers.graph_txt import pipedream
from pipeplan.importers.table import csv_layers

__all__ = ["csv_layers", "pipedream"]
