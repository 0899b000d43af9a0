"""Local search over allocations, each judged by one list schedule; large neighbourhood search."""
