"""Floor 2, decides: the client, the coordinator, the plan of who saves and reads what, and the command line."""
