"""``Journal``: records the steps of a training, and replays them after a restart."""

from __future__ import annotations

import contextlib
import functools
import logging
import queue
import threading
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from ...state import value_text
from ...storage.arguments import integer
from ...storage.errors import RankRestarted, RaystowError, StateError
from ...storage.log import about
from ...storage.runtime import background
from ...storage.runtime.clock import SYSTEM
from ...storage.runtime.metrics import JOURNALED, STALL, UNRECORDED, record
from ...workers.protocol.codec import MAX_JSON
from ...workers.protocol.messages import (
    START,
    EntryInfo,
    EntryKept,
    EntryPlace,
    Generation,
    Incarnation,
    JournalChoice,
    JournalVote,
    shortened,
)
from ..heartbeat import Heartbeat
from .entry_encoder import CapturedEntry, EntryEncoder
from .port import JournalPort
from .replay import Replayer, ReplayResult
from .shard_map import fixed_ranks, layout
from .state_digests import Digester
from .step_hooks import GradientBuffers, StepHooks, hyper_parameters
from .step_reader import StepReader
from .tracked_state import TrackedState

logger = logging.getLogger(__name__)

_WHOLE = 16  # steps from one digest of all bytes to the next
_MOST_STEPS = 32  # of optimizers in an entry: each holds its gradients
_LAG = 10.0  # seconds that a step waits for the copies of the step before


@dataclass(frozen=True)
class JournalIdentity:
    """Whose steps a journal records. ``uri``: of the repository, for logs and metrics. ``timeout``: of agreements, in seconds."""

    uri: str
    repository: str
    rank: int
    world_size: int
    incarnation: Incarnation
    timeout: float = 600.0


