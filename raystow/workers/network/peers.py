"""The other nodes' workers, as this one talks to them."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import asdict, astuple
from typing import TypeVar

from ...storage.clock import Clock
from ...storage.errors import ClusterError
from ...storage.object_store import Buffer
from ..fetching.claims import Claim
from ..memory.memory_tier import Part
from ..memory.pack_file import Span
from .copies import Copy
from .line import Contact, Line

logger = logging.getLogger(__name__)

_Answer = TypeVar("_Answer")
_IDLE = 64  # lines that are kept open
_SHUN = 30.0  # seconds for which a node that did not answer is not asked again
_LATE = 60.0  # seconds that another node may take to read from the store what is wanted of it


class Peers:
    """From any thread. ``find`` tells where a node's worker listens. Any call may raise ``ClusterError``: the node did not answer
    just now or a moment ago."""

    def __init__(self, find: Callable[[str], Contact], clock: Clock) -> None:
        self._find, self._clock = find, clock
        self._lock = threading.Lock()
        self._contacts: dict[str, Contact] = {}
        self._idle: OrderedDict[Line, str] = OrderedDict()
        self._shunned: dict[str, float] = {}  # until when

    def read(self, node: str, repository: str, key: str, start: int, target: memoryview) -> bool:
        """Fill ``target`` with an object's bytes from ``start``, waited for if the node is reading them from the store; whether
        the node has them."""
        asked = {"what": "read", "repository": repository, "key": key, "start": start, "length": target.nbytes}

        def ask(line: Line) -> str:
            line.send(asked)
            found: str = line.receive()["found"]
            if found == "here":
                line.fill(target)
            return found

        end = self._clock.monotonic() + _LATE
        while (found := self._talk(node, ask)) == "coming":
            if self._clock.monotonic() > end:
                raise ClusterError(f"has not read {key} after {_LATE:.0f} s", subject=f"node {node}")
        return found == "here"

    def claim(self, desk: str, round: str, key: str, span: Span, node: str, *, lost: Sequence[str] = ()) -> list[Claim]:
        """See ``Claims.claim``: at another node's desk."""
        asked = {"what": "claim", "round": round, "key": key, "start": span[0], "end": span[1], "node": node, "lost": [*lost]}

        def ask(line: Line) -> list[Claim]:
            line.send(asked)
            return [(start, end, who) for start, end, who in line.receive()["claims"]]

        return self._talk(desk, ask)

    def accept(self, node: str, copy: Copy, data: Buffer) -> Part:
        """Give a node an object; what it has of that part then."""
        size = memoryview(data).nbytes
        homes = {"home": astuple(copy.home), "base": copy.base and astuple(copy.base)}
        asked = {"what": "accept", **asdict(copy), **homes, "length": size}

        def ask(line: Line) -> Part:
            line.send(asked)
            line.send_bytes(data)
            part = line.receive()["part"]
            return Part(part["objects"], tuple(part["line"]), part["short"])

        return self._talk(node, ask)

    def close(self) -> None:
        """Hang up."""
        with self._lock:
            for line in self._idle:
                line.close()
            self._idle.clear()

    def _talk(self, node: str, ask: Callable[[Line], _Answer]) -> _Answer:
        """Ask, and ask a second time if the worker has been started anew since it was last asked."""
        with self._lock:
            if self._shunned.get(node, 0.0) > self._clock.monotonic():
                raise ClusterError("did not answer a moment ago", subject=f"node {node}")
            known = node in self._contacts
        try:
            try:
                return self._ask(node, ask)
            except ConnectionError:
                self._forget(node)
                if not known:
                    raise
                return self._ask(node, ask)
        except (OSError, ClusterError) as error:
            self._forget(node)
            with self._lock:
                self._shunned[node] = self._clock.monotonic() + _SHUN
            raise ClusterError(f"does not answer: {error}", subject=f"node {node}") from error

    def _ask(self, node: str, ask: Callable[[Line], _Answer]) -> _Answer:
        line = self._line(node)
        try:
            answer = ask(line)
        except BaseException:
            line.close()
            raise
        with self._lock:
            self._idle[line] = node
            if len(self._idle) > _IDLE:
                self._idle.popitem(last=False)[0].close()
        return answer

    def _line(self, node: str) -> Line:
        """One that nobody uses: a thread may wait long for its answer."""
        with self._lock:
            line = next((line for line, to in self._idle.items() if to == node), None)
            if line is not None:
                del self._idle[line]
                return line
            contact = self._contacts.get(node)
        contact = contact or self._find(node)
        with self._lock:
            self._contacts[node] = contact
        return Line.call(contact)

    def _forget(self, node: str) -> None:
        with self._lock:
            self._contacts.pop(node, None)
            for line in [line for line, to in self._idle.items() if to == node]:
                del self._idle[line]
                line.close()
