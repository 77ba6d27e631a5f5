"""Processes that take ranks, as tests name them: ``a0``, ``b0``. Those that come later in the alphabet started later."""

from __future__ import annotations

from raystow.workers.protocol.messages import Incarnation

FIRST = f"{2:016x}{3:016x}"
"""The id of the first repository that is made with a ``FakeClock``."""


def incarnation(name: str, repository: str = FIRST, *, number: int = 1) -> Incarnation:
    return Incarnation(repository, 1, number, name, "job 1")


A0, A1, B0, B1 = (incarnation(name) for name in ("a0", "a1", "b0", "b1"))
"""Processes of ranks 0 and 1: ``a`` first, replaced by ``b``."""
