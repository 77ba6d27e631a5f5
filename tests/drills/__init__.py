"""Nodes and processes killed during a training."""
