"""The model as one graph: torch.export, what its nodes do, how data flows through it."""
