"""The documents of a repository, byte by byte: root, version record, manifest, and what they are made of."""
