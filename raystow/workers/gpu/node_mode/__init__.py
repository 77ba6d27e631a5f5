"""Encoding in the node worker, which relieves the training process: it only copies chunks to shared device memory."""
