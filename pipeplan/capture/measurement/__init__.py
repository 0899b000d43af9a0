"""Profiles that are measured: a task's layers, and the fused stages of a plan."""
