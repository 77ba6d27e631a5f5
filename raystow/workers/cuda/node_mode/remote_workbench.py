"""What a training process needs where the node worker codes its tensors: it copies them into device memory that both processes
have mapped, and takes their digests. Nothing else of a save happens on its GPU.

What is said of device memory, all of it in messages with the ``device``'s UUID:

    training process                                node worker
    {open: codec}                                   {handle, slots, slot}: of the ring that it has made and signed
    {seen: what the ring is signed with here}       {}
    {lend: first}: slots of the ring in host memory {codec, why}
    {on_device: {slot, chunks}}, for each slot      {device_free: slot}

Instead of an answer there may be a ``problem``. Where that comes before anything was lent, the training process codes itself.
"""

from __future__ import annotations

import functools
import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ....storage.errors import RaystowError, SaveFailed
from ...ipc.offers import Named
from ...ipc.ring import ALIGN
from ...ipc.wire import Message
from ..choice import Choice
from ..digests import digests
from ..encoding.following import Following, Lookout, follow
from ..workbench import Workbench
from .device_ring import DeviceRing

logger = logging.getLogger(__name__)

Announce = Callable[[Message], None]

_FIRST = -5  # the highest priority: these few milliseconds are what the training's fence waits for


@dataclass(frozen=True)
class _Mapped:
    """A device's ring, as it is mapped here. ``free``: its slots that may be filled."""

    uuid: str
    ring: DeviceRing
    stream: Any
    free: deque[int]
    choice: Choice


class _Refused(Exception):
    """The node worker cannot code on a device, or cannot be handed anything there."""


