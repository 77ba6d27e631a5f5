"""The node worker: one process per node that codes, stores and caches what the ranks of the node save."""
