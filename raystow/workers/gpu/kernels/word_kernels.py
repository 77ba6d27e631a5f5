"""Works on words on the GPU: the counterparts of ``storage.coding.kernels`` and ``storage.coding.digest``.

Every function takes a table in device memory with a row for each chunk, and works on all of them in one launch: a state has
thousands of chunks, and a launch for each would cost the training process more than the work itself.
"""

from __future__ import annotations

import functools

import numpy as np
import torch

from ....storage.coding.digest import BLOCK, WORD_KEYS, SecretKeys, block_key
from ..kernel_args import COLUMNS, Addressed, Table, in_parts, part
from .constants import BLOCKS, COMPARE, GROUP, SLICE, Value, transform
from .library import Kernel

_TRANSFORM, _COMPARE = Kernel("words.transform"), Kernel("words.compare")
_REACH = BLOCK * 4 * GROUP  # bytes that the programs of one group read together

FOUND = 3
"""Rows of the results of ``split``."""


@functools.lru_cache(maxsize=16)
def _keys(device: torch.device, secret: SecretKeys | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the keys of words and of blocks, int64 on the device: the public ones, and then the secret ones."""
    found = [WORD_KEYS, np.array([block_key(b) for b in range(BLOCKS)], np.uint64)]
    if secret is not None:
        found = [
            np.concatenate([public, more.reshape(-1)]) for public, more in zip(found, (secret.words, secret.blocks), strict=True)
        ]
    words, blocks = (torch.from_numpy(some.view(np.int64)).to(device) for some in found)
    return words, blocks


def split(
    table: Table,
    largest: int,
    *,
    width: int,
    rotate: bool,
    packed: bool,
    results: Addressed,
) -> None:
    """Split the words of each chunk into its planes, on the current stream.

    Args:
        table: int64 [chunks, COLUMNS]; ``packed`` is the result of ``can_pack`` for it.
        largest: Bytes of the largest chunk.
        results: int64 [FOUND * chunks], zeros: ``FOUND`` rows, which receive ``raw_digest`` before ``finish``; the result of
            ``sample``; 1 if the lowest bit of any rotated word is set.
    """
    n = len(table)
    rows = [part(results, n * row, n) for row in range(FOUND)]
    _run(table, largest, *rows, W=width, ROTATE=rotate, PACKED=packed, SPLIT=True)


def join(table: Table, largest: int, *, width: int, rotate: bool, packed: bool, digests: Table) -> None:
    """Invert ``split``. The sums of ``raw_digest`` of the words are added to ``digests`` (int64 [chunks], zeros)."""
    _run(table, largest, digests, W=width, ROTATE=rotate, PACKED=packed, JOIN=True)


def add(table: Table, largest: int, *, width: int, digests: Table) -> None:
    """Compute ``storage.coding.kernels.add``: the planes of each row are deltas to the words that are at their target. Otherwise
    as ``join``."""
    _run(table, largest, digests, W=width, PACKED=False, JOIN=True, ADD=True)


def derive(table: Table, largest: int, *, dtype: str, digests: Table) -> None:
    """Compute ``coding.derived.derive`` of each row: words of ``dtype`` (bfloat16 or float16) from float32 words, whose address
    replaces that of the first plane. ``digests``: as for ``join``."""
    _run(table, largest, digests, W=2, PACKED=False, ROUND=dtype)


def digest(
    table: torch.Tensor,
    largest: int,
    *,
    width: int,
    packed: bool,
    digests: torch.Tensor,
    keys: SecretKeys | None = None,
) -> None:
    """Compute the digests of ``join`` for existing words, or with ``keys`` both numbers of ``digest_pair``.

    ``digests``: int64 [1, chunks], with keys [3, chunks], zeros. With keys, addresses and sizes are multiples of four bytes.
    """
    assert keys is None or packed or width >= 4
    _run(table, largest, *digests, keys=keys, W=width, PACKED=packed, PAIR=keys is not None)


def sample(table: Table, largest: int, *, width: int, packed: bool, samples: torch.Tensor) -> None:
    """Add to ``samples`` (int64 [chunks], zeros) the part of each chunk's digest for 4 KiB in every 64."""
    _run(table, largest, samples, W=width, PACKED=packed, SAMPLE=True)


def _run(
    table: Table,
    largest: int,
    sums: Table,
    samples: Table | None = None,
    odds: Table | None = None,
    *,
    keys: SecretKeys | None = None,
    **use: Value,
) -> None:
    """``use``: constants of ``sources.words.transform``; what is not given is off."""
    if len(table):
        word_keys, block_keys = _keys(table.device, keys)
        slices = 1 if use.get("SAMPLE") else BLOCK // SLICE
        programs = slices * max(1, -(-largest // _REACH))
        results = [(sums if one is None else one, 1) for one in (sums, samples, odds)]
        for rows, *found in in_parts((table, COLUMNS), *results):
            _TRANSFORM.launch((programs, len(rows)), rows, word_keys, block_keys, *found, **transform(**use))


def compare(table: torch.Tensor, largest: int, *, width: int, rounded: str = "", misses: torch.Tensor) -> None:
    """Set ``misses`` (int64 [rows], zeros) to 1 for each row in which some word is not the other word, or not the other word
    ``rounded`` to this dtype (bfloat16 or float16).

    ``table``: the address of the other words (float32 if they are rounded), that of words of ``width`` bytes, and their number;
    ``largest``: the largest number. See ``coding.derived.followed``.
    """
    if len(table):
        programs = max(1, -(-largest // COMPARE["SPAN"]))
        for rows, found in in_parts((table, 3), (misses, 1)):
            _COMPARE.launch((programs, len(rows)), rows, found, **COMPARE, W=width, ROUND=rounded)
