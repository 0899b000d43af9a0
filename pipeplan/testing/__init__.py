"""What tests and benchmarks share: instances, networks; nothing that a plan or a run needs."""
