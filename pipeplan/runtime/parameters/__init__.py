"""The parameters of a rank: their versions, gradients, owners and updates."""
