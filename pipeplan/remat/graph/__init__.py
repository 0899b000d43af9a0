"""Solvers of operator graphs: what runs again, and when, within budgets of bytes."""
