"""Moves bytes on the GPU: copies, concatenates, packs, and transfers small results to the host."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..kernel_args import Addressed, Table, in_parts
from .constants import CHOOSE, LINE_UP, MOVE, PACK7, TELL
from .library import Kernel

_MOVE, _TELL, _CHOOSE, _LINE_UP = (Kernel(f"copies.{name}") for name in ("move", "tell", "choose", "line_up"))
_PACK7, _UNPACK7 = Kernel("copies.pack7"), Kernel("copies.unpack7")


def tell(found: Addressed, address: int) -> None:
    """Copy ``found`` (int64) from the device to ``address`` in pinned host memory, on the current stream.

    A kernel writes it: an ordinary copy would wait for all large copies that were enqueued before on any stream, since there is
    one copy engine for that direction.
    """
    if n := len(found):
        _TELL.launch((_times(n, TELL["MOST"]),), found, address, n, **TELL)


def to_host(found: torch.Tensor) -> torch.Tensor:
    """Return a copy in pinned host memory (see ``tell``), complete once the current stream has executed it."""
    copied = torch.empty(found.shape, dtype=torch.int64, pin_memory=True)
    tell(Addressed(found.data_ptr(), found.numel(), found.device), copied.data_ptr())
    return copied


def move(table: Table, largest: int) -> None:
    """Copy bytes. ``table``: int64 [pieces, 3], source address, target address, bytes; ``largest``: the most bytes of a piece."""
    _launch(_MOVE, table, _times(largest, MOVE["SPAN"]), MOVE)


@dataclass(frozen=True)
class CodedStreams:
    """Coded streams as a coder wrote them: every ``stride`` bytes in ``memory``, each of ``sizes`` (int64 [streams]) bytes."""

    memory: torch.Tensor
    stride: int
    sizes: Table


def condense(
    owners: torch.Tensor, cuts: tuple[Table, Table], streams: CodedStreams, base: int, *, largest: int, lengths: torch.Tensor
) -> None:
    """Concatenate the streams of some planes, without waiting for their sizes on the host. A plane that coding did not make
    smaller is copied raw.

    Args:
        owners: int64 [planes + 1, 2], the number of each plane's first stream and its bytes; the last row has the number of
            streams.
        cuts: Address and bytes of each stream before coding, int64 [streams] each.
        streams: The coded streams.
        base: The address of the result.
        largest: The largest number of streams of a plane.
        lengths: int64 [streams], receives the bytes of each stream in the result.
    """
    addresses, planes = cuts
    table = torch.empty((len(addresses), 3), dtype=torch.int64, device=owners.device)
    coded = streams.memory.data_ptr(), streams.stride, streams.sizes
    times = _times(largest, CHOOSE["MOST"])
    _CHOOSE.launch((len(owners) - 1,), owners, addresses, planes, *coded, table, lengths, times, **CHOOSE)
    _LINE_UP.launch((1,), table, base, len(table), _times(len(table), LINE_UP["MOST"]), **LINE_UP)
    move(table, streams.stride)


def pack7(table: torch.Tensor, largest: int) -> None:
    """Compute ``storage.coding.kernels.pack7`` of each row: address of the plane, address of the result, groups of 8 bytes."""
    _launch(_PACK7, table, _times(largest, PACK7["SPAN"]), PACK7)


def unpack7(table: Table, largest: int) -> None:
    """Invert ``pack7``. Each row: address of the packed bytes, address of the plane, groups of 7 bytes."""
    _launch(_UNPACK7, table, _times(largest, PACK7["SPAN"]), PACK7)


def _launch(kernel: Kernel, table: Table, programs: int, constants: dict[str, int]) -> None:
    """Launch a kernel with so many programs for each row: int64 [rows, 3]."""
    if len(table):
        for (rows,) in in_parts((table, 3)):
            kernel.launch((programs, len(rows)), rows, **constants)


def _times(number: int, part: int) -> int:
    """Return how many parts cover a number, at least 1."""
    return max(1, -(-number // part))
