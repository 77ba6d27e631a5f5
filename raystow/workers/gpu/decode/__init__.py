"""Restoring: stored bytes go up, are held against their digests there, decoded, and written into tensors."""
