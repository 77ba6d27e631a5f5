"""Rounding of floats on their way to the store, for those who ask for it."""
