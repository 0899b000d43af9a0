"""A graph as a chain of blocks: where to cut it, options of a block, RK-Rotor over them."""