class RemoteWorkbench:
    """A ``Workbench`` whose work is done by the node worker.

    ``send`` and ``receive``: messages to it, and what it says of devices. ``lend`` leaves the node worker its part of the ring in
    host memory, and says from which slot on. ``local`` makes what codes here instead, where the node worker cannot.
    """

    def __init__(
        self,
        codec: str,
        *,
        send: Callable[[Message], None],
        receive: Callable[[], Message],
        lend: Callable[[], int],
        local: Callable[[], Workbench],
    ) -> None:
        self._codec, self._send, self._receive, self._lend, self._make_local = codec, send, receive, lend, local
        self._mapped: dict[int, _Mapped] = {}
        self._lookouts: dict[int, Lookout] = {}
        self._lent: int | None = None
        self._local: Workbench | None = None

    def choice(self, device: int) -> Choice:
        """What chunks of a device are coded with. The first call for a device maps its ring, and puts it to the test."""
        if self._local is None and device not in self._mapped:
            try:
                self._mapped[device] = self._map(device)
            except _Refused as refusal:
                name = f"GPU {device} ({_uuid(device)})"
                if self._lent is not None:  # the memory to code here is not there any more
                    raise SaveFailed(str(refusal), subject=name, remedy='use compress_in="training"') from refusal
                logger.warning(
                    'compress_in="node" cannot be had for %s: %s. This training process compresses instead: that takes device '
                    "memory and computing time which it was to be spared. Nothing is saved less safely.",
                    name,
                    refusal,
                )
                self._local = self._make_local()
        return self._mapped[device].choice if self._local is None else self._local.choice(device)

    def follow(self, device: int, followers: Sequence[Any], *, after: Any) -> Following:
        """See ``Workbench.follow``."""
        return follow(self._lookouts, device, followers, after=after)

    def encode(
        self,
        device: int,
        pieces: Sequence[Any],
        *,
        after: Any,
        on_read: Callable[[], None],
        announce: Announce,
        urgent: Callable[[], bool] = lambda: False,
        meanwhile: Callable[[], None] = lambda: None,
        named: Named | None = None,
        patient: bool = True,
    ) -> None:
        """Hand over all chunks; returns when they have been read. See ``Workbench.encode``. What is coded by the node worker is
        never stored as a difference."""
        if self._local is not None:
            encode = functools.partial(self._local.encode, device, pieces, after=after, on_read=on_read, announce=announce)
            encode(urgent=urgent, meanwhile=meanwhile, named=named, patient=patient)
            return
        meanwhile()
        mapped = self._mapped[device]
        with torch.cuda.device(device), torch.cuda.stream(mapped.stream):
            try:
                mapped.stream.wait_event(after)
                sums = digests(pieces, torch.device("cuda", device))
                for batch in _batches(pieces, mapped.ring.slot_size):
                    self._fill(mapped, pieces, batch, sums, announce)
            finally:
                mapped.stream.synchronize()  # also after an error: the tensors may go now
        on_read()

    def close(self) -> None:
        """Unmap the device memory."""
        for mapped in self._mapped.values():
            try:
                mapped.ring.close()
            except RaystowError as error:
                logger.warning("a ring on GPU %s could not be unmapped: %s", mapped.uuid, error)
        self._mapped.clear()
        self._lookouts.clear()
        if self._local is not None:
            self._local.close()

    def _fill(
        self,
        mapped: _Mapped,
        pieces: Sequence[Any],
        batch: list[tuple[int, int]],
        sums: torch.Tensor,
        announce: Announce,
    ) -> None:
        """Copy the chunks of a batch (number, place in the slot) into a slot, and announce them when they are there."""
        slot = self._take(mapped)
        try:
            start = mapped.ring.address + slot * mapped.ring.slot_size
            for i, at in batch:
                source = pieces[i].address
                copy = pieces[i].gather() if source is None else None  # its memory is used again on this stream only
                mapped.ring.write(start + at, source if copy is None else copy.data_ptr(), pieces[i].nbytes)
            mapped.stream.synchronize()
            rows = [
                {**pieces[i].describe(), "at": at, "nbytes": pieces[i].nbytes, "planes": pieces[i].planes, "sum": int(sums[i])}
                for i, at in batch
            ]
            announce({"on_device": {"device": mapped.uuid, "slot": slot, "chunks": rows}})
        except BaseException:
            mapped.free.append(slot)
            raise

    def _take(self, mapped: _Mapped) -> int:
        while not mapped.free:
            self._note_free(self._receive())
        return mapped.free.popleft()

    def _note_free(self, message: Message) -> None:
        for mapped in self._mapped.values():
            if mapped.uuid == message["device"]:
                mapped.free.append(message["device_free"])

    def _map(self, device: int) -> _Mapped:
        """Open the ring that the node worker makes on a device, see whether it is the same memory, and learn the codec."""
        uuid, stream = _uuid(device), torch.cuda.Stream(device, priority=_FIRST)
        offer = self._ask({"device": uuid, "open": self._codec})
        ring, seen, problem = None, "", ""
        with torch.cuda.device(device), torch.cuda.stream(stream):
            try:
                ring = DeviceRing.open(device, offer["handle"], offer["slots"], offer["slot"])
                seen = ring.signature()
            except Exception as error:
                problem = f"its device memory cannot be used here: {error}"
        try:
            self._ask({"device": uuid, "seen": seen})
            assert ring is not None
            if self._lent is None:
                self._lent = self._lend()
            answer = self._ask({"device": uuid, "lend": self._lent})
        except BaseException as error:
            if ring is not None:
                ring.close()
            if problem and isinstance(error, _Refused):
                raise _Refused(problem) from error  # the node worker knows only that nothing was seen
            raise
        return _Mapped(uuid, ring, stream, deque(range(ring.slots)), Choice(answer["codec"], answer["why"]))

    def _ask(self, question: Message) -> Message:
        self._send(question)
        while "device_free" in (answer := self._receive()):
            self._note_free(answer)
        if "problem" in answer:
            raise _Refused(answer["problem"])
        return answer


def _uuid(device: int) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)


def _batches(pieces: Sequence[Any], slot_size: int) -> Iterator[list[tuple[int, int]]]:
    """As many chunks (number, place in the slot) as a slot takes."""
    batch, used = list[tuple[int, int]](), 0
    for i, piece in enumerate(pieces):
        if piece.nbytes > slot_size:
            raise SaveFailed(f"a chunk of {piece.nbytes} bytes does not fit into a slot of {slot_size}", subject=piece.name)
        if batch and used + piece.nbytes > slot_size:
            yield batch
            batch, used = [], 0
        batch.append((i, used))
        used += -(-piece.nbytes // ALIGN) * ALIGN
    if batch:
        yield batch
