"""Offloading: which saved bytes reside on the host between forward and backward, and when.

`byte_options` lists how many bytes a stage can offload; `copy_placement` finds times on a GPU's
host link; `repair` makes a schedule fit that needs too much memory.
"""
