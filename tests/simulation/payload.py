"""What is saved: real fragments and packs of a few bytes, made once and used by every world."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

from raystow.storage.chunk import Coding
from raystow.storage.digest import raw_digest, stored_digest
from raystow.storage.manifest import ARRAY, Chunk, Fragment, path_text
from raystow.storage.version_record import FragmentInfo, PackInfo

KINDS = 4
GROUP = "weights"


@dataclass(frozen=True)
class Part:
    """What one node stores of one version."""

    pack: bytes
    fragment: bytes
    info: FragmentInfo
    packs: tuple[PackInfo, ...]


@functools.cache
def part(node: int, kind: int) -> Part:
    """The part of node number ``node`` in a version of one of ``KINDS`` kinds: one tensor of four numbers."""
    array = np.arange(4, dtype=np.float32) + 10 * node + kind
    raw = array.view(np.uint8)
    pack = raw.tobytes()
    row = Chunk(
        name=f"w{node}",
        path=path_text((f"w{node}",)),
        kind=ARRAY,
        dtype="float32",
        shape=(4,),
        offset=(0,),
        extent=(4,),
        node=node,
        group=GROUP,
        pack=0,
        start=0,
        coding=Coding(False, False, ("raw",), (len(pack),)),
        raw_digest=raw_digest(raw),
        stored_digest=stored_digest(pack),
    )
    fragment = Fragment(node, (row,), ()).dump()
    info = FragmentInfo(node, len(fragment), stored_digest(fragment).hex(), (node,), 1, len(pack), len(pack))
    return Part(pack, fragment, info, (PackInfo(node, GROUP, 0, len(pack)),))
