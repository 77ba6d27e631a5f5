"""The top layer: the client, the coordinator, the plans of saves and restores, and the command line."""
