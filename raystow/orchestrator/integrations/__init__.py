"""raystow inside the tools that people train with already; each has a folder or module of its own."""
