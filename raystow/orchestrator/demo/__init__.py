"""``raystow demo``: real training on a cluster of two nodes, one of which is killed in the middle of a save."""
