"""Modules that a graph cannot hold: how they are found, and how they are called from a graph."""
