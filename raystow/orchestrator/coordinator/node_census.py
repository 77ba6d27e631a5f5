"""Asks Ray for the nodes that are alive, for the attempts that need them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from .attempts import Coordinator


class NodeCensus:
    """For one event loop. At most one question is open. ``ask``: returns the nodes that are alive, by Ray."""

    def __init__(self, ask: Callable[[], set[str]]) -> None:
        self._ask = ask
        self._open: tuple[asyncio.Task[set[str]], set[str]] | None = None  # the nodes alive, and those known before

    async def look(self, core: Coordinator, seconds: float) -> None:
        """Ask Ray which nodes are alive, and note its answer once it is there: a frozen head node does not answer, and neither
        commits nor deadlines wait for it, but for ``seconds`` once. A node that saves since Ray was asked is alive."""
        asked_now = self._open is None
        if self._open is None:
            self._open = asyncio.create_task(asyncio.to_thread(self._ask)), core.nodes
        answer, asked = self._open
        await asyncio.wait([answer], timeout=seconds if asked_now else 0.0)
        if answer.done():
            self._open = None
            core.nodes_alive(answer.result() | (core.nodes - asked))
