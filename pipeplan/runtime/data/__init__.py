"""The micro-batches of a rank: from the task's data or from batches of the user."""
