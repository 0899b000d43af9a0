"""A run without a model: executor and messages as always, ops that only pass time."""
