"""What tests and benchmarks share: instances, networks, ranks in one process."""
