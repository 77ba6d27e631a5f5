"""What a chunk's bytes become, and how they come back: planes and coders, digests, element types, differences, derivations."""
