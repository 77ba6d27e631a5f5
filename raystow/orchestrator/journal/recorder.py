"""Records the steps of one rank as a chain of entries that follows its versions."""

from __future__ import annotations

import contextlib
import functools
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ...state import value_text
from ...storage.errors import RaystowError, StateError
from ...storage.log import about
from ...storage.runtime import background
from ...storage.runtime.metrics import JOURNALED, UNRECORDED, record
from ...workers.protocol.messages import START, EntryInfo, EntryKept, Generation, Incarnation, shortened
from .entry_encoder import CapturedEntry, EntryEncoder
from .port import JournalPort
from .shard_map import layout
from .state_digests import Digester
from .step_hooks import GradientBuffers, StepHooks, hyper_parameters
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


class StepRecorder:
    """What a ``Journal`` records with. A ``Checkpointer`` notes its saves and restores here.

    An entry can be replayed only if it follows a version, or an entry that can. So after an entry was lost, nothing is recorded
    until a save begins, and the next entry starts from the saved state.

    Attributes:
        hooks: Of the optimizers.
        digester: Digests the state after each step.
        base, replayable: The step that was restored, and whether entries after it may be replayed.
        save_advised: See ``Journal``.
    """

    def __init__(self, state: TrackedState, port: JournalPort, identity: JournalIdentity) -> None:
        self.state, self.port, self.identity = state, port, identity
        self.log = about(logger, repository=identity.uri, rank=identity.rank)
        self.hooks, self.digester = StepHooks(state, self._capture), Digester(state)
        self._buffers, self._encoder = GradientBuffers(), EntryEncoder()
        self._lineage: tuple[Generation, ...] = ()
        self.base, self.replayable = START, True
        self._last, self._first, self._saved, self._count = START, START, START, 0
        self._entry, self._chained, self._fresh = CapturedEntry(), True, True
        self._bridge: int | None = None  # the step of the save that all entries after a lost one depend on
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._changed = threading.Condition()  # its lock also guards the beginning and the end of the chain of entries
        self._encoding, self._in_flight = 0, dict[int, None]()
        self._closed = self.save_advised = False
        self._thread = background.start("raystow-journal", self._run)

    def record(self, step: int, values: str) -> None:
        """End the entry of a step: see ``Journal.record``. ``values``: as text."""
        if self._closed:
            raise StateError("the journal is closed", remedy="record steps before close() of the journal or its Checkpointer")
        if not self._lineage:
            raise StateError("the journal does not know what its steps follow", remedy="call replay() before the first record()")
        if step <= self._last:
            raise StateError(f"step {step} is recorded after step {self._last}", remedy="number the steps ascending")
        entry, self._entry = self._entry, CapturedEntry()
        previous, self._last = self._last, step
        if previous < self._saved < step:
            what = "a save of step %d is no base for entries: the steps recorded next to it are %d and %d"
            self.log.warning(what, self._saved, previous, step, extra={"step": step})
        chained = self._chained
        if chained:
            try:
                self._finish(entry, step, previous, values)
            except BaseException as error:
                self._failed(step, error)
                if not isinstance(error, Exception):
                    raise
        elif self._saved != step:
            record(UNRECORDED, repository=self.identity.uri)
        if self._saved == step:  # the save came first
            self._restart_chain(step)
        if chained:
            self._await_copies(step)

    def discard(self) -> None:
        """Forget what was captured since the last entry."""
        self._entry = CapturedEntry()

    def begin(self, lineage: Sequence[Generation], step: int, parent: bytes) -> None:
        """Record from now on what follows ``step``. ``parent``: digest of the header of its entry, if this rank has recorded
        it."""
        self._last, self._lineage = step, tuple(lineage)
        self._restart_chain(step)
        self._encoder.parent = parent

    def flush(self, timeout: float) -> bool:
        """Wait until all recorded steps have their copies; return whether they have them."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._in_flight, timeout)

    def restored(self, step: int, latest: bool) -> None:
        """Note the version that a replay starts from. ``latest``: no other version was asked for."""
        self.base, self.replayable = step, latest

    def saved(self, step: int) -> None:
        """Note that a save of the current state begins. Call it before anything can fail the save: see ``save_failed``."""
        self._saved = step
        if not self._lineage:
            return
        try:
            self.port.save_begun(step, self._lineage[-1])
        except RaystowError as error:
            self.log.warning("the node worker was not told of a save: %s", error)
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
                self._lose(_after(step), step, "its save failed, and an entry before it was lost")
        self._work.put(functools.partial(self._withdraw, step))

    def close(self) -> None:
        """Hand over the last entries, and remove the hooks."""
        if self._closed:
            return
        self._closed = True
        self.hooks.close()
        self._work.put(None)
        self._thread.join()
        self.flush(_LAG)
        self._encoder.close()
        self.port.close()

    def _restart_chain(self, step: int) -> None:
        """The next entry starts from the state after ``step``, which a version may hold."""
        with self._changed:
            if not self._chained:
                self._bridge = step
            self._chained = self._fresh = True
            self._first, self._count, self.save_advised = step, 0, False

    def _capture(self, number: int, again: bool) -> None:
        """Copy what the coming step of an optimizer depends on. ``again``: the step has called its closure before."""
        if not self._lineage or not self._chained or self._closed:
            return
        entry = self._entry
        if len(entry.steps) == _MOST_STEPS:
            self._lose(_after(self._last), self._last, f"record() was not called for {_MOST_STEPS} steps of optimizers")
            entry.steps.clear()
            return
        if again:
            what = "an optimizer calls its closure several times in a step, which cannot be replayed (use no journal)"
            self._lose(_after(self._last), self._last, what)
            return
        try:
            if not entry.steps:
                with self._changed:
                    self._changed.wait_for(lambda: not self._encoding)
                self._buffers.begin()
                if self._fresh:
                    entry.before = self.digester.take(whole=True)
            entry.steps.append(self._buffers.capture(self.state, number))
        except Exception as error:
            self._lose(_after(self._last), self._last, self._problem(self._last, error))

    def _finish(self, entry: CapturedEntry, step: int, previous: int, text: str) -> None:
        """Take the digests of the state, and give the entry to the thread that encodes it."""
        identity = self.identity
        self._count += 1
        if self._fresh and entry.before is None:  # no optimizer was called: the state is still the one before
            entry.before = self.digester.take(whole=True)
        entry.fresh, self._fresh = self._fresh, False
        entry.layout = layout(self.state) if entry.fresh else ()
        entry.whole = self._count % _WHOLE == 0
        entry.after, entry.values = self.digester.take(whole=entry.whole), text
        entry.groups = [hyper_parameters(optimizer) for optimizer in self.state.optimizers]
        entry.buffers = {name: buffer.clone() for name, buffer in self.state.buffers().items()}
        entry.module_values = value_text.dumps(self.state.module_values(), what="model.state_dict()")
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
                self.log.warning("the entry of the step before has no copies after %.0f s", _LAG, extra={"step": step})

    def _run(self) -> None:
        """Tell the node worker of entries and failed saves."""
        while (work := self._work.get()) is not None:
            work()

    def _hand_over(self, entry: CapturedEntry, begun: EntryInfo) -> None:
        """Encode an entry and hand it over."""
        with contextlib.ExitStack() as unread:
            unread.callback(self._release)
            try:
                info = self._encoder.encode(entry, begun, self.port.begin(begun, entry.most), unread.close)
                record(JOURNALED, info.size, repository=self.identity.uri)
                self.port.keep(info, self.kept)
            except Exception as error:
                self._failed(begun.step, error)

    def _withdraw(self, step: int) -> None:
        try:
            self.port.save_failed(step)
        except RaystowError as error:
            self.log.warning("the node worker was not told of a failed save: %s", error, extra={"step": step})

    def _release(self) -> None:
        """The copies of an entry's gradients may be overwritten."""
        with self._changed:
            self._encoding -= 1
            self._changed.notify_all()

    def _failed(self, step: int, error: BaseException) -> None:
        self.kept(EntryKept(step, 0, self._problem(step, error)))

    def _problem(self, step: int, error: BaseException) -> str:
        """Return the text of an error; the traceback of one that is not expected is logged."""
        if not isinstance(error, RaystowError):
            self.log.error("an entry could not be recorded", exc_info=error, extra={"step": step})
        return shortened(str(error) or repr(error))

    def kept(self, kept: EntryKept) -> None:
        """Note what has become of an entry that was handed over."""
        with self._changed:  # a save on another thread restarts the chain before or after this, not in between
            lost = bool(kept.problem) and kept.step > self._first  # else a save has made it unnecessary
            if lost:
                self._lose(f"entry of step {kept.step}", kept.step, kept.problem)
            elif kept.problem:
                self._bridge = self._first
        if lost:
            record(UNRECORDED, repository=self.identity.uri)
        with self._changed:
            self._in_flight.pop(kept.step, None)
            self._changed.notify_all()

    def _lose(self, what: str, step: int, problem: str) -> None:
        """Record nothing more until the next save: entries after a gap cannot be replayed."""
        with self._changed:
            if self._chained:
                text = "the %s is not recorded, nor are later ones until the next save: %s"
                self.log.error(text, what, problem, extra={"step": step})
            self._chained, self.save_advised = False, True


def _after(step: int) -> str:
    return "first step" if step == START else f"step after {step}"
