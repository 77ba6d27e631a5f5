"""Brings up what chunks are differences to: bytes in this node's memory, to planes in device memory, a batch at a time.

Threads copy the bytes of a batch into a *lane* of pinned memory. They go up in one copy, and are decoded as far as planes, if
the node worker has not done that: whoever reads the chunks puts the words together for himself. There are a few lanes, so while
one is read others are filled.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ....storage.coding.kernels import Bytes
from .. import moving
from ..nvcomp import Codec
from .copying import copy
from .loads import Former, Load, evenly, pieces

LANES = 3
_SHARES = max(1, min(8, (os.cpu_count() or 1) // 4))  # threads that fill a lane: each moves some GB/s, and the link tens of them


@dataclass(frozen=True)
class _Share:
    """What one thread brings to a lane of pinned memory: ``pieces`` for ``copy``, and each chunk with its bytes there."""

    pieces: Any
    formers: list[tuple[Former, Bytes]]


class Lanes:
    """``LANES`` lanes of ``size`` bytes each, on one device, once they ``settle``. Those that use them say in turn, of load after
    load: ``filled``, ``bring``, ``was_read``."""

    def __init__(self, device: torch.device, size: int) -> None:
        self.size, self._device = size, device
        self.memory = torch.empty(0, dtype=torch.uint8, device=device)
        self._host: list[torch.Tensor] = []
        self._stream = torch.cuda.Stream(device, priority=-1)  # as soon as what waits for it
        self._pool = ThreadPoolExecutor(LANES * _SHARES, "raystow-base")
        self._scratch = torch.empty(0, dtype=torch.uint8, device=device)
        self._filling: dict[int, list[Future[None]]] = {}
        self._up: list[Any] = [None] * LANES  # when what was copied up last has left pinned memory
        self._read: list[Any] = [None] * LANES  # when the planes were read last
        self._loads: list[Load] = []
        self._shares: list[list[_Share]] = []  # of each load

    @property
    def settled(self) -> bool:
        """Whether they have memory."""
        return bool(self._host)

    def settle(self, memory: torch.Tensor) -> None:
        """Lie in ``memory`` (``LANES * size`` bytes of the device), and pin as much of the host's."""
        self.memory = memory
        self._host = [torch.empty(self.size, dtype=torch.uint8, pin_memory=True) for _ in range(LANES)]

    def address(self, number: int) -> int:
        """Where the lane of a load begins."""
        return int(self.memory.data_ptr()) + number % LANES * self.size

    def take(self, loads: list[Load]) -> None:
        """These are brought up in every save, from now on; their tables go to the device."""
        self._loads = loads
        self._shares = [list(_shared(one, self._host[number % LANES])) for number, one in enumerate(loads)]
        rows = [table for one in loads for table in (one.moves, one.unpacks, one.planes, *one.streams.values())]
        if not rows:
            return
        flat = torch.from_numpy(np.concatenate([table.reshape(-1) for table in rows])).to(self._device)
        parts = iter([part.view(table.shape) for part, table in zip(flat.split([t.size for t in rows]), rows, strict=True)])
        scratch = 0
        for one in loads:
            one.moves, one.unpacks, one.planes = next(parts), next(parts), next(parts)
            one.streams = {key: next(parts) for key in one.streams}
            scratch = max([scratch, *(_codec(key).decoding_scratch(len(t[0])) for key, t in one.streams.items())])
        self._scratch = torch.empty(scratch, dtype=torch.uint8, device=self._device)

    def begin(self) -> None:
        """Begin to fill the first lanes."""
        for number in range(min(LANES, len(self._loads))):
            self._fill(number)

    def filled(self, number: int, seconds: float) -> bool:
        """Whether a load lies in pinned memory; waits for so long. ``Damaged`` if its bytes are wrong."""
        done, missing = wait(self._filling[number], seconds)
        for future in done:
            future.result()
        return not missing

    def bring(self, number: int) -> tuple[torch.Tensor, Any]:
        """Enqueue the way up of a load that is ``filled``: what ``kernels.split`` takes as ``bases``, and the event after which
        their planes lie in device memory."""
        one, lane = self._loads[number], number % LANES
        with torch.cuda.stream(self._stream):
            if self._read[lane] is not None:
                self._stream.wait_event(self._read[lane])
            memory = self.memory[lane * self.size : lane * self.size + one.nbytes]
            memory.copy_(self._host[lane][: one.nbytes], non_blocking=True)
            self._up[lane] = self._stream.record_event()
            moving.move(one.moves, one.longest)
            for key, table in one.streams.items():
                decoded = torch.empty((2, len(table[0])), dtype=torch.int64, device=self._device)
                status = decoded[1].view(torch.int32)  # nobody looks: what was not decoded has another digest
                _codec(key).decompress(*table, decoded=decoded[0], scratch=self._scratch, status=status)
            moving.unpack7(one.unpacks, one.largest)
            return one.planes, self._stream.record_event()

    def was_read(self, number: int, event: Any) -> None:
        """From this event on nobody reads the planes of a load: its lane can take another one."""
        del self._filling[number]
        self._read[number % LANES] = event
        if number + LANES < len(self._loads):
            self._fill(number + LANES)

    def end(self) -> None:
        """The save is over: wait for what is being copied still."""
        for futures in self._filling.values():
            for future in futures:
                future.cancel()
            wait(futures)
        self._filling.clear()

    def close(self) -> None:
        """Give the memory back."""
        self.end()
        self._pool.shutdown()
        self._loads.clear()
        self._shares.clear()
        self._host.clear()
        del self.memory, self._scratch

    def _fill(self, number: int) -> None:
        up = self._up[number % LANES]

        def fill(share: _Share) -> None:
            if up is not None:
                up.synchronize()  # what lay there before
            copy(share.pieces)
            for former, there in share.formers:
                former.check(there)

        self._filling[number] = [self._pool.submit(fill, share) for share in self._shares[number]]


def _shared(one: Load, host: torch.Tensor) -> Iterator[_Share]:
    """What is copied to a lane of pinned memory, by some threads: as much by each, but that each checks chunks that it has copied
    itself."""
    sound = [place for place in one.formers if place[0].sound]
    for rows in evenly(pieces(sound, host.data_ptr()), _SHARES):
        yield _Share(rows, [])
    others = [place for place in one.formers if not place[0].sound]
    for i in range(min(_SHARES, len(others))):
        mine = others[i::_SHARES]
        copies = [(former, host.numpy()[start : start + former.chunk.coding.size]) for former, start in mine]
        yield _Share(pieces(mine, host.data_ptr()), copies)


@functools.cache
def _codec(key: tuple[str, int]) -> Codec:
    return Codec(*key)
