"""The user's model: how it is called and observed, and how it is left as it was."""
