"""The coordinator: attempts, commits, housekeeping, and the read-only status of a cluster."""