class Journal:
    """Record every optimizer step of one rank, and replay the steps after a version. ``Checkpointer.journal`` makes it.

    An entry holds the gradients of a step, the hyper-parameters that have changed, the model's buffers that have changed, the
    caller's values, and a digest of the state after the step. It is kept in the memory of this node and of partner nodes until
    a version of the same step or a later one is durable. Recording never fails the training: if an entry cannot be kept, an error
    is logged, and steps are recorded again from the next save on.

    Attributes:
        save_advised: Whether steps are not being recorded until the next save: the memory for entries is full, or an entry was
            lost.
    """

    def __init__(self, state: TrackedState, port: JournalPort, identity: JournalIdentity) -> None:
        self._state, self._port, self._identity = state, port, identity
        self._log = about(logger, repository=identity.uri, rank=identity.rank)
        self._hooks, self._digester = StepHooks(state, self._capture), Digester(state)
        self._buffers, self._encoder = GradientBuffers(), EntryEncoder()
        self._lineage: tuple[Generation, ...] = ()
        self._base, self._replayable, self._replays = START, True, 0
        self._last, self._first, self._saved, self._count = START, START, START, 0
        self._entry, self._chained, self._fresh = CapturedEntry(), True, True
        self._bridge: int | None = None  # the step of the save that all entries after a lost one depend on
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._changed = threading.Condition()  # its lock also guards the beginning and the end of the chain of entries
        self._encoding, self._in_flight = 0, dict[int, None]()
        self._closed = self.save_advised = False
        self._thread = background.start("raystow-journal", self._run)

    def record(self, step: int, values: object = None) -> None:
        """End the entry of a step. Call it on every rank after ``optimizer.step()`` and all that changes weights after it.

        Returns when the entry of the step before has its copies, so that a failure loses at most one complete step. A step
        that a ``GradScaler`` has skipped is recorded, too.

        Args:
            step: Number of the step, as ``save`` gets it: larger than that of the call before.
            values: What the training needs to go on after this step: plain values, small tensors, and dicts, lists and tuples
                of these. ``replay`` returns it.

        Raises:
            StateError: ``replay`` was not called before, the journal is closed, the step is not larger, or a value cannot be
                stored.
        """
        start = SYSTEM.monotonic()
        step = integer("step", step, least=0)
        if self._closed:
            raise StateError("the journal is closed", remedy="record steps before close() of the journal or its Checkpointer")
        if not self._lineage:
            raise StateError("the journal does not know what its steps follow", remedy="call replay() before the first record()")
        if step <= self._last:
            raise StateError(f"step {step} is recorded after step {self._last}", remedy="number the steps ascending")
        text = value_text.dumps(values)
        if len(text) > MAX_JSON:
            what = f"values of {len(text)} bytes cannot be recorded, at most {MAX_JSON}"
            raise StateError(what, remedy="give only what the next step needs")
        entry, self._entry = self._entry, CapturedEntry()
        previous, self._last = self._last, step
        if previous < self._saved < step:
            what = "a save of step %d is no base for entries: the steps recorded next to it are %d and %d"
            self._log.warning(what, self._saved, previous, step, extra={"step": step})
        chained = self._chained
        if chained:
            try:
                self._finish(entry, step, previous, text)
            except BaseException as error:
                self._failed(step, error)
                if not isinstance(error, Exception):
                    raise
        elif self._saved != step:
            record(UNRECORDED, repository=self._identity.uri)
        if self._saved == step:  # the save came first
            self._restart_chain(step)
        if chained:
            self._await_copies(step)
        record(STALL, SYSTEM.monotonic() - start, repository=self._identity.uri, call="journal")

    def replay(self, after_step: Callable[[], None] | None = None) -> Any:
        """Replay the recorded steps after the version that was restored.

        Every rank calls it once, after the restored state was loaded into model and optimizers, also if there was no version.
        All ranks go to the newest step that all of them can reach. Each step is checked; at a difference the replay ends with the
        exact state of the step before, and a warning names step and tensor. Nothing is replayed after a version that was
        restored by name.

        Args:
            after_step: What the training does between ``optimizer.step()`` and ``record``, such as copying master weights.

        Returns:
            The values that were recorded with the last replayed step; None if no step was replayed.

        Raises:
            ClusterError: The node worker or the coordinator does not answer. The state is the restored one, as after any error.
            DeadlineExceeded: Another rank did not call, or did not replay on, for the ``timeout`` of the Checkpointer.
        """
        self._entry = CapturedEntry()
        self._replays += 1
        identity = self._identity
        self._vote = JournalVote(
            *(identity.rank, identity.world_size, identity.incarnation, self._replays, identity.timeout),
            base=self._base,
            nothing=not self._replayable,
            fixed=fixed_ranks(self._state),
        )
        heartbeat = Heartbeat(self._port.reading)

        def go_on() -> None:
            heartbeat.beat(self._vote)

        def fetch(place: EntryPlace, number: int) -> memoryview:
            go_on()
            return self._port.fetch(place, number)

        reader = StepReader(self._state, fetch, identity.world_size)
        replayer = Replayer(
            self._state, self._hooks, reader, after_step=after_step, base=self._base, log=self._log, on_progress=go_on
        )
        with contextlib.closing(reader):
            try:
                result, answer = self._agreed(replayer)
            except BaseException as error:
                replayer.undo()
                if not isinstance(error, RaystowError):  # else the other ranks have it too, or cannot be reached
                    with contextlib.suppress(RaystowError):
                        self._port.settle(replace(self._vote, error=shortened(str(error) or repr(error))))
                raise
        if answer.end and identity.rank == 0:
            self._log.warning("nothing after step %d is replayed: %s", answer.step, answer.end, extra={"step": answer.step})
        if result.step > self._base:
            self._log.info("replayed the steps %d to %d", self._base + 1, result.step, extra={"step": result.step})
        self._last, self._lineage = result.step, answer.lineage
        self._restart_chain(result.step)
        self._encoder.parent = result.digest
        return result.values

    def flush(self, timeout: float = 60.0) -> bool:
        """Wait until all recorded steps have their copies, for example before a node is taken away.

        Args:
            timeout: Seconds to wait.

        Returns:
            Whether they have them.
        """
        with self._changed:
            return self._changed.wait_for(lambda: not self._in_flight, timeout)

    def restored(self, step: int, latest: bool) -> None:
        """Note the version that ``replay`` starts from. ``latest``: no other version was asked for."""
        self._base, self._replayable = step, latest

    def saved(self, step: int) -> None:
        """Note that a save of the current state begins. Call it before anything can fail the save: see ``save_failed``."""
        self._saved = step
        if not self._lineage:
            return
        try:
            self._port.save_begun(step, self._lineage[-1].token)
        except RaystowError as error:
            self._log.warning("the node worker was not told of a save: %s", error)
        if self._last == step:
            self._restart_chain(step)

    def save_failed(self, step: int) -> None:
        """Note that a save that had begun is no version, or may be none. Does not wait for the node worker."""
        if not self._lineage:
            return
        with self._changed:
            if step == self._bridge and self._first > step:
                self._bridge = self._first  # a newer save has begun
            elif step == self._bridge:
                self._lose("step after", step, "its save failed, and an entry before it was lost")
        self._work.put(functools.partial(self._withdraw, step))

    def close(self) -> None:
        """Hand over the last entries, and remove the hooks."""
        if self._closed:
            return
        self._closed = True
        self._hooks.close()
        self._work.put(None)
        self._thread.join()
        self.flush(_LAG)
        self._encoder.close()
        self._port.close()

    def _agreed(self, replayer: Replayer) -> tuple[ReplayResult, JournalChoice]:
        """Replay to the newest step that all ranks can reach; return how far that is, and what they have agreed on. If the
        coordinator is restarted meanwhile, all ranks begin again, until the timeout is over."""
        patience = SYSTEM.monotonic() + self._vote.timeout
        while True:
            try:
                return self._replayed(replayer)
            except RankRestarted as error:
                if SYSTEM.monotonic() > patience:
                    raise
                self._log.warning("%s: all ranks begin it again", error.what)
            replayer.undo()
            self._replays += 1
            self._vote = replace(self._vote, number=self._replays)

    def _replayed(self, replayer: Replayer) -> tuple[ReplayResult, JournalChoice]:
        choice = self._port.settle(self._vote)
        result = ReplayResult(self._base)
        if choice.entries:
            result = replayer.go_to(choice.step, choice.entries)
        while True:
            reached = replace(self._vote, reached=result.step, residues=array("Q", result.residues).tobytes())
            answer = self._port.settle(reached)
            if answer.agreed:
                return result, answer
            if answer.step < result.step:
                result = replayer.go_to(answer.step, choice.entries)

    def _restart_chain(self, step: int) -> None:
        """The next entry starts from the state after ``step``, which a version may hold."""
        with self._changed:
            if not self._chained:
                self._bridge = step
            self._chained = self._fresh = True
            self._first, self._count, self.save_advised = step, 0, False

    def _capture(self, number: int) -> None:
        """Copy what the coming step of an optimizer depends on."""
        if not self._lineage or not self._chained or self._closed:
            return
        entry = self._entry
        if len(entry.steps) == _MOST_STEPS:
            self._lose("step after", self._last, f"record() was not called for {_MOST_STEPS} steps of optimizers")
            entry.steps.clear()
            return
        try:
            if not entry.steps:
                with self._changed:
                    self._changed.wait_for(lambda: not self._encoding)
                self._buffers.begin()
                if self._fresh:
                    entry.before = self._digester.take(whole=True)
            entry.steps.append(self._buffers.capture(self._state, number))
        except Exception as error:
            self._lose("step after", self._last, self._problem(self._last, error))

    def _finish(self, entry: CapturedEntry, step: int, previous: int, text: str) -> None:
        """Take the digests of the state, and give the entry to the thread that encodes it."""
        identity = self._identity
        self._count += 1
        if self._fresh and entry.before is None:  # no optimizer was called: the state is still the one before
            entry.before = self._digester.take(whole=True)
        entry.fresh, self._fresh = self._fresh, False
        entry.layout = layout(self._state) if entry.fresh else ()
        entry.whole = self._count % _WHOLE == 0
        entry.after, entry.values = self._digester.take(whole=entry.whole), text
        entry.groups = [hyper_parameters(optimizer) for optimizer in self._state.optimizers]
        entry.buffers = {name: buffer.clone() for name, buffer in self._state.buffers().items()}
        entry.mark_ready()
        info = EntryInfo(identity.repository, identity.rank, identity.world_size, step, previous, self._lineage)
        with self._changed:
            self._encoding += 1
            self._in_flight[step] = None
        self._work.put(functools.partial(self._hand_over, entry, info))

    def _await_copies(self, step: int) -> None:
        """Wait for the copies of the entries before a step."""
        with self._changed:
            if not self._changed.wait_for(lambda: not any(other < step for other in self._in_flight), _LAG):
                self._log.warning("the entry of the step before has no copies after %.0f s", _LAG, extra={"step": step})

    def _run(self) -> None:
        """Tell the node worker of entries and failed saves."""
        while (work := self._work.get()) is not None:
            work()

    def _hand_over(self, entry: CapturedEntry, begun: EntryInfo) -> None:
        """Encode an entry and hand it over."""
        with contextlib.ExitStack() as unread:
            unread.callback(self._release)
            try:
                info = self._encoder.encode(entry, begun, self._port.begin(begun, entry.most), unread.close)
                record(JOURNALED, info.size, repository=self._identity.uri)
                self._port.keep(info, self._kept)
            except Exception as error:
                self._failed(begun.step, error)

    def _withdraw(self, step: int) -> None:
        try:
            self._port.save_failed(step)
        except RaystowError as error:
            self._log.warning("the node worker was not told of a failed save: %s", error, extra={"step": step})

    def _release(self) -> None:
        """The copies of an entry's gradients may be overwritten."""
        with self._changed:
            self._encoding -= 1
            self._changed.notify_all()

    def _failed(self, step: int, error: BaseException) -> None:
        self._kept(EntryKept(step, 0, self._problem(step, error)))

    def _problem(self, step: int, error: BaseException) -> str:
        """Return the text of an error; the traceback of one that is not expected is logged."""
        if not isinstance(error, RaystowError):
            self._log.error("an entry could not be recorded", exc_info=error, extra={"step": step})
        return shortened(str(error) or repr(error))

    def _kept(self, kept: EntryKept) -> None:
        with self._changed:  # a save on another thread restarts the chain before or after this, not in between
            lost = bool(kept.problem) and kept.step > self._first  # else a save has made it unnecessary
            if lost:
                self._lose("entry of step", kept.step, kept.problem)
            elif kept.problem:
                self._bridge = self._first
        if lost:
            record(UNRECORDED, repository=self._identity.uri)
        with self._changed:
            self._in_flight.pop(kept.step, None)
            self._changed.notify_all()

    def _lose(self, what: str, step: int, problem: str) -> None:
        """Record nothing more until the next save: entries after a gap cannot be replayed."""
        with self._changed:
            if self._chained:
                text = "the %s %d is not recorded, nor are later ones until the next save: %s"
                self._log.error(text, what, step, problem, extra={"step": step})
            self._chained, self.save_advised = False, True
