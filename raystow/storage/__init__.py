"""The lowest layer: the format, the stores and the commit. It imports neither Ray nor GPU libraries, and needs no torch."""
