"""Versions as readers see them: which one, its tensors, their slices and values, and the bytes of packs."""
