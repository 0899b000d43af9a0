"""Rematerialization alone: Rotor, Revolve, periodic checkpoints, joins of chains."""
