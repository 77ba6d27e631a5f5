"""The transport: what torchft's Manager calls to send a state to replicas that are behind, and to receive one."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import msgspec
import numpy as np
from torchft.checkpointing import transport

from ....storage import background
from ....storage.clock import SYSTEM
from ....storage.coding.kernels import Bytes
from ....storage.errors import Damaged, DeadlineExceeded
from ....storage.extras import check_methods
from ....workers.node.actor import contact_of
from ....workers.protocol.messages import StateHeader
from ....workers.states.state_client import StateClient
from ....workers.states.state_reader import StateReader
from ... import ray_cluster
from ...client.startup import node_address
from ...save.state_tree import State
from .flat_bytes import CHUNK, FlatBytes
from .staged_state import OwnState, build, chunk_digest, describe, head, is_chunk, memory, read_header

logger = logging.getLogger(__name__)

_THREADS = min(8, os.cpu_count() or 1)

check_methods(
    transport.CheckpointTransport, ("metadata", "send_checkpoint", "disallow_checkpoint", "recv_checkpoint", "shutdown")
)


class CheckpointTransport(transport.CheckpointTransport[State]):
    """Send states through the memory of nodes: pass it to torchft's ``Manager`` as ``checkpoint_transport``.

    A replica that is ahead copies its state to its node worker and goes on with its training; it may even die then. A replica
    that is behind reads it from there, and only the chunks that differ from its own tensors; on the same node it maps the
    memory. Each chunk is compared with its digest. Received tensors are in host memory. Ray must be running.

    Args:
        state_dict: The ``state_dict`` function of the Manager. Tensors that it returns are compared with what would be received;
            without it, everything is received.

    Attributes:
        received: Bytes of tensors that the last ``recv_checkpoint`` read from another node.

    Example:
        >>> transport = raystow.torchft.CheckpointTransport(state_dict)
        >>> manager = torchft.Manager(pg, load_state_dict, state_dict, min_replica_size=1, checkpoint_transport=transport)
    """

    def __init__(self, state_dict: Callable[[], State] | None = None) -> None:
        ray_cluster.connect()
        self._state_dict, self._name, self._node = state_dict, SYSTEM.token(), ray_cluster.node_here()
        self._client: StateClient | None = None
        self.received = 0
        background.start("raystow-warm", chunk_digest, np.zeros(CHUNK, np.uint8))  # loads what digests need
        self._connected()

    def metadata(self) -> str:
        """Return the node and the name under which other replicas find the states of this one."""
        self._connected()
        return f"{self._node}/{self._name}"

    def send_checkpoint(self, dst_ranks: list[int], step: int, state_dict: State, timeout: timedelta) -> None:
        """Copy a state to the node worker, for any replica.

        Raises:
            StateError: The state contains something that cannot be sent; the error names it.
            ClusterError: The node worker does not answer, or has not enough memory.
            DeadlineExceeded: The copy took longer than ``timeout``.
        """
        seconds = timeout.total_seconds()
        end = SYSTEM.monotonic() + seconds
        header, flat = describe(state_dict, step)
        size = len(head(header)) + header.size
        self._connected().stage(step, size, seconds, lambda descriptor: _write(header, flat, descriptor, end))

    def disallow_checkpoint(self) -> None:
        """Free the memory of the state that was sent."""
        if self._client is not None:
            self._client.drop()

    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta) -> State:
        """Return the state that another replica has sent, as soon as it has.

        Raises:
            ClusterError: The other replica, or its node, is gone.
            DeadlineExceeded: The state did not come within ``timeout``.
            Damaged: Received bytes do not have their digest.
        """
        seconds = timeout.total_seconds()
        end = SYSTEM.monotonic() + seconds
        own = OwnState(self._state_dict()) if self._state_dict else None
        node, _, sender = metadata.partition("/")
        if node == self._node:
            self.received = 0
            return build(*_mapped(self._connected().map(sender, step, seconds), step), own)
        contact = contact_of(node, seconds)
        with contextlib.closing(StateReader(contact, sender, step, end - SYSTEM.monotonic())) as reader:
            header, start = read_header(reader.read, step)
            receiver = _Receiver(header, reader, start, None if own is None else own.flat(header))
            self.received = _each(receiver.fill, -(-header.size // CHUNK), on_error=reader.close)
        logger.info("received %d of %d bytes of the state of step %d", self.received, header.size, step)
        return build(header, receiver.data, own)

    def shutdown(self, wait: bool = True) -> None:
        """Free the memory of the state that was sent, and disconnect."""
        client, self._client = self._client, None
        if client is not None:
            client.close()

    def _connected(self) -> StateClient:
        """Connect again if the node worker has died: replicas that ask the new one must find this sender."""
        if self._client is None or self._client.lost:
            self._client = StateClient(node_address(), self._name)
        return self._client


class _Receiver:
    """Fills ``data`` from this process's own tensors and, where these differ, from the sender."""

    def __init__(self, header: StateHeader, reader: StateReader, start: int, own: FlatBytes | None) -> None:
        self._header, self._reader, self._start, self._own = header, reader, start, own
        self.data = memory(header.size)

    def fill(self, chunk: int) -> int:
        """Fill a chunk; return how many bytes were received."""
        at = chunk * CHUNK
        target = self.data[at : at + CHUNK]
        # What the digest is computed of is the copy: the training may write to its own tensors meanwhile.
        if self._own is not None and self._own.copy(at, target) and is_chunk(self._header, chunk, target):
            return 0
        self._reader.read(self._start + at, target.data)
        _check(self._header, chunk, target)
        return int(target.size)


