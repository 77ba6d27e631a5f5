"""Every store."""
