"""The saved data: real fragments and packs of a few kilobytes, made once and used by every world."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np

from raystow.state.chunk_info import RangeInfo
from raystow.storage.coding.chunk import Coding
from raystow.storage.coding.digest import raw_digest, stored_digest
from raystow.storage.coding.kernels import Words, subtract
from raystow.storage.format.manifest import ARRAY, Chunk, Fragment, path_text
from raystow.storage.format.version_record import FragmentInfo
from raystow.storage.versions import runs
from raystow.workers.packing.held_digests import HeldDigests

KINDS = 4
GROUP = "weights"
_SIZES = {"b": 1, "v": 33, "w": 700}  # elements
HELD = tuple(_SIZES)
"""The tensors that all ranks hold."""

Save: TypeAlias = tuple[int, int]
"""How often the training was restarted before, and the number of the save since then."""
Past: TypeAlias = tuple[int, int]
"""How often the training was restarted before, and the id of the version that was restored then."""


class Restored(NamedTuple):
    """What a rank or part has restored. ``past``: None if it has no state; ``token``: see ``RankSaveRequest.past``."""

    past: Past | None = None
    step: int = 0
    token: str = ""


_SHAPE = (128, 64)  # enough float32 numbers that thinning rounds them and stores deltas


@dataclass(frozen=True)
class Flip:
    """A bit of a tensor that is wrong on one rank, which worlds with few ranks may not have."""

    rank: int
    name: str
    element: int
    bit: int


@dataclass(frozen=True)
class Part:
    """The data that one node stores for one version."""

    pack: bytes
    fragment: bytes
    info: FragmentInfo


@functools.cache
def part(node: int, kind: int, base: int | None = None) -> Part:
    """Return the part of a node in a version of one of ``KINDS`` kinds: one tensor, which thinning removes on every second node.
    ``base``: id of the version to which the part is a delta."""
    name = f"optimizer.w{node}" if node % 2 else f"w{node}"
    words = numbers(node, kind)
    raw = words.view(np.uint8)
    pack = raw.tobytes()
    if base is not None:
        pack = _difference(words, numbers(node, base % KINDS)).tobytes()
    row = Chunk(
        name=name,
        path=path_text((name,)),
        kind=ARRAY,
        dtype="float32",
        shape=_SHAPE,
        offset=(0, 0),
        extent=_SHAPE,
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
    return Part(pack, data, fragment.info(data, [node]))


@functools.cache
def numbers(node: int, kind: int, bits: int | None = None) -> Words:
    """Return the words of a part's float32 numbers, rounded to ``bits`` bits of mantissa if given."""
    drawn = np.random.default_rng(node).integers(0, 1 << 23, math.prod(_SHAPE), np.uint32)
    words = ((127 << 23) + drawn + kind).astype(np.uint32)  # from 1 to 2; kinds differ in the last bits
    if bits is not None:
        words = (np.rint(words.view(np.float32).astype(np.float64) * 2**bits) / 2**bits).astype(np.float32).view(np.uint32)
    words.flags.writeable = False
    return words


def decoded(node: int, fragment: bytes, pack: bytes, base: Callable[[int], Words]) -> Words:
    """Return the words of a part. ``base(id)`` returns the words of the same part in another version. Raises ``Damaged`` if a
    digest of the fragment does not match."""
    row = _row(node, fragment)
    beneath = None if row.coding.base is None else base(row.coding.base).view(np.uint8)
    stored = np.frombuffer(pack, np.uint8)[row.start : row.start + row.coding.size]
    return runs.decode(row, stored, base=beneath)[1].view(np.uint32)


@functools.lru_cache(1024)  # nodes store the same few fragments repeatedly
def _row(node: int, fragment: bytes) -> Chunk:
    (row,) = Fragment.load(fragment, node, "a fragment").chunks
    return row


def _difference(words: Words, base: Words) -> Words:
    stored = np.empty_like(words)
    subtract(words, base, stored)
    return stored


def digests(rank: int, step: int, save: Save) -> HeldDigests:
    """Return what a rank compares in a save: the tensors that all ranks hold, of which ``flip_of`` has changed one bit on one
    rank. Their bits are others in each save, also if a step is repeated after a restart, so digests of two saves differ."""
    infos, found = [], []
    for name in HELD:
        data = _bits(name, save)
        if (flip := flip_of(step)) is not None and (flip.rank, flip.name) == (rank, name):
            data[flip.element] ^= np.uint32(1 << flip.bit)
        infos.append(RangeInfo(name, "float32", (0,), (len(data),), 0))
        found.append((raw_digest(data.view(np.uint8)), raw_digest(data[:1].view(np.uint8))))
    held = HeldDigests()
    held.add(rank, {1: infos}, {1: np.array(found, "<u8").T.tobytes()})
    return held


def _bits(name: str, save: Save) -> Words:
    """Return random words, -0.0 and NaNs with payloads, whose number depends on the tensor."""
    rng = np.random.default_rng([*name.encode(), *save])
    words = rng.integers(0, 1 << 32, _SIZES[name], np.uint32)
    words[rng.integers(len(words))] = 1 << 31
    words[rng.integers(len(words))] = 0x7FC00000 | int(rng.integers(1, 1 << 20))
    return words


def flip_of(step: int) -> Flip | None:
    """Return what is changed at a step; None in most steps."""
    if step % 4 != 1:
        return None
    rng = np.random.default_rng(step)
    name = HELD[rng.integers(len(HELD))]
    return Flip(int(rng.integers(3)), name, int(rng.integers(_SIZES[name])), int(rng.integers(32)))
