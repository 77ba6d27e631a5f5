"""Planes of chunks decoded once, on the cores of their node, where else a GPU that trains would decode them in every save."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from ...storage.coding.chunk import ANS, STREAMED, unfold, unfolded
from ...storage.coding.delta import LEAST
from ...storage.coding.digest import stored_digest
from ...storage.coding.kernels import Bytes
from ...storage.errors import Damaged
from ...storage.format.manifest import Chunk
from ..priority import give_way

Stored = Callable[[Chunk], Bytes | None]
"""The stored bytes of a chunk, not yet held against their digest; None if they are not here any more."""


def unfolds(chunk: Chunk) -> bool:
    """Whether a chunk that others may be differences to has planes that are made of streams, all of which a CPU decodes."""
    codecs = chunk.coding.codecs
    return chunk.nbytes >= LEAST and any(codec in STREAMED for codec in codecs) and ANS not in codecs


def starts_of(chunks: Sequence[Chunk]) -> list[int]:
    """Where the planes of each chunk begin, one chunk's behind the other's; at last where they end."""
    return [0, *itertools.accumulate(unfolded(chunk.coding, chunk.decoded) for chunk in chunks)]


def unfold_all(chunks: Sequence[Chunk], stored: Stored, target: memoryview, *, threads: int) -> list[tuple[Chunk, Damaged]]:
    """Decode the planes of all chunks into ``target``, where ``starts_of`` says, on so many threads, which give way; those that
    are damaged, and how. Nothing is decoded that does not match its digest."""
    out = np.frombuffer(target, np.uint8)

    def one(chunk: Chunk, span: tuple[int, int]) -> Damaged | None:
        if (data := stored(chunk)) is None:
            return None
        try:
            if stored_digest(data) != chunk.stored_digest:
                raise Damaged("the stored bytes do not match their digest")
            unfold(chunk.coding, chunk.words, chunk.decoded, data, out[slice(*span)])
        except Damaged as error:
            return error
        return None

    with ThreadPoolExecutor(threads, "raystow-unfold", initializer=give_way) as pool:
        found = pool.map(one, chunks, itertools.pairwise(starts_of(chunks)))
        return [(chunk, error) for chunk, error in zip(chunks, found, strict=True) if error is not None]
