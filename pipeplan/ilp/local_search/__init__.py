"""Local search over allocations, each judged by one list schedule."""
