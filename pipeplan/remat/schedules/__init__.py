"""What one device is asked to do: costs, operations, host link; the judge that replays them."""
