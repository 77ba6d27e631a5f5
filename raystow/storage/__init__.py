"""Floor 0, the durable truth: the format, the stores, the commit. Knows neither Ray nor GPUs, and needs no torch."""
