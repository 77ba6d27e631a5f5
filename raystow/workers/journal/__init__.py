"""Entries of the step journal in the memory of nodes."""