def _mapped(whole: Bytes, step: int) -> tuple[StateHeader, Bytes]:
    """Return the header and the bytes of a state in memory, after a check of all digests."""

    def read(start: int, target: memoryview) -> None:
        if start + target.nbytes > whole.size:
            raise Damaged("the header is longer than the memory", subject="the received state")
        target[:] = whole[start : start + target.nbytes].data

    def check(chunk: int) -> int:
        _check(header, chunk, data[chunk * CHUNK : (chunk + 1) * CHUNK])
        return 0

    header, start = read_header(read, step)
    data = whole[start : start + header.size]
    _each(check, -(-header.size // CHUNK))
    return header, data


def _check(header: StateHeader, chunk: int, content: Bytes) -> None:
    if not is_chunk(header, chunk, content):
        raise Damaged(f"chunk {chunk} does not have its digest", subject="the received state")


def _write(header: StateHeader, flat: FlatBytes, descriptor: int, end: float) -> None:
    start, digests = len(head(header)), [b""] * -(-header.size // CHUNK)

    def write(chunk: int) -> int:
        if SYSTEM.monotonic() >= end:
            raise DeadlineExceeded(f"timed out: {chunk} of {len(digests)} chunks were copied in time", subject="the state")
        at = chunk * CHUNK
        part = np.empty(min(CHUNK, header.size - at), np.uint8)
        flat.copy(at, part)
        digests[chunk] = chunk_digest(part)
        _write_all(descriptor, part.data, start + at)
        return int(part.size)

    _each(write, len(digests))
    _write_all(descriptor, memoryview(head(msgspec.structs.replace(header, digests=b"".join(digests)))), 0)


def _write_all(descriptor: int, part: memoryview, at: int) -> None:
    while part.nbytes:
        written = os.pwrite(descriptor, part, at)
        part, at = part[written:], at + written


def _each(do: Callable[[int], int], count: int, *, on_error: Callable[[], None] = lambda: None) -> int:
    """Call ``do`` with each number on several threads; return the sum of the results."""
    with ThreadPoolExecutor(_THREADS, "raystow-states") as pool:
        try:
            return sum(pool.map(do, range(count)))
        except BaseException:
            on_error()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
