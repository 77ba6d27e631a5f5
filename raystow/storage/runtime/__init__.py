"""What every layer needs of its process: time, threads, memory, metrics, pauses of the garbage collector."""
