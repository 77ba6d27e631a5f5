"""Real processes, killed at each step."""
