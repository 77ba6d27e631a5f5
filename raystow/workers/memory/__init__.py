"""What a node has of versions in its memory: to restore from, to store differences to, and to make copies of."""
