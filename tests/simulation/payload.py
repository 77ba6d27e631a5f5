"""What is saved: real fragments and packs of a few bytes, made once and used by every world."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np

from raystow.storage.coding.chunk import Coding
from raystow.storage.coding.digest import raw_digest, stored_digest
from raystow.storage.coding.kernels import subtract
from raystow.storage.format.manifest import ARRAY, Chunk, Fragment, path_text
from raystow.storage.format.version_record import FragmentInfo, PackInfo

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
def part(node: int, kind: int, base: int | None = None) -> Part:
    """The part of node number ``node`` in a version of one of ``KINDS`` kinds: one tensor of four numbers, which thinning takes
    from every second node. ``base``: the id of a version that it is a difference to."""
    name = f"optimizer.w{node}" if node % 2 else f"w{node}"
    raw = _numbers(node, kind)
    pack = raw.tobytes()
    if base is not None:
        pack = _difference(raw.view(np.uint32), _numbers(node, base % KINDS).view(np.uint32)).tobytes()
    row = Chunk(
        name=name,
        path=path_text((name,)),
        kind=ARRAY,
        dtype="float32",
        shape=(4,),
        offset=(0,),
        extent=(4,),
        node=node,
        group=GROUP,
        pack=0,
        start=0,
        coding=Coding(False, False, ("raw",), (len(pack),), base=base),
        raw_digest=raw_digest(raw),
        stored_digest=stored_digest(pack),
    )
    fragment = Fragment(node, (row,), ())
    data = fragment.dump()
    return Part(pack, data, fragment.info(data, [node]), (PackInfo(node, GROUP, 0, len(pack)),))


def _numbers(node: int, kind: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return (np.arange(4, dtype=np.float32) + 10 * node + kind).view(np.uint8)


def _difference(words: np.ndarray[Any, Any], base: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    stored = np.empty_like(words)
    subtract(words, base, stored)
    return stored
