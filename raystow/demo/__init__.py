"""``raystow demo``: training on a cluster of two nodes, one of which is killed during a save."""
