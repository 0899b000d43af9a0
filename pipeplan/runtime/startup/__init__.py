"""From processes to ranks that train together: rendezvous, checks, agreement."""
