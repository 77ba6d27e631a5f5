"""Compares the state of this rank with digests of the state that another number of ranks has recorded.

The digest of a rank's part of a tensor is a sum over its words (``state_digests``). Where all of a recorded part is here, it is
compared here. Where several ranks have it now, each adds up what it has, and the first of them subtracts the recorded digest: the
sum over all ranks, which the coordinator takes, is 0 modulo 2^64 if all have the recorded values.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping

import numpy as np
import torch

from ...storage.coding.digest import raw_digest, stored_digest, unfinished
from ...storage.format.boxes import Box, within
from .shard_map import ShardMap, ShardPiece, copy_numbers
from .state_digests import Digester, bytes_of, is_number, merged_spans, spans
from .tracked_state import TrackedState

_LIMIT = 1 << 64


class ShardCheck:
    """For one replay: the parameters stay where they are."""

    def __init__(self, state: TrackedState, digester: Digester) -> None:
        self._state, self._digester = state, digester
        self._copies = copy_numbers(state)

    def compare(self, shards: ShardMap, recorded: Mapping[int, bytes], *, whole: bool, moment: str) -> tuple[str | None, int]:
        """Compare the state with the digests that ranks have recorded at a ``moment`` of a step, "before" or "after".

        Returns:
            The first tensor that differs, None if none does; this rank's summand for tensors that several ranks have.
        """
        digests = {rank: np.frombuffer(packed, "<u8") for rank, packed in recorded.items()}
        tensors = [one for one in self._state.tensors() if not is_number(one.tensor)]
        if {one.size for one in digests.values()} != {len(tensors) + 1}:
            return "the number of tensors", 0
        if any(int(one[-1]) != self._digester.values() for one in digests.values()):
            return "the optimizer's plain values", 0
        residue = 0
        for at, (name, tensor, number) in enumerate(tensors):
            mine, pieces = shards.mine[number], shards.pieces[number]
            if tensor.dim() != len(mine[0]):  # a number that belongs to a parameter: all ranks have it
                mine = ((0,) * tensor.dim(), tuple(tensor.shape))
                pieces = [ShardPiece(min(digests), mine, mine)]
            for piece in pieces:
                total, expected = _part(name, tensor, mine, piece, whole=whole), int(digests[piece.rank][at])
                if piece.common == piece.box:
                    if total != expected:
                        return name, 0
                    continue
                if piece.common[0] == piece.box[0]:  # the first element is here
                    total -= expected
                residue += total * _key(f"{moment} {name} {piece.box} {self._copies[number]}")
        return None, residue % _LIMIT


def _part(name: str, tensor: torch.Tensor, mine: Box, piece: ShardPiece, *, whole: bool) -> int:
    """What this rank's elements add to the digest of a recorded part."""
    nbytes = math.prod(piece.box[1]) * tensor.itemsize
    places = spans(name, nbytes, whole=whole)
    totals = [_total(tensor, mine, piece, first, last) for first, last in places]
    return int(merged_spans(np.array(totals, np.uint64)))


def _total(tensor: torch.Tensor, mine: Box, piece: ShardPiece, first: int, last: int) -> int:
    """The same for the bytes ``first`` to ``last`` of the part: those of other ranks count as zeros."""
    (offset, extent), (low, size) = piece.box, piece.common
    if not extent:
        return int(unfinished(raw_digest(bytes_of(tensor.cpu())[first:last]), last - first))
    row = math.prod(extent[1:]) * tensor.itemsize
    top, bottom = first // row, -(-last // row)  # rows of the part that the bytes are in
    begin, end = max(offset[0] + top, low[0]), min(offset[0] + bottom, low[0] + size[0])
    if begin >= end:
        return 0
    rows = torch.zeros((bottom - top, *extent[1:]), dtype=tensor.dtype)
    common = (begin, *low[1:]), (end - begin, *size[1:])
    place = (offset[0] + top, *offset[1:]), tuple(rows.shape)
    rows[within(common, place)] = tensor[within(common, mine)].cpu()
    return int(unfinished(raw_digest(bytes_of(rows)[first - top * row : last - top * row]), last - first))


@functools.lru_cache(maxsize=1 << 16)
def _key(text: str) -> int:
    return int.from_bytes(stored_digest(text.encode())[:8], "little") | 1
