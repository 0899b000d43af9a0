"""Which layers share a GPU where several runs may: each allocation, or ways to good ones."""
