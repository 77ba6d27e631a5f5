"""Replays the entries after a version, and checks the state after each.

If a check fails, the state of the version is put back from a copy, and the entries before the failing one are replayed
again: a state that was never there is never left.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from ...state import value_text
from ...storage.errors import Damaged, RaystowError, StateError
from ...storage.log import Log
from ...workers.protocol.messages import START, EntryPlace
from .shard_check import ShardCheck
from .state_digests import Digester
from .step_hooks import StepHooks
from .step_reader import DecodedStep, StepReader
from .tracked_state import StateCopy, TrackedState


@dataclass(frozen=True)
class ReplayResult:
    """How far a replay has come.

    Args:
        step: The last step after which the state agreed.
        digest: Of the header of the last entry, if this rank has recorded it.
        values: Those that the caller recorded with it; None if there was no entry.
        residues: A number for each replayed step, whose sum over all ranks is 0 if the state is the recorded one.
    """

    step: int
    digest: bytes = b""
    values: object = None
    residues: tuple[int, ...] = ()


class Replayer:
    """Replays the steps after a version on one rank.

    Args:
        reader: Reads recorded steps.
        after_step: Called after the optimizers' steps of each recorded step.
        base: The step that the state is of now.
        on_progress: Called before each step, and when it was read.
    """

    def __init__(
        self,
        state: TrackedState,
        hooks: StepHooks,
        reader: StepReader,
        *,
        after_step: Callable[[], None] | None,
        base: int,
        log: logging.Logger | Log,
        on_progress: Callable[[], None] = lambda: None,
    ) -> None:
        self._state, self._hooks, self._reader, self._after_step = state, hooks, reader, after_step
        self._base, self._log, self._on_progress = base, log, on_progress
        self._digester = Digester(state)
        self._check: ShardCheck | None = None
        self._kept: StateCopy | None = None
        self._parents: dict[tuple[int, int], bytes] = {}  # by number of ranks and rank: the last entry's digest

    def go_to(self, step: int, entries: Sequence[EntryPlace]) -> ReplayResult:
        """Replay entries up to a step, from the state of the base; returns how far the checks agreed."""
        self.undo()
        by_step = itertools.groupby(entries, key=lambda place: place.info.step)
        wanted = [tuple(places) for number, places in by_step if number <= step]
        while True:
            result, exact = self._run(wanted)
            if exact:
                return result
            self.undo()
            wanted = [places for places in wanted if places[0].info.step <= result.step]

    def undo(self) -> None:
        """Put the state of the base back."""
        if self._kept is not None:
            self._state.restore(self._kept)

    def _run(self, steps: Sequence[tuple[EntryPlace, ...]]) -> tuple[ReplayResult, bool]:
        """Replay steps; return how far the checks agreed, and whether the state is of that step exactly."""
        result = ReplayResult(self._base)
        self._parents.clear()
        with ThreadPoolExecutor(1, "raystow-replay") as pool:
            coming = pool.submit(self._reader.read, *steps[:2]) if steps else None
            if self._kept is None:
                self._kept = self._state.copy()
            for number, places in enumerate(steps):
                assert coming is not None
                touched, step = False, places[0].info.step
                self._on_progress()
                try:
                    decoded = coming.result()
                    self._on_progress()
                    coming = pool.submit(self._reader.read, *steps[number + 1 : number + 3]) if number + 1 < len(steps) else None
                    residue = self.check_before(decoded, result.step)
                    touched = True
                    residue += self._apply(decoded)
                except RaystowError as error:
                    self._log.warning("the replay ends before step %d: %s", step, error, extra={"step": step})
                    return result, not touched
                except Exception as error:
                    self._log.exception("the replay ends before step %d: %r", step, error)
                    return result, not touched
                digest, values = decoded.entry.digest, value_text.loads(decoded.entry.header.values)
                residues = *result.residues, residue % (1 << 64)
                result = ReplayResult(step, b"" if decoded.shards else digest, values, residues)
        return result, True

    def check_before(self, decoded: DecodedStep, last: int) -> int:
        for rank, entry in decoded.entries.items():
            who = entry.info.world_size, rank
            parent, self._parents[who] = self._parents.get(who), entry.digest
            if entry.info.previous != last:
                raise Damaged(f"the entry follows step {entry.info.previous}, and not step {last}")
            if entry.header.parent and parent and entry.header.parent != parent:
                raise Damaged("the entry does not follow the one before: they were recorded by different processes")
        if len({entry.header.whole for entry in decoded.entries.values()}) > 1:
            raise Damaged("some ranks have recorded digests of all bytes, and others of a sample")
        if last == self._base and not decoded.entry.header.before:  # the sample taken after a step would not cover every byte
            raise Damaged(f"the version of step {last} was not saved by the run that recorded the step after it")
        residue = 0
        if decoded.entry.header.before:
            before = {rank: entry.header.before for rank, entry in decoded.entries.items()}
            differs, residue = self._compare(decoded, before, whole=True, moment="before")
            if differs:
                start = "initial state" if last == START else f"state of step {last}"
                raise Damaged(f"the {start} is not the one that the entry starts from: {differs} differs")
        there = len(self._state.optimizers)
        if len(decoded.groups) != there or any(not 0 <= step.optimizer < there for step in decoded.steps):
            raise StateError(f"steps of {len(decoded.groups)} optimizers were recorded, there are {there}")
        return residue

    def _apply(self, decoded: DecodedStep) -> int:
        for step in decoded.steps:
            self._hooks.replay(step)
        for number, groups in enumerate(decoded.groups):
            self._hooks.set_groups(number, groups)
        if self._after_step is not None:
            self._after_step()
        buffers = self._state.buffers()
        with torch.no_grad():
            for name, value in decoded.buffers.items():
                if name not in buffers or buffers[name].shape != value.shape:
                    raise StateError(f"the buffer {name} was recorded, and the model has none of its shape")
                buffers[name].copy_(value)
        self._state.load_module_values(decoded.module_values)
        after = {rank: entry.header.after for rank, entry in decoded.entries.items()}
        differs, residue = self._compare(decoded, after, whole=decoded.entry.header.whole, moment="after")
        if differs is not None:
            what = f"the state differs from the recorded one in {differs}"
            raise StateError(f"{what}; the optimizer, torch, or the GPU computes otherwise")
        return residue

    def _compare(
        self, decoded: DecodedStep, recorded: Mapping[int, bytes], *, whole: bool, moment: str
    ) -> tuple[str | None, int]:
        """See ``ShardCheck.compare``."""
        if decoded.shards is None:
            (expected,) = recorded.values()
            return self._digester.difference(expected, whole=whole), 0
        self._check = self._check or ShardCheck(self._state, self._digester)
        return self._check.compare(decoded.shards, recorded, whole=whole, moment=moment)
