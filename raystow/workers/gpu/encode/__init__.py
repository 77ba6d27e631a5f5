"""Saving: chunks are read, coded and let go to host memory, in an order that was worked out before."""
