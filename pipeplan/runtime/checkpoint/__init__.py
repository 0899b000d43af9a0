"""The state of a training on disk: its names, its files, writing it beside the training."""
