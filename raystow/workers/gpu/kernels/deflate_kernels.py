"""The Deflate coder and its decoder: see ``sources.deflate`` and ``sources.inflate``."""

from __future__ import annotations

import torch

from ....storage.coding.chunk import DEFLATE
from ..kernel_args import Table
from ..nvcomp import STREAM, Codec
from .constants import DEFLATE as CONSTANTS
from .constants import INFLATE, OFTEN, ORDER, STRIDE
from .library import Kernel

_CODE, _DECODE = Kernel("deflate.code"), Kernel("inflate.decode")


def _head() -> int:
    """Return the head of every block: last block, dynamic codes, 257 symbols, 1 distance that means none, and the lengths, three
    bits each, of the 19 codes for code lengths."""
    head = 1 | 2 << 1 | (len(ORDER) - 4) << 13
    for place, length in enumerate(ORDER):
        head |= (0 if length > 15 else 1 if length == 0 else 4 if length == OFTEN else 5) << (17 + 3 * place)
    return head


_HEAD = _head()


class Deflate(Codec):
    """Codes and decodes with these kernels. Streams have at most 16 KiB, aligned to four bytes. A stream that would
    grow by more than a thirtieth is not coded; its size is then 1 GiB."""

    stride = STRIDE

    def __init__(self) -> None:
        super().__init__(DEFLATE, STREAM[DEFLATE])

    def coding_scratch(self, streams: int) -> int:
        """See ``Codec.coding_scratch``."""
        return streams * int(CONSTANTS["SYMBOLS"]) * 4

    def compress(
        self, sources: Table, sizes: Table, targets: Table, coded: Table, *, scratch: torch.Tensor, status: torch.Tensor
    ) -> None:
        """See ``Codec.compress``."""
        tables, head = scratch.view(torch.int32), (_HEAD & (1 << 48) - 1, _HEAD >> 48)
        for runs in (False, True):
            _CODE.launch((len(sources),), sources, sizes, targets, coded, tables, *head, **CONSTANTS, RUNS=runs)
        status.zero_()

    def decoding_scratch(self, streams: int) -> int:
        """See ``Codec.decoding_scratch``."""
        return streams * int(INFLATE["SCRATCH"])

    def decompress(
        self, sources: Table, sizes: Table, targets: Table, most: Table, *, decoded: Table, scratch: torch.Tensor, status: Table
    ) -> None:
        """See ``Codec.decompress``. Streams that another coder wrote get a status that is not 0. Any bytes may be given, and
        sources need no alignment."""
        head = _HEAD & (1 << 48) - 1, _HEAD >> 48
        streams = sources, sizes, targets, most, decoded, status
        _DECODE.launch((len(sources),), *streams, scratch.data_ptr(), *head, **INFLATE)


def coder(name: str) -> Codec:
    """Return the fastest coder."""
    return Deflate() if name == DEFLATE else Codec(name, STREAM[name])
