"""The interface for training processes: ``Checkpointer``, its options, and the outcome of a save."""
