"""Models without memory: fake tensors, and ghosts of parameters that another rank hosts."""
