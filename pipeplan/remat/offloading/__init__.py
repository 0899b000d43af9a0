"""Offloading alone: which units may leave, which do, and the no-wait schedule of their copies."""
