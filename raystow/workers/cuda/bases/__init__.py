"""What chunks are stored as differences to, on its way from the node's memory to the device."""
