"""Exact whole-unit offloading by CP-SAT, with a lower bound."""
