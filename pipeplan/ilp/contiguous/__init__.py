"""One stage per GPU: exact for one micro-batch per period, eager cycles for several."""
