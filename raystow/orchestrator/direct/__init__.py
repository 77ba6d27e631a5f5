"""Saves without node worker and coordinator: the process that has the tensors codes and uploads them, and one of them commits."""
