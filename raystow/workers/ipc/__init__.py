"""What passes between a training process and its node worker: messages over a Unix socket, and memory that both map."""
