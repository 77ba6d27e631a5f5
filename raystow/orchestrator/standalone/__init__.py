"""Saves without node worker and coordinator: each process encodes and uploads its tensors, and one of them commits."""
