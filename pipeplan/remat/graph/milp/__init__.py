"""Checkmate's and RK-Checkmate's integer programs as written, through OR-tools' solvers."""
