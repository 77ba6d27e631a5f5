"""Finds the chunks in device memory that have not changed since an earlier version, so that they need not be coded or copied.

Only chunks that were equal in the last two saves are compared, and all in the first two saves. If the training changes all
tensors, the cost is two passes over them in total.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ...state.planned_chunk import PlannedChunk, PlannedDerived
from ...storage.coding.delta import LEAST
from ...storage.coding.digest import SecretKeys, finish
from ..protocol.messages import BaseDigests, ChunkDigests, ComparedChunks
from .digests import Digests
from .uploads import Uploads

_Flags = npt.NDArray[np.bool_]
_Indices = npt.NDArray[np.int64]
_Numbers = npt.NDArray[np.uint64]

_SOON = -1  # stream priority: the encoder waits for the result


@dataclass(frozen=True)
class Remaining:
    """The chunks of a device that must be stored. ``messages`` tell the node worker of the others, and of the digests of all
    chunks that were compared."""

    pieces: Sequence[PlannedChunk]
    followers: Sequence[PlannedDerived]
    messages: Sequence[ComparedChunks | ChunkDigests] = ()


def _is_eligible(chunk: PlannedChunk) -> bool:
    """Return whether a chunk is large enough, stored without rounding, and consists of aligned words of 32 bits."""
    exact = chunk.shard.rule is None if chunk.on_host else chunk.address is not None and chunk.address % 4 == 0
    return exact and chunk.nbytes >= LEAST and chunk.nbytes % 4 == 0


class UnchangedChunks:
    """Finds the unchanged chunks of one device. In each save: ``compare``, then ``note`` with the digests of all coded pieces.

    ``keys``: those of the node worker, whose digests the chunks are compared with.
    """

    def __init__(self, device: torch.device, keys: SecretKeys, uploads: Uploads | None = None) -> None:
        self._device, self._keys, self._uploads = device, keys, uploads
        with torch.cuda.device(self._device):
            self._stream = torch.cuda.Stream(self._device, priority=_SOON)
        self._serial = 0
        self._pieces: Sequence[PlannedChunk] = ()
        self._followers: Sequence[PlannedDerived] = ()
        self._identities: list[tuple[object, int]] = []
        self._described = False  # whether the node worker knows the chunks
        self._described_next = False  # whether it does once the messages of this save are sent
        self._chunks: list[Any] = []
        self._sizes: _Indices = np.empty(0, np.int64)
        self._source: _Indices = np.empty(0, np.int64)
        self._eligible: _Flags = np.empty(0, bool)
        self._last: _Numbers = np.empty(0, np.uint64)  # ``raw_digest`` of each piece in the save before; 0 if it is not known
        self._now = self._last
        self._candidates = self._coded = np.empty(0, bool)
        self._digests: tuple[bytes, Digests] | None = None
        self._rest: tuple[bytes, Remaining] | None = None

    def compare(
        self,
        pieces: Sequence[PlannedChunk],
        followers: Sequence[PlannedDerived],
        base: BaseDigests | None,
        *,
        after: torch.cuda.Event,
    ) -> Remaining:
        """Return the chunks that have changed since ``base``. They are read after the event ``after``. Waits for the device."""
        if not (pieces is self._pieces and followers is self._followers):
            self._take_over(pieces, followers)
        self._coded[:] = True
        self._described_next = self._described
        self._now = np.zeros(len(pieces), np.uint64)
        looked = np.concatenate([self._candidates, self._candidates[self._source]]) & self._eligible
        numbers = np.flatnonzero(looked)
        if not len(numbers):
            return Remaining(pieces, followers)
        digests, *halves = self._found(looked, numbers, after)
        secret = np.stack(halves)
        same = np.zeros(len(numbers), bool)
        if base is not None and base.serial == self._serial:
            known = np.frombuffer(base.secret, "<u8").reshape(2, -1)[:, numbers]
            same = (known == secret).all(axis=0) & known.any(axis=0)
        of_pieces = numbers < len(pieces)
        self._now[numbers[of_pieces]] = digests[of_pieces]
        self._coded[numbers[of_pieces & same]] = False
        which, number = (self._device.index or 0, self._serial), base.base if base is not None else 0
        found = numbers.astype("<i8").tobytes(), *(some.astype("<u8").tobytes() for some in (digests, secret)), same.tobytes()
        messages: list[ComparedChunks | ChunkDigests] = [ChunkDigests(*which, number, *found)]
        if not self._described:
            messages.insert(0, ComparedChunks(*which, tuple(chunk.describe() for chunk in self._chunks)))
            self._described_next = True
        gone = np.zeros(len(self._chunks), bool)
        gone[numbers[same]] = True
        rest = self._remaining(gone)
        return Remaining(rest.pieces, rest.followers, messages)

    def note(self, sums: _Numbers) -> None:
        """Note the digests, before ``finish``, of all pieces that were coded (uint64, in their order)."""
        sizes = self._sizes[: len(self._pieces)].astype(np.uint64)
        self._now[self._coded] = finish(sums, sizes[self._coded])
        self._candidates = (self._last == 0) | (self._last == self._now)
        self._last, self._described = self._now, self._described_next

    def _take_over(self, pieces: Sequence[Any], followers: Sequence[Any]) -> None:
        """Reset the state, unless these are the same chunks."""
        identities = [(one.identity, one.nbytes) for one in (*pieces, *(follower.piece for follower in followers))]
        self._pieces, self._followers = pieces, followers
        self._chunks = [*pieces, *(follower.piece for follower in followers)]
        self._digests = self._rest = None
        self._eligible = np.array([_is_eligible(one) for one in self._chunks], bool)
        number_of = {id(piece): number for number, piece in enumerate(pieces)}
        self._source = np.array([number_of[id(follower.source)] for follower in followers], np.int64)
        if identities == self._identities and len(self._last) == len(pieces):
            return
        self._identities, self._serial, self._described = identities, self._serial + 1, False
        self._sizes = np.array([chunk.nbytes for chunk in self._chunks], np.int64)
        self._last = np.zeros(len(pieces), np.uint64)
        self._candidates, self._coded = np.ones(len(pieces), bool), np.ones(len(pieces), bool)

    def _found(self, looked: _Flags, numbers: _Indices, after: torch.cuda.Event) -> _Numbers:
        """Return the digest pairs of these chunks: uint64 [3, numbers], the second number in two halves."""
        key = looked.tobytes()
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            self._stream.wait_event(after)
            if self._digests is None or self._digests[0] != key:
                chunks = [self._chunks[i] for i in numbers]
                self._digests = key, Digests(chunks, self._device, keys=self._keys, uploads=self._uploads)
            sums = self._digests[1].take()
            self._stream.record_event().synchronize()
        found: _Numbers = finish(sums.numpy().view(np.uint64), self._sizes[numbers].astype(np.uint64))
        return found

    def _remaining(self, gone: _Flags) -> Remaining:
        """Return the chunks that are not ``gone``: the lists of the last save if they are equal, so that plans are reused."""
        if not gone.any():
            return Remaining(self._pieces, self._followers)
        key = gone.tobytes()
        if self._rest is None or self._rest[0] != key:
            count = len(self._pieces)
            pieces = [piece for piece, lost in zip(self._pieces, gone[:count], strict=True) if not lost]
            followers = [one for one, lost in zip(self._followers, gone[count:], strict=True) if not lost]
            self._rest = key, Remaining(pieces, followers)
        return self._rest[1]
