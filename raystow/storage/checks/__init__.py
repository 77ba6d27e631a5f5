"""Whether a repository is whole, and what can be repaired."""
