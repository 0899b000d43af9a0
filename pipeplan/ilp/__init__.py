"""The planner's solver: costs, memory, contiguous optimum, bounds, periodic CP-SAT model."""
