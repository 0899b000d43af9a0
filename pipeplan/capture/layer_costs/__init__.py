"""What one layer costs: bytes, times, the optimizer's step, and the layer of a chain they make."""
