"""Asks Ray for the nodes that are alive, for the attempts that need them, and for those that will be removed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from .attempts import Coordinator


class NodeCensus:
    """For one event loop. At most one question is open. ``alive`` and ``leaving``: return the nodes that are alive and those that
    will be removed, by Ray."""

    def __init__(self, alive: Callable[[], set[str]], leaving: Callable[[], set[str]]) -> None:
        self._alive, self._leaving = alive, leaving
        self._open: tuple[asyncio.Task[tuple[set[str], set[str]]], set[str]] | None = None  # the answer; the nodes known before

    async def look(self, core: Coordinator, seconds: float) -> None:
        """Ask Ray, and note its answer once it is there: a frozen head node does not answer, and neither commits nor deadlines
        wait for it, but for ``seconds`` once. A node that saves since Ray was asked is alive."""
        asked_now = self._open is None
        if self._open is None:
            self._open = asyncio.create_task(asyncio.to_thread(self._ask, core.schedule.in_use)), core.nodes
        answer, asked = self._open
        await asyncio.wait([answer], timeout=seconds if asked_now else 0.0)
        if answer.done():
            self._open = None
            alive, core.schedule.leaving = answer.result()
            core.nodes_alive(alive | (core.nodes - asked))

    def _ask(self, for_leaving: bool) -> tuple[set[str], set[str]]:
        return self._alive(), self._leaving() if for_leaving else set()
