"""A graph as a chain of blocks: where it may be cut, what a block may do, RK-Rotor over options."""
