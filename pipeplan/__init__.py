"""Plan and run pipeline-parallel training: the shortest period under exact memory."""

__version__ = "0.1.0"
