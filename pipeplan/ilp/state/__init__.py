"""The best so far, what is proven, the time that is left, and what is minimized."""
