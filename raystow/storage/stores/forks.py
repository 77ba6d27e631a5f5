"""obstore's threads do not survive a fork: in the child a call would hang."""

from __future__ import annotations

import os

from ..errors import StoreError

_first_process: int | None = None


def mark_used(subject: str) -> None:
    """Note that this process uses obstore, which starts threads. Raises ``StoreError`` if it was forked from one that did."""
    global _first_process
    if _first_process not in (None, os.getpid()):
        raise StoreError(
            "this process was forked from one that had already used an object store",
            subject=subject,
            remedy="start processes by spawn, as Ray does, or fork before the first use",
        )
    _first_process = os.getpid()
