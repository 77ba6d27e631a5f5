"""The transport: what torchft's Manager calls to send a state to replicas that are behind, and to receive one."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TypeVar

import numpy as np
from torchft.checkpointing import transport

from ....storage.clock import SYSTEM
from ....storage.coding.kernels import Bytes
from ....storage.errors import Damaged, DeadlineExceeded
from ....storage.extras import check_methods
from ....workers.node.actor import contact_of
from ....workers.protocol.messages import StateHeader
from ....workers.states.state_client import MappedState, StateClient
from ....workers.states.state_reader import StateReader
from ... import ray_cluster
from ...client.startup import node_address
from ...save.state_tree import State
from .flat_bytes import CHUNK, FlatBytes
from .staged_state import (
    OwnState,
    build,
    check_chunks,
    chunk_digest,
    chunks_of,
    describe,
    head,
    memory,
    read_digests,
    read_header,
    tail,
    whole_size,
)

logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")

_THREADS = min(8, os.cpu_count() or 1)
_STEP = 16  # chunks that are staged at a time for other nodes

check_methods(
    transport.CheckpointTransport, ("metadata", "send_checkpoint", "disallow_checkpoint", "recv_checkpoint", "shutdown")
)


class CheckpointTransport(transport.CheckpointTransport[State]):
    """Send states through the memory of nodes: pass it to torchft's ``Manager`` as ``checkpoint_transport``.

    A replica that is ahead copies its state to its node worker and goes on with its training; it may even die then. A replica
    that is behind reads it from there while it is copied, and only the chunks that differ from its own tensors; on the same node
    it maps the memory. Each chunk is compared with its digest. Received tensors are in host memory. Ray must be running.

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
        self._ray = ray_cluster.connect()
        self._state_dict, self._name, self._node = state_dict, SYSTEM.token(), self._ray.node
        self._client: StateClient | None = None
        self.received = 0
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
        write = functools.partial(_write, header, flat, end)
        self._connected().stage(step, whole_size(header), seconds, write)

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
            receiver = _Receiver(header, reader, start)
            if own is not None:
                receiver.copy(own.flat(header))
            self.received = receiver.receive()
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
            self._client = StateClient(node_address(self._ray), self._name)
        return self._client


class _Receiver:
    """Fills ``data`` from this process's own tensors and, where these differ, from the sender."""

    def __init__(self, header: StateHeader, reader: StateReader, start: int) -> None:
        self._header, self._reader, self._start = header, reader, start
        self._found: dict[int, bytes] = {}  # the digest of each chunk that is filled
        self.data = memory(header.size)

    def copy(self, own: FlatBytes) -> None:
        """Fill what there is with tensors of this process."""

        def copy(chunk: int) -> None:
            # The digest is that of the copy: the training may write to its own tensors meanwhile.
            if own.copy(chunk * CHUNK, target := self._chunk(chunk)):
                self._found[chunk] = chunk_digest(target)

        _each(copy, range(chunks_of(self._header)))

    def receive(self) -> int:
        """Receive the other chunks, also while the sender copies its state, and those that differ; return how many bytes."""
        every = range(chunks_of(self._header))
        received = self._receive([chunk for chunk in every if chunk not in self._found])
        digests = read_digests(self._reader.read, self._header, self._start)
        received += self._receive([chunk for chunk in every if self._found[chunk] != digests[chunk]])
        check_chunks([self._found[chunk] for chunk in every], digests)
        return received

    def _receive(self, chunks: Sequence[int]) -> int:
        def receive(chunk: int) -> int:
            target = self._chunk(chunk)
            self._reader.read(self._start + chunk * CHUNK, target.data)
            self._found[chunk] = chunk_digest(target)
            return int(target.size)

        return sum(_each(receive, chunks, on_error=self._reader.close))

    def _chunk(self, chunk: int) -> Bytes:
        return self.data[chunk * CHUNK : (chunk + 1) * CHUNK]


def _mapped(state: MappedState, step: int) -> tuple[StateHeader, Bytes]:
    """Return the header and the bytes of a state in memory, after a check of all digests, which begins while it is staged."""

    def read(start: int, target: memoryview) -> None:
        end = start + target.nbytes
        if end > state.content.size:
            raise Damaged("the header is longer than the memory", subject="the received state")
        state.wait(end)
        target[:] = state.content[start:end].data

    def staged() -> Iterator[int]:
        for chunk in range(chunks_of(header)):
            if chunk % _STEP == 0:
                state.wait(start + min((chunk + _STEP) * CHUNK, header.size))
            yield chunk

    header, start = read_header(read, step)
    data = state.content[start : start + header.size]
    found = _each(lambda chunk: chunk_digest(data[chunk * CHUNK : (chunk + 1) * CHUNK]), staged())
    check_chunks(found, read_digests(read, header, start))
    return header, data


def _write(header: StateHeader, flat: FlatBytes, end: float, descriptor: int, staged: Callable[[int], None]) -> None:
    start, count, lock = len(head(header)), chunks_of(header), threading.Lock()
    buffers = threading.local()  # new memory for each chunk takes longer to prepare than to fill

    def write(chunk: int) -> bytes:
        if SYSTEM.monotonic() >= end:
            raise DeadlineExceeded(f"timed out: {chunk} of {count} chunks were copied in time", subject="the state")
        at = chunk * CHUNK
        if not hasattr(buffers, "chunk"):
            buffers.chunk = np.empty(CHUNK, np.uint8)
        part = buffers.chunk[: header.size - at]
        flat.copy(at, part)
        digest = chunk_digest(part)
        with lock:  # writes to one file wait for each other: here they take no CPU time meanwhile
            _write_all(descriptor, part.data, start + at)
        return digest

    def written(chunks: int) -> None:
        if chunks % _STEP == 0:
            staged(start + min(chunks * CHUNK, header.size))

    _write_all(descriptor, memoryview(head(header)), 0)
    staged(start)
    digests = _each(write, range(count), then=written)
    _write_all(descriptor, memoryview(tail(digests)), start + header.size)


def _write_all(descriptor: int, part: memoryview, at: int) -> None:
    while part.nbytes:
        written = os.pwrite(descriptor, part, at)
        part, at = part[written:], at + written


def _each(
    do: Callable[[int], _Result],
    numbers: Iterable[int],
    *,
    then: Callable[[int], None] = lambda done: None,
    on_error: Callable[[], None] = lambda: None,
) -> list[_Result]:
    """Call ``do`` with each number on several threads; return the results. ``then`` gets how many of the first ones there are."""
    results = list[_Result]()
    with ThreadPoolExecutor(_THREADS, "raystow-states") as pool:
        try:
            for result in pool.map(do, numbers):
                results.append(result)
                then(len(results))
        except BaseException:
            on_error()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return results
