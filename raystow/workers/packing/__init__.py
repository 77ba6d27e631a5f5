"""What a node makes of an attempt: its chunks coded, gathered into packs, uploaded within a budget of memory."""
