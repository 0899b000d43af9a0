"""Architectures as people have them, trained on two GPUs beside a plain loop."""
