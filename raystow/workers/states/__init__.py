"""States of living replicas, staged in their node's memory for replicas that have to catch up."""
