"""The training process side of staging with a node worker that fails or does not answer."""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest
from helpers.staged_plan import INFO, OPENING, REQUEST, Chunk, Plan
from msgspec.structs import replace

from raystow.orchestrator.client.node_connection import NodeConnection
from raystow.storage.errors import ClusterError, RaystowError, SaveFailed
from raystow.storage.format.root import Entry
from raystow.storage.runtime.clock import SYSTEM
from raystow.workers.gpu.encode.derived_check import DerivedCheck
from raystow.workers.gpu.encode_request import EncodeRequest
from raystow.workers.protocol.messages import ComparedChunks, OpenSession, SessionOpened, SlotsFilled
from raystow.workers.protocol.unix_channel import Connection, Listener
from raystow.workers.shm.ring import SLOT, Ring
from raystow.workers.staging import gpu
from raystow.workers.staging.client import Staging
from raystow.workers.staging.host import stage_host
from raystow.workers.staging.plan import SaveOrder
from raystow.workers.staging.progress import SaveProgress
from raystow.workers.staging.staging_slots import StagingSlots


@pytest.fixture
def frozen() -> Iterator[str]:
    """Yield the address of a node worker that returns a ring of two slots, and then neither reads nor answers."""
    listener = Listener(f"raystow-test-{SYSTEM.token()}")
    held: list[Connection] = []

    def accept() -> None:
        while (connection := listener.accept()) is not None:
            connection.handshake("the training process")
            connection.receive(OpenSession)
            ring = Ring.create(2 * SLOT)
            connection.send(SessionOpened(ring.slots, ring.slot_size, 0.0, bytes(32)), fd=ring.fd)
            held.append(connection)

    thread = threading.Thread(target=accept)
    thread.start()
    yield listener.name
    for connection in held:
        connection.close()
    listener.close()
    thread.join()


def test_a_node_worker_that_opens_no_session_is_an_error() -> None:
    """The connection is closed then."""
    listener, ended = Listener(f"raystow-test-{SYSTEM.token()}"), queue.SimpleQueue[Any]()

    def accept() -> None:
        connection = listener.accept()
        assert connection is not None
        connection.handshake("the training process")
        connection.receive(OpenSession)
        ended.put(connection.receive(OpenSession))
        connection.close()

    thread = threading.Thread(target=accept)
    thread.start()
    with pytest.raises(ClusterError, match=r"did not answer within 0\.1 s"):
        Staging(listener.name, OPENING, patience=0.1)
    assert ended.get(timeout=60) is None
    thread.join()
    listener.close()


def within(seconds: float, work: Callable[[], None]) -> bool:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    return not thread.is_alive()


def staged(address: str, chunks: list[Chunk]) -> tuple[Staging, threading.Event, queue.SimpleQueue[Entry | RaystowError]]:
    made, progress = Staging(address, OPENING), SaveProgress(7)
    outcomes: queue.SimpleQueue[Entry | RaystowError] = queue.SimpleQueue()
    made.submit(SaveOrder(REQUEST, Plan(chunks), progress, outcomes.put))
    return made, progress.read, outcomes


def test_close_does_not_wait_for_a_stuck_node_worker(frozen: str) -> None:
    made, done, outcomes = staged(frozen, [Chunk() for _ in range(5)])
    assert not done.wait(0.3)  # three chunks have no slot
    assert within(20, lambda: made.close(patience=0.1))
    assert done.is_set()
    assert isinstance(outcomes.get(timeout=1), SaveFailed)


def test_a_chunk_that_cannot_be_sent_fails_the_save_at_once(frozen: str) -> None:
    made, done, outcomes = staged(frozen, [Chunk(info=object())])
    assert isinstance(outcomes.get(timeout=5), SaveFailed)
    assert done.wait(5)
    assert made.lost
    assert within(20, made.close)


def test_each_slot_of_a_save_that_fails_is_released_once() -> None:
    """Else it would be free twice, and a later save would write two chunks to it at the same time."""
    filled = list[Any]()
    slots = StagingSlots(Ring.create(2 * SLOT), filled.append)
    slots.order = SaveOrder(REQUEST, None, SaveProgress(7), lambda outcome: None, failed=True)
    plan = Plan([Chunk() for _ in range(3)])
    with pytest.raises(SaveFailed):  # the third chunk has no slot
        stage_host(plan, plan, slots, lambda message: None)
    assert [slot for message in filled if isinstance(message, SlotsFilled) for slot in message.slots] == [0, 1]
    slots.ring.close()


def test_slots_that_could_not_be_lent_stay_with_the_process() -> None:
    """The save fails while an earlier one still has slots."""
    slots = StagingSlots(Ring.create(8 * SLOT), lambda message: None)
    slots.order = SaveOrder(REQUEST, None, SaveProgress(7), lambda outcome: None, failed=True)
    earlier = [slots.take() for _ in range(3)]
    with pytest.raises(SaveFailed):
        slots.lend()
    for slot in earlier:
        slots.freed([slot])
    assert slots.free == 8 * SLOT
    assert slots.lend() == 2
    assert slots.free == 2 * SLOT
    slots.ring.close()


@dataclass
class OnGpu(Plan):
    """A plan whose chunks are on a device. ``seen`` records the calls in their order."""

    seen: list[str] = field(default_factory=list)
    ready: dict[int, Any] = field(default_factory=lambda: {0: None})

    @property
    def parts(self) -> dict[Any, Plan]:
        self.seen.append("looked at")
        return {0: self}

    def find_derived(self) -> None:
        self.seen.append("looked for relations")


