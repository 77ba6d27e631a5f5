"""Saving from the node worker, for training processes that must not be touched: these copy to device memory that both share."""
