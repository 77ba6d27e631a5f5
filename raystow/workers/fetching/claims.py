"""Who reads what from the store, among nodes that restore together: each byte is for the first that asks, the others get it from
there.

What a node wants is known to nobody but itself, so nothing is divided beforehand. The *desk* of an object is the one node, the
same for all of them, that they ask about it. A claim is a hint: who does not get the bytes where they are claimed reads them
itself.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from ...storage.coding.digest import stored_digest
from ..memory.pack_file import Span, without

_ROUNDS = 8  # restores that are remembered, of all repositories together

Claim = tuple[int, int, str]
"""First byte, the byte after the last, and the node that reads them."""


@dataclass(frozen=True)
class Company:
    """The nodes that restore together. ``round``: names this restore; what was read for an earlier one is gone by now."""

    round: str = ""
    nodes: Sequence[str] = ()

    def desk(self, key: str) -> str:
        """The node to ask about an object; empty where there is nobody to share it with."""
        if len(self.nodes) < 2:
            return ""
        return self.nodes[int.from_bytes(stored_digest(key.encode())[:8], "little") % len(self.nodes)]


ALONE = Company()
"""For who restores by himself."""


@dataclass
class Claims:
    """What this node has at its desk. From any thread."""

    _rounds: OrderedDict[str, dict[str, list[Claim]]] = field(default_factory=OrderedDict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def claim(self, round: str, key: str, span: Span, node: str, *, lost: Sequence[str] = ()) -> list[Claim]:
        """``span`` in parts, ascending, with the node that reads each: ``node`` what nobody has claimed but nodes of ``lost``."""
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
