"""Rounding of floating-point tensors before they are stored."""
