"""Encoding on the GPU: chunks are read, coded and copied to host memory, following a plan that is reused."""
