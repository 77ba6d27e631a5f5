"""The middle layer: staging, compression, packs and uploads on each node."""
