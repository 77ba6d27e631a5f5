"""The memory of a ring is freed when its last user releases it."""

from __future__ import annotations

import os
from pathlib import Path

from raystow.workers.shm.ring import SLOT, Ring


def mapped(inode: int) -> bool:
    lines = Path("/proc/self/maps").read_text().splitlines()
    return any(line.split()[4] == str(inode) for line in lines if "raystow-ring" in line)


def test_a_closed_ring_frees_its_memory_with_the_last_chunk():
    """The memory is freed even if the ring object is still referenced."""
    ring = Ring.create(2 * SLOT)
    inode = os.fstat(ring.fd).st_ino
    chunk = ring.slot(1)[:100]
    chunk[:] = 7
    ring.close()
    assert mapped(inode)
    assert (chunk == 7).all()
    del chunk
    assert not mapped(inode)
    assert isinstance(ring, Ring)  # keeps the reference to the ring
