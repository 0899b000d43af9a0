"""Studies that the package does not need; they use its insides."""
