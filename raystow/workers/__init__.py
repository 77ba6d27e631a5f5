"""Floor 1, moves bytes: staging, compression, packs and uploads on each node."""
