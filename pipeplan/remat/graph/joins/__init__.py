"""Chains that meet in a tail, with unequal steps: found in a graph, planned together."""
