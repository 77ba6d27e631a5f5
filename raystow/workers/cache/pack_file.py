"""An object of the store in memory: whole, or the ranges of it that were read."""

from __future__ import annotations

import contextlib
import itertools
import mmap
import operator
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from ..protocol.messages import Span

_PARTS = 512  # that one call writes; the kernel takes 1,024


class MappedFile:
    """An anonymous file (memfd), and this process's mapping of it. Reusing both avoids page faults in a new mapping,
    which cost as much as the writes."""

    descriptor = -1

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("raystow-pack", os.MFD_CLOEXEC)
        os.ftruncate(self.descriptor, 1)  # an empty file cannot be mapped
        self.mapping = mmap.mmap(self.descriptor, 1)
        self.used = False  # it probably has pages

    def resize(self, size: int) -> None:
        """Raises ``BufferError`` if a view of the mapping exists."""
        self.mapping.resize(max(1, size))
        os.ftruncate(self.descriptor, size)

    def close(self) -> None:
        """Release the memory. It stays valid for existing views and for other processes that map it."""
        descriptor, self.descriptor = self.descriptor, -1  # the number may be another file's soon
        os.close(descriptor)
        mapping = self.mapping
        del self.mapping  # an existing view closes it when the view is deleted
        with contextlib.suppress(BufferError):
            mapping.close()

    def __del__(self) -> None:
        """Release the memory if nobody has, since an error came or another file took its place."""
        if self.descriptor >= 0:
            os.close(self.descriptor)


class PackFile:
    """Anonymous memory of the object's size. Pages that were not written take no memory. Other processes map it instead of
    copying it; what was lent stays valid for them after ``close``. Thread-safe."""

    def __init__(self, size: int, memory: MappedFile | None = None) -> None:
        """``memory``: from ``vacate`` of another one."""
        self.size = size
        self._memory = memory or MappedFile()
        self._memory.resize(size)
        self._lent = False
        self._changed = threading.Condition()
        self._present: list[Span] = []
        self._coming: list[Span] = []

    @property
    def filled(self) -> int:
        """Bytes that were filled."""
        with self._changed:
            return sum(end - start for start, end in self._present)

    def write(self, parts: Sequence[memoryview]) -> None:
        """Fill it whole with the concatenation of ``parts``."""
        if self._memory.used:
            self._copy(parts)
        else:
            self._write(parts)
        with self._changed:
            self._present = [(0, self.size)]

    def _write(self, parts: Sequence[memoryview]) -> None:
        """Write to the file: in a mapping, each new page would cost a page fault."""
        left, at = deque(part for part in parts if part.nbytes), 0
        while left:
            written = os.pwritev(self._memory.descriptor, list(itertools.islice(left, _PARTS)), at)
            at += written
            while left and written >= left[0].nbytes:
                written -= left.popleft().nbytes
            if written:
                left[0] = left[0][written:]

    def _copy(self, parts: Sequence[memoryview]) -> None:
        """Write to the mapping, by numpy, which releases the interpreter's lock."""
        whole, at = np.frombuffer(self._memory.mapping, np.uint8), 0
        for part in parts:
            whole[at : at + part.nbytes] = np.frombuffer(part, np.uint8)
            at += part.nbytes

    def ensure(self, spans: Sequence[Span], fetch: Callable[[int, memoryview], None]) -> None:
        """Return when the spans are filled. ``fetch(start, target)`` fills what is missing, each byte once, even if several
        threads ask for it. Its errors are raised here; threads that wait for the same bytes then fetch them themselves."""
        for wanted in spans:
            while (claimed := self._claim(wanted)) is not None:
                arrived = False
                try:
                    with self._view()[claimed[0] : claimed[1]] as target:
                        fetch(claimed[0], target)
                    arrived = True
                finally:
                    with self._changed:
                        self._coming.remove(claimed)
                        if arrived:
                            self._present = _merged([*self._present, claimed])
                        self._changed.notify_all()

    def arrives(self, span: Span, seconds: float) -> bool | None:
        """Whether a span is filled. Waits while it is being fetched; None if it still is after ``seconds``."""
        with self._changed:
            self._changed.wait_for(lambda: not self._is_coming(span), seconds)
            return None if self._is_coming(span) else not without(span, self._present)

    @property
    def content(self) -> memoryview:
        """A view of the whole object. The memory stays valid as long as the view exists."""
        return self._view().toreadonly()

    def lend(self) -> int:
        """Return a descriptor of the memory, which the caller closes. The memory is not reused, since its readers do not report
        when they have read it."""
        self._lent = True
        return os.dup(self._memory.descriptor)

    def close(self) -> None:
        """Release the memory."""
        if (memory := self.vacate()) is not None:
            memory.close()

    def vacate(self) -> MappedFile | None:
        """Close it, and return its memory for reuse; None if others still use that."""
        memory = self._memory
        del self._memory  # which another file may get soon
        if not self._lent:
            with contextlib.suppress(BufferError):
                memory.resize(self.size)  # keeps the size, but fails if a view exists
                memory.used = True
                return memory
        memory.close()
        return None

    def _view(self) -> memoryview:
        return memoryview(self._memory.mapping)[: self.size]

    def _is_coming(self, span: Span) -> bool:
        missing = without(span, self._present)
        return bool(missing) and not any(without(part, self._coming) for part in missing)

    def _claim(self, wanted: Span) -> Span | None:
        """Return a missing part of a span that no thread fetches, for the caller to fetch; None once all of it is here."""
        with self._changed:
            while missing := without(wanted, self._present):
                for span in missing:
                    if free := without(span, self._coming):
                        self._coming.append(free[0])
                        return free[0]
                self._changed.wait()
        return None


class Spares:
    """Memory of deleted objects, for new ones: new pages cost more than writing to them. Not thread-safe."""

    def __init__(self) -> None:
        self._spares: list[tuple[int, MappedFile]] = []  # bytes of the object that was there

    @property
    def nbytes(self) -> int:
        """Bytes of all spare memory, in whole pages."""
        return sum(-(-size // mmap.PAGESIZE) * mmap.PAGESIZE for size, _ in self._spares)

    def give(self, file: PackFile) -> None:
        """Close a file, and keep its memory for another one."""
        if (memory := file.vacate()) is not None:
            self._spares.append((file.size, memory))

    def take(self, size: int) -> MappedFile | None:
        """Return memory for a ``PackFile``: the smallest that is large enough, else the largest; None if there is none."""
        if not self._spares:
            return None
        fitting = [spare for spare in self._spares if spare[0] >= size]
        size_of = operator.itemgetter(0)
        found = min(fitting, key=size_of) if fitting else max(self._spares, key=size_of)
        self._spares.remove(found)
        return found[1]

    def keep(self, nbytes: int) -> None:
        """Release all but ``nbytes`` bytes."""
        while self._spares and self.nbytes > max(0, nbytes):
            self._spares.pop()[1].close()


def _merged(spans: Sequence[Span]) -> list[Span]:
    """Join spans that touch or overlap; ascending."""
    merged: list[Span] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((start, end))
    return merged


def without(wanted: Span, spans: Sequence[Span]) -> list[Span]:
    """Return the parts of a span that are in none of ``spans``, ascending."""
    parts, begin = list[Span](), wanted[0]
    for start, end in sorted(spans):
        if end <= begin or start >= wanted[1]:
            continue
        if start > begin:
            parts.append((begin, start))
        begin = max(begin, end)
    if begin < wanted[1]:
        parts.append((begin, wanted[1]))
    return parts
