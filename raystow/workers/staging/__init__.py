"""The training process's side of a save: hands chunks to the node worker in the background."""
