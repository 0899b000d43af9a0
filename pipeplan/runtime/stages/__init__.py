"""What a rank computes: the forward and backward of a stage's layers."""
