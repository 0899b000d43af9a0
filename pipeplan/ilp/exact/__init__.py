"""Exact search over allocations: enumeration, and branch and bound on the op orders of one."""
