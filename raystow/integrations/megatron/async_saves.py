"""Saves in flight, in the place of Megatron's queue of asynchronous saves (``--async-save``)."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from ...orchestrator.client.pending import Pending
from ...storage.errors import RaystowError

logger = logging.getLogger(__name__)


@dataclass
class AsyncSave:
    """A save in flight. ``finalize_fns``: what Megatron does when it is a version, such as writing the tracker."""

    pending: Pending
    finalize_fns: list[Callable[[], object]] = field(default_factory=list)

    def add_finalize_fn(self, done: Callable[[], object]) -> None:
        self.finalize_fns.append(done)


class AsyncSaves:
    """Has the methods of Megatron's ``AsyncCallsQueue``. No rank waits for others: what is to be done concerns one rank."""

    def __init__(self) -> None:
        self._saves = deque[AsyncSave]()
        self._failure: RaystowError | None = None

    def schedule_async_request(self, save: AsyncSave) -> None:
        self._saves.append(save)

    def maybe_finalize_async_calls(self, blocking: bool = False, no_dist: bool = False) -> None:
        """Do what is to be done for saves that have ended. Nothing is done for one that has failed, which its Checkpointer has
        logged, and which the next saves raise if there are too many, or ``close`` if there are none."""
        while self._saves and (blocking or self._saves[0].pending.done()):
            save, self._failure = self._saves.popleft(), None
            try:
                save.pending.result()
            except RaystowError as error:
                logger.error("step %d is no version: %s", save.pending.step, error)
                self._failure = error
                continue
            for done in save.finalize_fns:
                done()

    def get_num_unfinalized_calls(self) -> int:
        return len(self._saves)

    def close(self, abort: bool = False) -> None:
        """Training has ended: raise why the newest save is no version, so that the process does not end as if it were one."""
        if self._failure is not None and not abort:
            raise self._failure
