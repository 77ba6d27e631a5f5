"""A simulated training process whose chunks a GPU has coded: the ring contains the coded bytes before they are announced."""

from __future__ import annotations

import numpy as np
from msgspec.structs import replace

from helpers.local_cluster import LocalCluster, first_save
from raystow.state.coverage import coverage
from raystow.storage.coding.digest import raw_digest, stored_digest, unfinished
from raystow.storage.coding.kernels import Bytes
from raystow.workers.protocol.messages import (
    STAGING_ANSWERS,
    BatchBytes,
    BeginSave,
    ChunkInfo,
    CodedBatches,
    CodedLayout,
    EndSave,
    SaveContents,
    SaveDone,
    SaveLost,
    SessionOpened,
    SlotsFilled,
    SlotsFree,
    StageCoded,
)
from raystow.workers.protocol.unix_channel import Connection
from raystow.workers.shm.ring import Ring


class CodedRank:
    """A rank with ``chunks`` chunks of ``chunk`` bytes, which are stored raw. Half of each chunk is in one slot and half in the
    slot after it, so that two slots of ``slot`` bytes hold ``slot // chunk * 2`` chunks. ``keep``: bytes of versions that may
    stay in the ring, which has ``slots`` slots besides. Digests of stored bytes are announced, as by a GPU: ``wrong`` ones for
    tests."""

    def __init__(
        self,
        cluster: LocalCluster,
        rank: int,
        ranks: int,
        *,
        chunks: int,
        chunk: int,
        slots: int,
        slot: int,
        keep: int,
        cache: int = 1 << 40,
        wrong: bool = False,
    ) -> None:
        self._name, self._chunks, self._chunk, self._saves, self._wrong = f"w{rank}", chunks, chunk, 0, wrong
        self._digests: dict[int, bytes] = {}  # of the chunk at each place of a slot, if all slots are alike
        opening = replace(cluster.opening(rank, ranks), ring=slots * slot, slot=slot, coded=slots * slot, cache=cache, keep=keep)
        self._opening = opening
        self._connection = Connection.connect(cluster.address(0))
        self._connection.send(opening)
        answer = self._connection.receive(SessionOpened)
        assert answer is not None
        assert answer[1] is not None
        self.ring = Ring(answer[1], answer[0].slots, answer[0].slot_size, kept=answer[0].kept)
        self.free = list(range(self.ring.slots))
        infos = tuple(
            ChunkInfo(self._name, f'["{self._name}"]', "tensor", "uint8", (chunks * chunk,), "weights", (i * chunk,), (chunk,))
            for i in range(chunks)
        )
        zeros = (0,) * chunks
        batches = tuple((i, i + 1, chunk) for i in range(chunks))
        self._connection.send(CodedLayout(0, infos, (chunk,) * chunks, zeros, zeros, zeros, batches))

    def save(self, step: int, data: Bytes | None = None) -> None:
        """Announce all chunks as slots become free, and wait until the version is durable. ``data``: their bytes; None announces
        what is in the slots, which must be the same in all of them; nobody can restore it."""
        self._begin(step)
        done, ended = 0, False
        while not ended:
            while len(self.free) > 1 and done < self._chunks:
                done += self._announce(self.free.pop(), self.free.pop(), done, data)
                if done == self._chunks:
                    self._connection.send(EndSave(self._saves, None, {}))
            received = self._connection.receive(*STAGING_ANSWERS)
            assert received is not None
            match received[0]:
                case SlotsFree(slots):
                    self.free += slots
                case SaveLost() as lost:
                    raise SystemExit(f"the save failed: {lost}")
                case SaveDone():
                    ended = True

    def die(self, step: int, data: Bytes, *, chunks: int) -> None:
        """End during a save, when ``chunks`` chunks are announced."""
        self._begin(step)
        done = 0
        while done < chunks:
            done += self._announce(self.free.pop(), self.free.pop(), done, data)
        self.close()

    def _begin(self, step: int) -> None:
        self._saves += 1
        total = coverage(self._name, "uint8", (self._chunks * self._chunk,))
        request = first_save(self._opening, save=self._saves, step=step, timeout=600.0)
        self._connection.send(BeginSave(request, SaveContents(0, total), ()))

    def _announce(self, first: int, second: int, done: int, data: Bytes | None) -> int:
        """Fill two slots, and return the number of chunks in them."""
        half = self._chunk // 2
        count = min(self.ring.slot_size // half, self._chunks - done)
        batches, digests = list[BatchBytes](), list[bytes]()
        for i in range(count):
            total = done + i
            if data is not None:
                raw = data[(done + i) * self._chunk : (done + i + 1) * self._chunk]
                self.ring.slot(first)[i * half : (i + 1) * half] = raw[:half]
                self.ring.slot(second)[i * half : (i + 1) * half] = raw[half:]
                total = unfinished(raw_digest(raw), self._chunk)
                digests.append(stored_digest(raw))
            else:
                digests.append(self._digest_at(first, i * half, half))
            spans = ((0, first, i * half, half), (half, second, i * half, half))
            batches.append(BatchBytes(done + i, np.uint64(total).tobytes(), (spans,)))
        announced = b"".join(digest[:: -1 if self._wrong else 1] for digest in digests)
        self._connection.send(StageCoded(0, (CodedBatches(tuple(batches), digests=announced),)))
        self._connection.send(SlotsFilled((first, second)))
        return count

    def _digest_at(self, slot: int, start: int, half: int) -> bytes:
        if start not in self._digests:
            part = self.ring.slot(slot)[start : start + half]
            self._digests[start] = stored_digest(part, part)
        return self._digests[start]

    def close(self) -> None:
        """Disconnect, like a process that ends."""
        self._connection.close()
        self.ring.close()
