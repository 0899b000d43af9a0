"""Rematerialization and offloading together: POFO."""
