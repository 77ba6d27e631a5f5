"""What of a file is in the page cache."""

from __future__ import annotations

import os
from pathlib import Path


def page_cached(path: Path) -> bool:
    """Return whether the first page of the file is in the page cache."""
    with path.open("rb") as file:
        try:
            return os.preadv(file.fileno(), [bytearray(1)], 0, os.RWF_NOWAIT) == 1
        except BlockingIOError:
            return False
