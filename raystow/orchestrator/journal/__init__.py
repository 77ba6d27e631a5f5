"""The step journal: each optimizer step is recorded by its gradients and replayed bit for bit after a failure."""
