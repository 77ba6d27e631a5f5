"""Stored bytes on their way to the ranks of a node that restore: from its memory, from other nodes, or from the store."""
