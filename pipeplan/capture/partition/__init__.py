"""Layers: where a graph or a sequence of modules is cut, and the modules of the parts."""
