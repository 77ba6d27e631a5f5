"""``raystow report``: a run's checkpoints as a page to read, made from the repository alone."""
