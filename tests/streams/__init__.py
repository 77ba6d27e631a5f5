"""GPU code without a GPU."""
