"""Planning with offloading: what waits in the host's memory between forward and backward.

`levels` lists what a stage can send; `ways` finds times on a GPU's way to the host; `fit` makes a
schedule that needs too much memory fit; `host_events` says what a contiguous stage can expect of it.
"""
