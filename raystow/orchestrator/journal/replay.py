"""Replays the entries after a version, and checks the state after each.

If a check fails, the state of the version is put back from host memory, and the entries before the failing one are replayed
again: a state that was never there is never left.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ...storage.errors import Damaged, RaystowError, StateError
from ...storage.log import Log
from ...workers.protocol.messages import EntryPlace
from . import value_tree
from .entry_file import JournalEntry, parse
from .gradient_coding import decode
from .state_digests import Digester
from .step_hooks import StepHooks, StepInputs
from .tracked_state import StateCopy, TrackedState


class DecodedEntry(NamedTuple):
    """An entry in host memory, ready to be replayed."""

    entry: JournalEntry
    steps: list[StepInputs]
    groups: list[list[dict[str, object] | None]]
    buffers: dict[str, torch.Tensor]


@dataclass(frozen=True)
class ReplayResult:
    """How far a replay has come. ``digest``: of the header of the last entry; ``values``: those that the caller recorded with it;
    None and empty if there was none."""

    step: int
    digest: bytes = b""
    values: object = None


class _Mismatch(Exception):
    """The state after an entry is not the recorded one."""


class Replayer:
    """Replays entries of one rank.

    Args:
        fetch: Returns the bytes of an entry.
        after_step: Called after the optimizers' steps of each entry.
        base: The step that the state is of now.
    """

    def __init__(
        self,
        state: TrackedState,
        hooks: StepHooks,
        fetch: Callable[[EntryPlace], memoryview],
        *,
        after_step: Callable[[], None] | None,
        base: int,
        log: logging.Logger | Log,
    ) -> None:
        self._state, self._hooks, self._fetch, self._after_step = state, hooks, fetch, after_step
        self._base, self._log = base, log
        self._digester = Digester(state)
        self._kept: StateCopy | None = None

    def go_to(self, step: int, entries: Sequence[EntryPlace]) -> ReplayResult:
        """Replay entries up to a step, from the state of the base; returns how far the checks agreed."""
        if self._kept is None:
            self._kept = self._state.host_copy()
        else:
            self._state.restore(self._kept)
        wanted = [place for place in entries if place.info.step <= step]
        while True:
            result, exact = self._run(wanted)
            if exact:
                return result
            self._state.restore(self._kept)
            wanted = [place for place in wanted if place.info.step <= result.step]

    def _run(self, places: Sequence[EntryPlace]) -> tuple[ReplayResult, bool]:
        """Replay entries; return how far the checks agreed, and whether the state is of that step exactly."""
        result = ReplayResult(self._base)
        with ThreadPoolExecutor(1, "raystow-replay") as reader:
            coming: Future[DecodedEntry] | None = reader.submit(self._read, places[0]) if places else None
            for number, place in enumerate(places):
                assert coming is not None
                touched = False
                try:
                    decoded = coming.result()
                    coming = reader.submit(self._read, places[number + 1]) if number + 1 < len(places) else None
                    self._check_before(decoded, result)
                    touched = True
                    self._apply(decoded)
                except (RaystowError, _Mismatch) as error:
                    self._log.warning(
                        "the replay ends before step %d: %s", place.info.step, error, extra={"step": place.info.step}
                    )
                    return result, not touched
                except Exception as error:
                    self._log.exception("the replay ends before step %d: %r", place.info.step, error)
                    return result, not touched
                header = decoded.entry.header
                result = ReplayResult(place.info.step, decoded.entry.digest, value_tree.loads(header.values))
        return result, True

    def _read(self, place: EntryPlace) -> DecodedEntry:
        entry = parse(place.info, self._fetch(place))
        stored, header = entry.stored(), entry.header
        steps = []
        for step in header.steps:
            gradients = [decode(gradient, stored) for gradient in step.gradients]
            steps.append(
                StepInputs(step.optimizer, _groups(step.groups), gradients, _dict(value_tree.loads(step.scale or '["d",[]]')))
            )
        buffers = {name: tensor for name, one in header.buffers if (tensor := decode(one, stored)) is not None}
        value_tree.loads(header.values)
        return DecodedEntry(entry, steps, [_groups(groups) for groups in header.groups], buffers)

    def _check_before(self, decoded: DecodedEntry, last: ReplayResult) -> None:
        entry = decoded.entry
        if entry.info.previous != last.step:
            raise Damaged(f"the entry follows step {entry.info.previous}, and not step {last.step}")
        if entry.header.parent and last.digest and entry.header.parent != last.digest:
            raise Damaged("the entry does not follow the one before: they were recorded by different processes")
        if entry.header.before and (name := self._digester.difference(entry.header.before, whole=True)):
            raise Damaged(f"the state of step {last.step} is not the one that the entry starts from: {name} differs")
        there = len(self._state.optimizers)
        if len(decoded.groups) != there or any(not 0 <= step.optimizer < there for step in decoded.steps):
            raise StateError(f"steps of {len(decoded.groups)} optimizers were recorded, there are {there}")

    def _apply(self, decoded: DecodedEntry) -> None:
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
        header = decoded.entry.header
        if (differs := self._digester.difference(header.after, whole=header.whole)) is not None:
            raise _Mismatch(
                f"the state differs from the recorded one in {differs}; the optimizer, torch, or the GPU computes otherwise"
            )


def _groups(texts: Sequence[str]) -> list[dict[str, object] | None]:
    return [_dict(value_tree.loads(text)) if text else None for text in texts]


def _dict(tree: object) -> dict[str, object]:
    if not isinstance(tree, dict):
        raise Damaged("hyper-parameters that are no dict")
    return tree
