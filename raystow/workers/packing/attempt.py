"""One attempt on one node: codes the chunks of its ranks, stores packs and fragment, and receives the outcome."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FuturesTimeout
from dataclasses import dataclass

from msgspec.structs import replace

from ...state.chunk_info import RangeInfo
from ...state.coverage import coverage, total
from ...storage.coding.chunk import Coding
from ...storage.coding.derived import Derivation
from ...storage.coding.kernels import Bytes
from ...storage.coding.rounded import Rounded
from ...storage.commit.committer import UNKNOWN
from ...storage.errors import DeadlineExceeded, Fenced, OutcomeUnknown, RaystowError, SaveFailed, StoreError
from ...storage.format.manifest import Chunk, Value
from ...storage.format.parts import is_part
from ...storage.format.rank_spans import member_text, ranks_text
from ...storage.format.root import Entry
from ...storage.limits import MAX_ROWS, MAX_TEXT
from ...storage.log import about
from ...storage.object_store import ObjectStore
from ...storage.runtime import background
from ...storage.runtime.batches import batches
from ...storage.runtime.clock import SYSTEM
from ...storage.runtime.gc_pause import uncollected
from ...storage.runtime.memory_budget import MemoryBudget
from ...storage.runtime.spans import NO_SPAN, Span, span
from ..cache.base_version import BaseVersion, KnownChunks
from ..protocol.coordinator_client import CoordinatorClient
from ..protocol.messages import (
    PLACEMENT,
    STAGES,
    AttemptKey,
    AttemptStatus,
    AwaitRanks,
    ChunkInfo,
    PartFailed,
    PartStaged,
    PartStored,
    RankFinished,
    ReplicaQuestions,
    Stage,
    Ticket,
    shortened,
)
from ..shm.coded_layout import CodedChunk
from ..shm.slots import Slots
from ..thread_priority import give_way
from .chunk_writer import ChunkWriter, Coded, release_all
from .held_digests import HeldDigests
from .packer import NOT_IN_TIME, PACK, Keep, Packer, keep_nothing
from .stale_state import OptimizerWatch
from .stored_boxes import StoredBoxes

logger = logging.getLogger(__name__)

_UPLOADS = max(4, min(32, os.cpu_count() or 1))
_SOONER = 5.0  # seconds before the coordinator's timeout, since only the node knows which object was not stored
Outcome = Entry | RaystowError
Listener = Callable[[Outcome, Sequence[str]], None]
"""Receives the outcome of a save, and warnings for its training process."""


@dataclass(frozen=True)
class Executors:
    """Shared by all attempts on a node: threads that code chunks, threads that pack chunks coded by a GPU (``sealers``), and the
    memory budget of the first."""

    coders: Executor
    sealers: Executor
    budget: MemoryBudget


class NodeAttempt:
    """Takes part in an attempt: ``join``, ``add`` and ``finished`` for each rank. ``base``: the version that chunks are compared
    with. ``trace``: of the save's span."""

    def __init__(
        self,
        store: ObjectStore,
        port: CoordinatorClient,
        ticket: Ticket,
        executors: Executors,
        watch: OptimizerWatch,
        keep: Keep = keep_nothing,
        base: BaseVersion | None = None,
    ) -> None:
        self.uri, self.id, self.name, self.trace = store.uri, ticket.id, ticket.attempt, ticket.trace
        self._span = Span("save.node", ticket.trace, node=ticket.node, repository=store.uri)
        self._ticket = ticket = replace(ticket, trace=self._span.trace)  # the parent of what this node does
        self._store, self._port, self._executors = store, port, executors
        self._watch, self._keep, self.base = watch, keep, base
        self._log = about(logger, repository=store.uri, version=ticket.id, attempt=ticket.attempt, step=ticket.step)
        # Its own: uploads of an attempt that has failed may hang until the limits of requests, and must not hold up the next one.
        self._uploads = ThreadPoolExecutor(_UPLOADS, "raystow-upload", initializer=give_way)
        self._packer = Packer(store, ticket, uploads=self._uploads, on_error=self._upload_failed, keep=keep)
        self._writer = ChunkWriter(self._packer, executors.budget, ticket, base)
        self._lock = threading.Lock()
        self._values: dict[tuple[str, str, str], list[int]] = {}
        self._covered: dict[int, int] = defaultdict(int)
        self._coding: dict[int, int] = defaultdict(int)  # rank -> tasks of coders and sealers
        self._ranks: set[int] = set()
        self._stall: float | None = None
        self._rounded: dict[str, Rounded] = {}
        self._held, self._boxes, self._warned = HeldDigests(), StoredBoxes(), set[str]()
        self._staged: set[int] = set()
        self._code_spans: dict[int, Span] = {}  # by rank: until all of its chunks are coded
        self._listeners: list[Listener] = []
        self._on_warning: dict[int, Callable[[str], None]] = {}
        self._ended: tuple[Outcome, Sequence[str]] | None = None
        self._reported = False  # to the coordinator, that everything is stored
        self._coded = self._rows = self._planned = self._text = 0
        self.raw = 0
        """Raw bytes of the chunks that have been packed."""
        self.over = False
        timeout = ticket.timeout - min(_SOONER, ticket.timeout / 10)
        self._until = SYSTEM.monotonic() + timeout
        self._alarm = background.after(timeout, "raystow-alarm", self._too_late)
        background.start("raystow-attempt", self._drive)

    def join(
        self,
        rank: int,
        values: Iterable[tuple[str, str, str]],
        on_end: Listener,
        on_warning: Callable[[str], None] = lambda text: None,
        *,
        chunks: int = 0,
        text: int = 0,
    ) -> None:
        """Add a rank with its value rows (name, path, JSON text), the number of ``chunks`` that it will add, and the length of
        their names and paths. ``on_warning``: receives problems while the save goes on."""
        with self._lock:
            self._ranks.add(rank)
            self._code_spans[rank] = Span("save.code", self._span.trace, rank=rank)
            self._on_warning[rank] = on_warning
            self._planned += chunks
            self._text += text
            for row in values:
                if row not in self._values:
                    self._text += sum(map(len, row))
                self._values.setdefault(row, []).append(0 if is_part(rank) else rank)
        self.on_end(on_end)
        self._check_rows(self._planned)
        if self._text > MAX_TEXT:
            what = f"the names and plain values of this node's chunks take more than {MAX_TEXT >> 20} MiB"
            self.fail(f"{what}: save on more nodes, or give tensors shorter names")

    def on_end(self, listener: Listener) -> None:
        """Call the listener with the outcome, at once if the attempt has ended."""
        with self._lock:
            self._listeners.append(listener)
            ended = self._ended
        if ended is not None:  # it had ended before
            listener(*ended)

    def add(self, rank: int, chunks: Sequence[tuple[Chunk, Bytes]], done: Callable[[], None]) -> None:
        """Code and pack chunks, each with its raw bytes, one after another; ``done`` is called when the bytes may change. Waits
        for the budget."""
        if self.over:
            done()
            return
        try:
            self._executors.budget.acquire(sum(raw.size for _, raw in chunks), self._relieve)
        except SaveFailed:
            done()
            return
        with self._lock:
            self._coding[rank] += 1
        background.submit(self._executors.coders, "raystow-code", self._code, rank, chunks, done)

    def _relieve(self) -> None:
        """Upload open packs, so that their bytes are released. Raises ``SaveFailed`` if the attempt has ended meanwhile."""
        if self.over:
            raise SaveFailed("it was given up")
        self._packer.flush()

    def add_coded(self, rank: int, chunks: Sequence[Coded]) -> None:
        """Pack coded chunks, which may have their ``stored_digest``. A task packs as many as fill a pack: threads share locks,
        above all the interpreter's, and passing these on for each chunk takes longer than packing it."""
        waiting = deque(batches(chunks, lambda one: one[0].stored, PACK))
        try:
            while waiting:
                with self._lock:
                    self._coding[rank] += 1
                background.submit(self._executors.sealers, "raystow-seal", self._seal, rank, waiting.popleft())
        except BaseException:  # no thread can be started; the task itself is in the queue of the others
            release_all(itertools.chain.from_iterable(waiting))
            raise

    def add_raw(self, rank: int, chunks: Sequence[Coded]) -> None:
        """Pack chunks whose elements are stored as they are, each in one part, which is in use until it is stored."""
        with self._lock:
            self._coding[rank] += 1
        try:
            background.submit(self._executors.coders, "raystow-code", self._pack_raw, rank, chunks)
        except BaseException:
            release_all(chunks)
            raise

    def add_derived(self, rank: int, chunk: Chunk) -> None:
        """Add a chunk that is derived from another chunk of this rank, which is also added, before or after."""
        self._writer.add_derived(chunk)
        self._cover(rank, chunk)

    def note(self, chunk: Chunk, second: int) -> None:
        """Remember the second number of ``digest_pair`` of a chunk that ``add_coded`` gets later."""
        self._writer.note(chunk, second)

    def refer(self, rank: int, chunk: Chunk, second: int, base: KnownChunks | None) -> None:
        """Add a chunk that is the same as in the version ``base``."""
        try:
            self._cover(rank, self._writer.refer(chunk, second, base))
        except SaveFailed as error:
            self.fail(str(error))

    def known(self, attempt: AttemptKey) -> KnownChunks:
        """This node's rows of the attempt, which is version ``attempt`` now, for later saves to refer to."""
        return self._writer.known(attempt)

    def status(self) -> AttemptStatus:
        """Return the progress of this node."""
        with self._lock:
            ranks = {stage: tuple(r for r in sorted(self._ranks) if self._stage(r) == stage) for stage in STAGES}
            ticket = self._ticket
            return AttemptStatus(ticket.id, ticket.attempt, ticket.step, ranks, self.raw, self._coded, self._reported)

    def _stage(self, rank: int) -> Stage:
        if rank not in self._staged:
            return "staging"
        return "coding" if self._coding[rank] else "coded"

    def flush(self) -> None:
        """Upload open packs, since memory is short."""
        self._packer.flush()

    def stalled(self, seconds: float | None) -> None:
        """Note for how many seconds the save has stalled a rank; None if unknown."""
        with self._lock:
            if seconds is not None:
                self._stall = max(seconds, self._stall or 0.0)

    def rounded(self, found: Mapping[str, Rounded]) -> None:
        """Note the effect of rounding on a rank's part of tensors, by name."""
        with self._lock:
            for name, one in found.items():
                self._rounded[name] = self._rounded[name] | one if name in self._rounded else one

    def compare(self, rank: int, groups: Mapping[int, Sequence[RangeInfo]], digests: Mapping[int, bytes]) -> None:
        """Note the digests of what a rank compares with others: see ``HeldDigests.add``."""
        with self._lock:
            self._held.add(rank, groups, digests)

    def finished(self, rank: int) -> None:
        """Note that all chunks of a rank have been added."""
        with self._lock:
            self._staged.add(rank)
            ready = not self._coding[rank]
        if ready:
            self._report(rank)

    def fail(self, reason: str) -> None:
        """Report a failure to the coordinator, which then ends the attempt on all nodes."""
        if not self.over:
            self._tell_failed(reason)

    def _tell_failed(self, reason: str) -> None:
        try:
            self._port.ask(PartFailed(self._ticket, shortened(reason)))
        except RaystowError as error:
            self._log.warning("could not tell the coordinator that attempt %d failed: %s", self._ticket.id, error)

    def _upload_failed(self, error: BaseException) -> None:
        self.fail(self._not_stored(error))

    def _not_stored(self, error: BaseException) -> str:
        ranks = sorted(self._ranks)
        who = ranks_text(ranks) if is_part(ranks[-1]) else f"ranks {ranks}"
        return f"the shards of {who} could not be stored: {error}"

    def _too_late(self) -> None:
        """Report before the timeout that an object was not stored."""
        if late := self._packer.unstored():
            self.fail(self._not_stored(DeadlineExceeded(NOT_IN_TIME, subject=late[0])))

    @uncollected()
    def _code(self, rank: int, chunks: Sequence[tuple[Chunk, Bytes]], done: Callable[[], None]) -> None:
        """Code and pack chunks, unless the attempt has ended."""
        with self._task_of(rank):
            for chunk, raw in chunks:
                if self.over:
                    self._executors.budget.release(raw.size)
                    continue
                with self._failing(rank, repr(chunk.name)):
                    self._cover(rank, self._writer.encode(chunk, raw))
            done()

    def _seal(self, rank: int, chunks: Sequence[Coded]) -> None:
        """Pack chunks that a GPU has coded."""
        with self._task_of(rank), self._failing(rank, f"{len(chunks)} chunks from {chunks[0][0].name!r} on"):
            self._cover(rank, *self._writer.append(rank, chunks))

    def _pack_raw(self, rank: int, chunks: Sequence[Coded]) -> None:
        """Compute the digests of chunks, and pack them, unless the attempt has ended."""
        with self._task_of(rank), self._failing(rank, repr(chunks[0][0].name)):
            if self.over:
                release_all(chunks)
            else:
                self._cover(rank, *self._writer.append_raw(rank, chunks))

    def _cover(self, rank: int, *chunks: Chunk) -> None:
        """Count chunks."""
        covered = total(coverage(chunk.name, chunk.dtype, chunk.shape, chunk.box) for chunk in chunks)
        with self._lock:
            self._covered[rank] = total((self._covered[rank], covered))
            self._boxes.add(rank, chunks)
            self._rows += len(chunks)
            self.raw += sum(chunk.nbytes for chunk in chunks)
            self._coded += sum(chunk.stored for chunk in chunks)
        self._check_rows(self._rows)

    def _check_rows(self, chunks: int) -> None:
        """Fail if the node's fragment would have more rows than readers take."""
        if chunks + len(self._values) > MAX_ROWS:
            self.fail(f"this node has more than {MAX_ROWS:,} chunks and plain values: save on more nodes, or fewer tensors")

    @contextlib.contextmanager
    def _failing(self, rank: int, what: str) -> Iterator[None]:
        """Let an error with chunks fail the attempt."""
        try:
            yield
        except Exception as error:
            self._log.exception("coding %s failed", what, extra={"rank": rank})
            self.fail(f"coding {what} of {member_text(rank)} failed: {error}")

    @contextlib.contextmanager
    def _task_of(self, rank: int) -> Iterator[None]:
        """End a task of a rank; the last one reports the rank as finished."""
        try:
            yield
        finally:
            with self._lock:
                self._coding[rank] -= 1
                ready = rank in self._staged and not self._coding[rank]
            if ready:
                self._report(rank)

    def _report(self, rank: int) -> None:
        self._code_spans.pop(rank, NO_SPAN).end()
        try:
            with self._lock:
                digests = self._held.of(rank)
            self._port.ask(RankFinished(self._ticket, rank, self._covered[rank], digests))
        except RaystowError as error:
            what = "%s of attempt %d is stored here, but the coordinator does not take it: %s"
            self._log.warning(what, member_text(rank), self._ticket.id, error, extra={"rank": rank})

    def _drive(self) -> None:
        """Wait until every rank has finished, store this node's part, report it, and wait for the commit."""
        try:
            waiting = AwaitRanks(self._ticket)
            while isinstance(asked := self._port.ask(waiting, self._warn), ReplicaQuestions):
                with self._lock:
                    by_group = ((self._boxes if one.group == PLACEMENT else self._held, one) for one in asked.questions)
                    waiting = AwaitRanks(self._ticket, answers=tuple(held.answer(one) for held, one in by_group))
            self._held, self._boxes = HeldDigests(), StoredBoxes()
            self._packer.seal()
            values = [Value(name, path, text, tuple(sorted(ranks))) for (name, path, text), ranks in self._values.items()]
            key, data, fragment = self._writer.fragment(values, self._rounded)
            info = fragment.info(data, self._ranks, self._stall)
            self._keep(key, [data], ())
            self._port.ask(PartStaged(self._ticket, info))
            self._packer.finish(self._left())
            self._store_fragment(key, data)
            self._reported = True
            outcome: Outcome = self._port.ask(PartStored(self._ticket, info), self._warn).entry
        except (Fenced, SaveFailed) as error:  # of the coordinator, which decides
            outcome = error
        except Exception as error:
            outcome = self._failure(error)
        self.over = True
        self._alarm.cancel()
        for begun in (*list(self._code_spans.values()), self._span):
            begun.end(outcome if isinstance(outcome, RaystowError) else "")
        if isinstance(outcome, RaystowError):
            self._packer.close()  # the listeners drop what is kept, and nothing may be kept after that
        warnings = () if isinstance(outcome, RaystowError) else self._watch.saved(outcome.step, self._writer.stored)
        with self._lock:
            self._ended = outcome, warnings
            listeners = list(self._listeners)
        for listener in listeners:  # before the cleanup, which waits for uploads that may hang
            try:
                listener(outcome, warnings)
            except Exception:
                self._log.exception("the outcome of attempt %d could not be passed on", self._ticket.id)
        if isinstance(outcome, RaystowError):
            if not self._reported:
                self._tell_failed(str(outcome))
            # Once the fragment is reported the attempt may have become a version although the answer said otherwise (a lost
            # answer): from then on only the coordinator, which looks at the root, may delete.
            self._packer.discard(delete=not self._reported)
        self._uploads.shutdown(wait=False)

    def _warn(self, text: str) -> None:
        """Let the first rank of this node log a problem, once."""
        with self._lock:
            warn, known = self._on_warning[min(self._on_warning)], text in self._warned
            self._warned.add(text)
        if not known:
            warn(text)

    def _failure(self, error: Exception) -> RaystowError:
        """What an error of this node or of a call means for the save."""
        subject = f"attempt {self._ticket.id}"
        if not isinstance(error, RaystowError):
            self._log.exception("attempt %d failed on this node", self._ticket.id)
        if self._reported:
            what = f"this node's part is complete, but the coordinator has not confirmed the commit: {error}"
            return OutcomeUnknown(what, subject=subject, remedy=UNKNOWN)
        if isinstance(error, StoreError | DeadlineExceeded):
            return SaveFailed(self._not_stored(error), subject=subject)
        return error if isinstance(error, RaystowError) else SaveFailed(f"the node worker failed: {error}", subject=subject)

    def _store_fragment(self, key: str, data: bytes) -> None:
        try:
            with span("save.upload", self._span.trace, key=key, bytes=len(data)):
                self._uploads.submit(self._store.put, key, [data]).result(self._left())
        except FuturesTimeout:
            raise DeadlineExceeded(NOT_IN_TIME, subject=key) from None

    def _left(self) -> float:
        return max(0.0, self._until - SYSTEM.monotonic())


