"""How ranks stop together, what each did last, and which one a failure came from."""
