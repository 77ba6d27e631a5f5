"""Works on words on the GPU: the counterparts of ``storage.coding.kernels`` and ``storage.coding.digest``.

Every function takes a table in device memory with a row for each chunk, and works on all of them in one launch: a state has
thousands of chunks, and a launch for each would cost the training process more than the work itself.
"""

from __future__ import annotations

import functools

import numpy as np
import torch

from ....storage.coding.digest import BLOCK, SECOND_WORD_KEYS, WORD_KEYS, block_key
from ..kernel_args import COLUMNS, Addressed, Table, in_parts, part
from .constants import BLOCKS, COMPARE, GROUP, SLICE, Value, transform
from .library import Kernel

_TRANSFORM, _COMPARE = Kernel("words.transform"), Kernel("words.compare")
_REACH = BLOCK * 4 * GROUP  # bytes that the programs of one group read together

FOUND = 5
"""Rows of the results of ``split``."""


@functools.cache
def _keys(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the digest's keys of words and of blocks, int64 on the device, each followed by those of the second digest."""
    words = np.concatenate([WORD_KEYS, SECOND_WORD_KEYS])
    blocks = np.array([block_key(b, second=second) for second in (False, True) for b in range(BLOCKS)], np.uint64)
    return torch.from_numpy(words.view(np.int64)).to(device), torch.from_numpy(blocks.view(np.int64)).to(device)


def split(
    table: Table,
    largest: int,
    *,
    width: int,
    rotate: bool,
    packed: bool,
    results: Addressed,
    followed: str = "",
) -> None:
    """Split the words of each chunk into its planes, on the current stream.

    Args:
        table: int64 [chunks, COLUMNS]; ``packed`` is the result of ``can_pack`` for it.
        largest: Bytes of the largest chunk.
        results: int64 [FOUND * chunks], zeros: ``FOUND`` rows, which receive ``raw_digest`` before ``finish``; the result of
            ``sample``; 1 if the lowest bit of any rotated word is set; with ``followed`` the digest of the rounded words before
            ``finish``, and 1 if any word is a NaN.
        followed: Round float32 words to this dtype (bfloat16 or float16), as ``coding.derived.derive`` does.
    """
    n = len(table)
    rows = [part(results, n * row, n) for row in range(FOUND)]
    _run(table, largest, *rows, W=width, ROTATE=rotate, PACKED=packed, SPLIT=True, FOLLOWED=followed)


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
    second: torch.Tensor | None = None,
) -> None:
    """Compute the digests of ``join`` for existing words, and into ``second`` (int64 [chunks], zeros) those of ``digest_pair``.

    With ``second``, addresses and sizes must be multiples of four bytes.
    """
    assert second is None or packed or width >= 4
    _run(table, largest, digests, second, W=width, PACKED=packed, PAIR=second is not None)


def sample(table: Table, largest: int, *, width: int, packed: bool, samples: torch.Tensor) -> None:
    """Add to ``samples`` (int64 [chunks], zeros) the part of each chunk's digest for 4 KiB in every 64."""
    _run(table, largest, samples, W=width, PACKED=packed, SAMPLE=True)


def _run(
    table: Table,
    largest: int,
    sums: Table,
    samples: Table | None = None,
    odds: Table | None = None,
    rounded_sums: Table | None = None,
    nans: Table | None = None,
    **use: Value,
) -> None:
    """``use``: constants of ``sources.words.transform``; what is not given is off."""
    if len(table):
        keys, block_keys = _keys(table.device)
        slices = 1 if use.get("SAMPLE") else BLOCK // SLICE
        programs = slices * max(1, -(-largest // _REACH))
        results = [(sums if one is None else one, 1) for one in (sums, samples, odds, rounded_sums, nans)]
        for rows, *found in in_parts((table, COLUMNS), *results):
            _TRANSFORM.launch((programs, len(rows)), rows, keys, block_keys, *found, **transform(**use))


def compare(table: torch.Tensor, largest: int, *, dtype: str, misses: torch.Tensor) -> None:
    """Set ``misses`` (int64 [rows], zeros) to 1 for each row in which some word is not the other word rounded.

    ``table``: the address of float32 words, the address of words of ``dtype`` (bfloat16 or float16), their number; ``largest``:
    the largest number. See ``coding.derived.followed``.
    """
    if len(table):
        programs = max(1, -(-largest // COMPARE["SPAN"]))
        for rows, found in in_parts((table, 3), (misses, 1)):
            _COMPARE.launch((programs, len(rows)), rows, found, **COMPARE, BF16=dtype == "bfloat16")
