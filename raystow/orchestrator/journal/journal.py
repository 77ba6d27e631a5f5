"""``Journal``: records the steps of a training, and replays them after a restart."""

from __future__ import annotations

import contextlib
from array import array
from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from ...state import value_text
from ...storage.arguments import integer
from ...storage.errors import RankRestarted, RaystowError, StateError
from ...storage.runtime.clock import SYSTEM
from ...storage.runtime.metrics import STALL, record
from ...storage.runtime.spans import Span, here, span
from ...workers.protocol.codec import MAX_JSON
from ...workers.protocol.messages import EntryPlace, JournalChoice, JournalVote, shortened
from ..heartbeat import Heartbeat
from .recorder import StepRecorder
from .replay import Replayer, ReplayResult
from .shard_map import fixed_ranks
from .step_reader import StepReader


class Journal:
    """Record every optimizer step of one rank, and replay the steps after a version. ``Checkpointer.journal`` makes it.

    An entry holds the gradients of a step, the hyper-parameters that have changed, the model's buffers that have changed, the
    caller's values, and a digest of the state after the step. It is kept in the memory of this node and of partner nodes until
    a version of the same step or a later one is durable. Recording never fails the training: if an entry cannot be kept, an error
    is logged, and steps are recorded again from the next save on.
    """

    def __init__(self, recorder: StepRecorder) -> None:
        self._recorder, self._replays = recorder, 0

    @property
    def save_advised(self) -> bool:
        """Whether steps are not being recorded until the next save: the memory for entries is full, or an entry was lost."""
        return self._recorder.save_advised

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
        text = value_text.dumps(values)
        if len(text) > MAX_JSON:
            what = f"values of {len(text)} bytes cannot be recorded, at most {MAX_JSON}"
            raise StateError(what, remedy="give only what the next step needs")
        self._recorder.record(step, text)
        record(STALL, SYSTEM.monotonic() - start, repository=self._recorder.identity.uri, call="journal")

    def replay(self, after_step: Callable[[], None] | None = None, *, fixed: str = "") -> Any:
        """Replay the recorded steps after the version that was restored.

        Every rank calls it once, after the restored state was loaded into model and optimizers, also if there was no version.
        All ranks go to the newest step that all of them can reach. Each step is checked; at a difference the replay ends with the
        exact state of the step before, and a warning names step and tensor. Nothing is replayed after a version that was
        restored by name.

        Args:
            after_step: What the training does between ``optimizer.step()`` and ``record``, such as copying master weights.
            fixed: Why steps that another number of ranks has recorded must not be replayed; empty if they may.

        Returns:
            The values that were recorded with the last replayed step; None if no step was replayed.

        Raises:
            ClusterError: The node worker or the coordinator does not answer. The state is the restored one, as after any error.
            DeadlineExceeded: Another rank did not call, or did not replay on, for the ``timeout`` of the Checkpointer.
        """
        recorder = self._recorder
        recorder.discard()
        self._replays += 1
        identity, port, log, base = recorder.identity, recorder.port, recorder.log, recorder.base
        self._vote = JournalVote(
            *(identity.rank, identity.world_size, identity.incarnation, self._replays, identity.timeout),
            base=base,
            nothing=not recorder.replayable,
            fixed=fixed or fixed_ranks(recorder.state),
            trace=here(),
        )
        heartbeat = Heartbeat(port.reading)

        def go_on() -> None:
            heartbeat.beat(self._vote)

        def fetch(place: EntryPlace, number: int) -> memoryview:
            go_on()
            return port.fetch(place, number)

        reader = StepReader(recorder.state, fetch, identity.world_size)
        replayer = Replayer(recorder.state, recorder.hooks, reader, after_step=after_step, base=base, log=log, on_progress=go_on)
        with contextlib.closing(reader):
            try:
                result, answer = self._agreed(replayer)
            except BaseException as error:
                replayer.undo()
                if not isinstance(error, RaystowError):  # else the other ranks have it too, or cannot be reached
                    with contextlib.suppress(RaystowError):
                        port.settle(replace(self._vote, error=shortened(str(error) or repr(error))))
                raise
        if answer.end and identity.rank == 0:
            log.warning("nothing after step %d is replayed: %s", answer.step, answer.end, extra={"step": answer.step})
        if result.step > base:
            log.info("replayed the steps %d to %d", base + 1, result.step, extra={"step": result.step})
        recorder.begin(answer.lineage, result.step, result.digest)
        return result.values

    def flush(self, timeout: float = 60.0) -> bool:
        """Wait until all recorded steps have their copies, for example before a node is taken away.

        Args:
            timeout: Seconds to wait.

        Returns:
            Whether they have them.
        """
        return self._recorder.flush(timeout)

    def close(self) -> None:
        """Hand over the last entries, and remove the hooks."""
        self._recorder.close()

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
                self._recorder.log.warning("%s: all ranks begin it again", error.what)
            replayer.undo()
            self._replays += 1
            self._vote = replace(self._vote, number=self._replays)

    def _replayed(self, replayer: Replayer) -> tuple[ReplayResult, JournalChoice]:
        begun = SYSTEM.monotonic()
        choice = self._recorder.port.settle(self._vote)
        with span("replay.rank", choice.trace or None, begun=begun, rank=self._vote.rank, to=choice.step) as whole:
            Span("replay.agree", whole.trace, begun=begun).end()
            result, to = ReplayResult(self._recorder.base), choice.step
            while True:
                if choice.entries and to != result.step:
                    with span("replay.steps", to=to):
                        result = replayer.go_to(to, choice.entries)
                reached = replace(self._vote, reached=result.step, residues=array("Q", result.residues).tobytes())
                with span("replay.agree"):
                    answer = self._recorder.port.settle(reached)
                if answer.agreed:
                    return result, answer
                to = min(answer.step, result.step)