_UNCODED = Coding(False, False, (), ())


def taken_over(slots: Slots, chunks: Sequence[CodedChunk], node: int) -> list[Coded]:
    """Take over chunks that a GPU has coded; see ``coded_draft``. If it raises, none is taken."""
    taken = slots.take_over_each([chunk.parts for chunk in chunks])
    return [(coded_draft(one, node), views, use) for one, (views, use) in zip(chunks, taken, strict=True)]


def coded_draft(chunk: CodedChunk, node: int) -> Chunk:
    """Return the manifest row of a chunk that a GPU has coded, without its place in a pack."""
    return draft(chunk.info, node, chunk.coding, raw_digest=chunk.digest, stored_digest=chunk.stored_digest)


def draft(
    info: ChunkInfo,
    node: int,
    coding: Coding = _UNCODED,
    *,
    raw_digest: int = 0,
    stored_digest: bytes = b"",
    derivation: Derivation | None = None,
) -> Chunk:
    """Return the manifest row of an announced chunk, without its place in a pack."""
    return Chunk(
        name=info.name,
        path=info.path,
        kind=info.kind,
        dtype=info.dtype,
        shape=info.shape,
        offset=info.offset,
        extent=info.extent,
        node=node,
        group=info.group,
        pack=0,
        start=0,
        coding=coding,
        raw_digest=raw_digest,
        stored_digest=stored_digest,
        derivation=derivation,
    )
