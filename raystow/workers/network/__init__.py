"""The node workers among one another: conversations over TCP, and the copies that they keep for each other."""
