"""``python -m tests.simulation SEED`` plays one seed; ``FIRST LAST`` plays a range of seeds until one fails."""

from __future__ import annotations

import sys

from .run import play


def main() -> int:
    """Play the seeds of the command line; return 1 if an invariant was violated."""
    first, last = int(sys.argv[1]), int(sys.argv[-1])
    for seed in range(first, last + 1):
        outcome = play(seed)
        if outcome.broken:
            print(outcome.report)
            return 1
    print(f"seeds {first} to {last}: nothing broken; the last had {outcome.versions} versions, digest {outcome.digest}")
    return 0


sys.exit(main())
