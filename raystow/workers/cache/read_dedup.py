"""Decides which node reads which bytes from the store when several nodes restore together: the first node that asks for a byte
reads it, and the others get it from there.

The bytes that a node needs are known to that node only, so nothing is divided beforehand. Each object has an *owner*, the same
for all nodes, that they ask before they read it. A claim is a hint: a node that does not get the bytes from their claimant reads
them itself.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..protocol.messages import Claim, Span
from .pack_file import without

_ROUNDS = 8  # restores that are remembered, of all repositories together


@dataclass
class ReadClaims:
    """The claims for the objects that this node owns. Thread-safe."""

    _rounds: OrderedDict[str, dict[str, list[Claim]]] = field(default_factory=OrderedDict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def claim(self, round: str, key: str, span: Span, node: str, *, lost: Sequence[str] = ()) -> list[Claim]:
        """Return ``span`` in parts, ascending, with the node that reads each. Parts that are unclaimed, or claimed by a
        node in ``lost``, are given to ``node``."""
        with self._lock:
            if round not in self._rounds:
                self._rounds[round] = {}
                while len(self._rounds) > _ROUNDS:
                    self._rounds.popitem(last=False)
            claims = self._rounds[round].setdefault(key, [])
            kept = [
                (start, end, who)
                for first, last, who in claims
                for start, end in (without((first, last), [span]) if who in lost else [(first, last)])
            ]
            parts = [(max(start, span[0]), min(end, span[1]), who) for start, end, who in kept]
            taken = [part for part in parts if part[0] < part[1]]
            mine = [(*part, node) for part in without(span, [(start, end) for start, end, _ in taken])]
            claims[:] = [*kept, *mine]
            return sorted(taken + mine)
