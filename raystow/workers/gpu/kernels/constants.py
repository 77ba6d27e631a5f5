"""The constants that the kernels are compiled with: see ``sources``."""

from __future__ import annotations

from ....storage.coding.chunk import DEFLATE as DEFLATE_CODEC
from ....storage.coding.digest import BLOCK
from ..nvcomp import ALIGN, STREAM

Value = int | bool | str

LEAF = 1024
"""Bytes of a leaf of BLAKE3."""
BLAKE3 = {"LANES": 128, "LEAF": LEAF}

MOVE = {"SPAN": 16384}
"""Bytes that a program moves."""
TELL = {"MOST": 1024}
CHOOSE = {"MOST": 256}
LINE_UP = {"MOST": 1024}
PACK7 = {"SPAN": 1024}
"""Groups of eight bytes that a program packs or unpacks."""
COMPARE = {"SPAN": 4096}
CHECK = {"LANES": 1024, "SPAN": 16384}
NARROW = {"SPAN": 4096}

SLICE = 1024
"""32-bit words of each digest block that a program reads, always with the same keys."""
GROUP = 16
"""Digest blocks that a program reads."""
BLOCKS = 1 << 12
"""The most digest blocks of a chunk."""
TRANSFORM: dict[str, Value] = {"SLICE": SLICE, "GROUP": GROUP, "BLOCK": BLOCK, "BLOCKS": BLOCKS}
_USES: dict[str, Value] = {
    **dict.fromkeys(("ROTATE", "SPLIT", "JOIN", "ADD", "SAMPLE", "PAIR"), False),
    "ROUND": "",
}


def transform(**use: Value) -> dict[str, Value]:
    """Return the constants of one use of ``words.transform``; what is not given is off."""
    return {**TRANSFORM, **_USES, **use}


STRIDE = -(-(STREAM[DEFLATE_CODEC] + 512) // ALIGN) * ALIGN
"""Bytes for a coded stream. It may grow by 512 bytes; coding stops if it grows more, since its plane will not become smaller."""
ORDER = (16, 17, 18, 0, 8, 7, 9, 6, 10, 5, 11, 4, 12, 3, 13, 2, 14, 1, 15)
"""The order of code lengths in the head of a Deflate block."""
OFTEN = 7
"""Code lengths are written with a constant code: 0 takes one bit, this length four bits, all others five."""
WORDS = 256
"""Words of four symbols that are coded at a time."""
_LANES, _ENTRY_BITS = 32, 10
HEAD_BITS = 17 + 3 * len(ORDER)
DEFLATE: dict[str, Value] = {
    "HEAD": HEAD_BITS,
    "OFTEN": OFTEN,
    "SYMBOLS": 512,  # bytes, the end of the block (256), lengths of runs, and unused symbols
    "FULL": 1 << 15,  # the number of codes of 15 bits, the longest
    "ROUNDS": 8,  # halvings of the threshold
    "WORDS": WORDS,
    "TIMES": -(-STREAM[DEFLATE_CODEC] // (4 * WORDS)),
    "ROOM": 8 * (STRIDE - 24),
    "DISTANCE": 286,  # after the last length of a run: the only distance
    "LONGEST": 64,  # words in a run
}
INFLATE: dict[str, Value] = {
    "HEAD": HEAD_BITS,
    "SYMBOLS": 512,
    "DISTANCE": 286,
    "BITS": _ENTRY_BITS,  # of a code, that are looked up at once
    "LANES": _LANES,
    "SYNC": 256,  # bits before its part at which a lane begins
    "ROUND": 8,  # codes that are decoded from 64 bits, at most
    "SCRATCH": 4 * (512 + 32 + _LANES) + 2 * (512 + (1 << _ENTRY_BITS)),  # bytes for each stream
    "STOP": 1 << 30,
}
