"""The coding of chunks: planes and codecs, digests, element types, deltas, derived tensors."""