class IdleEncoder:
    """An encoder that encodes nothing and reports all chunks as read immediately."""

    def choice(self, device: int) -> Any:
        return SimpleNamespace(codec="deflate", why="")

    def follow(self, *_: Any, **__: Any) -> Any:
        return DerivedCheck(None)

    def encode(self, device: int, request: EncodeRequest, *_: Any) -> None:
        request.meanwhile()
        request.on_read()

    def close(self) -> None: ...


class Urgent(threading.Event):
    def __init__(self) -> None:
        super().__init__()
        self.waited_for = threading.Event()

    def wait(self, timeout: float | None = None) -> bool:
        self.waited_for.set()
        return super().wait(timeout)


def test_training_on_a_gpu_has_a_head_start_unless_it_waits(frozen: str) -> None:
    """Training has the head start again after it has waited."""
    plan, over = OnGpu([]), threading.Event()

    class Read(threading.Event):
        def set(self) -> None:
            plan.seen.append("staged")
            # the second call: all chunks were read, and this process has finished its part of the save
            if plan.seen.count("staged") == 2:
                over.set()

    progress, urgent = SaveProgress(7), Urgent()
    progress.read, progress.urgent = Read(), urgent
    made = Staging(frozen, OPENING)
    made.devices.encoder, made.devices.head_start = IdleEncoder(), 3600.0
    made.devices.clock = SimpleNamespace(sleep=lambda seconds: plan.seen.append(f"slept {seconds:.0f}"))  # type: ignore[assignment]
    made.submit(SaveOrder(REQUEST, plan, progress, lambda outcome: None))
    assert urgent.waited_for.wait(5)
    plan.seen.append("fence")
    urgent.set()
    assert over.wait(5)
    assert [what for what, _ in itertools.groupby(plan.seen)] == [
        *("fence", "looked at", "looked for relations", "staged", "slept 3600", "staged")
    ]
    made.close(patience=0.1)


@pytest.mark.parametrize(("before", "after"), [("", "w"), ("w", "")])
def test_a_gpu_tensor_may_change_once_all_chunks_are_read(frozen: str, before: str, after: str) -> None:
    """``before``, ``after``: the changed tensor when the tensors were read, and later, when training may change them."""
    plan, outcomes, progress = OnGpu([]), queue.SimpleQueue[Any](), SaveProgress(7)
    plan.changed = lambda: after if progress.read.is_set() else before  # type: ignore[method-assign]
    made = Staging(frozen, OPENING)
    made.devices.encoder, made.devices.head_start = IdleEncoder(), 0.0
    made.submit(SaveOrder(REQUEST, plan, progress, outcomes.put))
    assert progress.read.wait(5)
    if before:
        error = outcomes.get(timeout=5)
        assert str(error).startswith("w: the tensor changed while it was being saved")
        assert error.__traceback__ is None  # its frames refer to the tensors
    else:
        with pytest.raises(queue.Empty):
            outcomes.get(timeout=0.5)
    made.close(patience=0.1)


def test_an_operation_that_ends_after_the_reading_is_found(frozen: str) -> None:
    """torch counts an operation in place when it ends. It may have changed chunks before they were read."""
    plan, outcomes = Plan([Chunk(), Chunk()]), queue.SimpleQueue[Any]()

    class Ending(threading.Event):
        """The operation ends while the staging waits for the training to do so."""

        def wait(self, timeout: float | None = None) -> bool:
            if timeout:
                plan.changed = lambda: "w"  # type: ignore[method-assign]
            return self.is_set()

    made, progress = Staging(frozen, OPENING), SaveProgress(7)
    progress.urgent = Ending()
    made.submit(SaveOrder(REQUEST, plan, progress, outcomes.put))
    assert str(outcomes.get(timeout=30)).startswith("w: the tensor changed while it was being saved")
    made.close(patience=0.1)


def test_compared_chunks_are_described_if_the_save_has_failed() -> None:
    """They are described to the node worker once, and later saves refer to them."""
    described, posted = ComparedChunks(0, 1, (INFO,)), list[Any]()

    class Comparing(IdleEncoder):
        def compare(self, device: int, pieces: Any, followers: Any, base: Any, *, after: Any) -> Any:
            order.failed = True  # the node worker has refused the save, while the GPU was waited for
            return SimpleNamespace(pieces=pieces, followers=followers, messages=[described])

        def encode(self, *_: Any) -> None:
            order.check()

    order = SaveOrder(replace(REQUEST, delta=1), OnGpu([]), SaveProgress(7), lambda outcome: None)
    devices = gpu.DeviceStaging(StagingSlots(Ring.create(SLOT), posted.append), posted.append, "auto", "training", 0.0)
    devices.encoder = Comparing()

    def post(message: Any) -> None:
        order.check()
        posted.append(message)

    with pytest.raises(SaveFailed):
        devices.stage(order, OnGpu([]), 0, lambda grace: None, post)
    assert posted == [described]


def test_close_frees_the_rest_if_the_encoder_cannot_close(frozen: str) -> None:
    class Broken(IdleEncoder):
        def close(self) -> None:
            raise RuntimeError("CUDA error")

    made, connection = Staging(frozen, OPENING), NodeConnection(cast(Any, None), cast(Any, (None,) * 3), codec="auto")
    made.devices.encoder = Broken()
    connection._staging = made
    with pytest.raises(RuntimeError, match="CUDA error"):
        connection.reset()
    assert not connection.made, "the next save connects again"
    assert made.connection.fileno() < 0
    assert not hasattr(made.ring, "memory")
