"""What no plan can go below, and whether there is one at all."""
