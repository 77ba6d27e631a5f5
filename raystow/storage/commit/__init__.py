"""What becomes durable, and when: versions, segments of a journal, leases, rollbacks, and the catalog of all of them."""
