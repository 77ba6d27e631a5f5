"""What a rank saves: its state tree, shards and chunks, and the plan of which rank stores which chunk."""
