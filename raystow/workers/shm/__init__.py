"""Memory shared by a training process and its node worker: the staging ring and what its slots contain."""
