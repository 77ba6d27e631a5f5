"""What a node worker loads before the first save."""

from __future__ import annotations

import subprocess
import sys

SAVE = """
import sys
from raystow.storage.format.manifest import Fragment, Value
from raystow.workers.packing.chunk_writer import warm_up
warm_up()
before = set(sys.modules)
Fragment(0, (), (Value("a", "[]", "1", (0,)),)).dump()
print(*sorted(set(sys.modules) - before))
"""


def test_the_first_fragment_loads_nothing() -> None:
    """pyarrow would load pandas, where there is one: a third of a second."""
    assert subprocess.run([sys.executable, "-c", SAVE], check=True, capture_output=True, text=True, timeout=60).stdout == "\n"
