"""The node's memory tier: versions to restore from, and the reads of ranks that restore."""
