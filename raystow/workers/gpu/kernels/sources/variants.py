"""All compiled forms of the kernels: the types of their arguments, and the constants that they are compiled for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from .. import constants as of
from ..constants import Value

POINTER, LONG, INT = "*i64", "i64", "i32"

Constants = Mapping[str, Value]


@dataclass(frozen=True)
class Variant:
    """A kernel compiled for some constants.

    Args:
        name: Module and function, as in ``words.transform``.
        arguments: The Triton type of each argument, by name.
        constants: The values of its constants, by name.
        warps: Warps of a program.
        aligned: Arguments that are always multiples of 16.
    """

    name: str
    arguments: Mapping[str, str]
    constants: Constants
    warps: int = 4
    aligned: frozenset[str] = frozenset()


def variants() -> Iterator[Variant]:
    """Yield every variant that this package launches."""
    words = {"values": "*u32", "others": "*u32", "digests": "*u32"}
    aligned = frozenset({"values", "others", "digests"})
    values = {"table": POINTER, "found": POINTER, "factor": INT}
    yield Variant("bfloat16.check", values, of.CHECK)
    yield Variant("bfloat16.narrow", {"table": POINTER, "factor": INT, "first": LONG, "last": LONG}, of.NARROW)
    yield Variant("blake3.leaves", {"table": POINTER, "values": "*u32"}, of.BLAKE3, aligned=aligned)
    yield Variant("blake3.tree", {"table": POINTER, **words}, of.BLAKE3, aligned=aligned)
    yield Variant("copies.move", {"table": POINTER}, of.MOVE)
    yield Variant("copies.tell", {"source": POINTER, "target": LONG, "n": LONG}, of.TELL)
    chosen = dict.fromkeys(("owners", "addresses", "planes"), POINTER) | {"out": LONG, "stride": LONG}
    chosen |= dict.fromkeys(("sizes", "table", "lengths"), POINTER) | {"times": INT}
    yield Variant("copies.choose", chosen, of.CHOOSE)
    yield Variant("copies.line_up", {"table": POINTER, "base": LONG, "streams": LONG, "times": INT}, of.LINE_UP)
    yield Variant("copies.pack7", {"table": POINTER}, of.PACK7)
    yield Variant("copies.unpack7", {"table": POINTER}, of.PACK7)
    coded = dict.fromkeys(("sources", "sizes", "targets", "coded"), POINTER) | {"tables": "*i32"}
    coded |= {"head_low": LONG, "head_high": LONG}
    for runs in (False, True):
        yield Variant("deflate.code", coded, {**of.DEFLATE, "RUNS": runs}, 2, frozenset({"tables"}))
    streams = dict.fromkeys(("sources", "sizes", "targets", "most", "decoded"), POINTER) | {"status": "*i32", "scratch": LONG}
    yield Variant("inflate.decode", streams | {"head_low": LONG, "head_high": LONG}, of.INFLATE, 1)
    for width, dtype in (*((width, "") for width in (1, 2, 4, 8)), (2, "bfloat16"), (2, "float16")):
        yield Variant("words.compare", {"table": POINTER, "misses": POINTER}, {**of.COMPARE, "W": width, "ROUND": dtype})
    keys = ("keys", "block_keys")
    summed = dict.fromkeys(("table", *keys, "digests", "samples", "odds"), POINTER)
    for constants in _transforms():
        yield Variant("words.transform", summed, constants, aligned=frozenset(keys))


def _transforms() -> Iterator[Constants]:
    """Yield the uses of ``words.transform``: see ``word_kernels``."""
    shapes = [(width, packed) for width in (1, 2, 4, 8) for packed in ((False, True) if width < 4 else (False,))]
    for width, packed in shapes:
        same = {"W": width, "PACKED": packed}
        for rotated in (False, True) if width > 1 else (False,):
            yield of.transform(**same, ROTATE=rotated, SPLIT=True)
            yield of.transform(**same, ROTATE=rotated, JOIN=True)
        yield of.transform(**same)
        yield of.transform(**same, SAMPLE=True)
        if packed or width >= 4:
            yield of.transform(**same, PAIR=True)
        if not packed:
            yield of.transform(**same, JOIN=True, ADD=True)
    for dtype in ("bfloat16", "float16"):
        yield of.transform(W=2, PACKED=False, ROUND=dtype)
