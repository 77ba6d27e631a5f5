"""The root of a repository: its register, changed by compare-and-swap, and the invariants that every change keeps."""
