"""Copies of a node's cached versions in the memory of other nodes."""
