"""What tests and benchmarks share: instances, networks, random plans, trainers, ranks."""
