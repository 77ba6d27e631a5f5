"""The processes that have the ranks and parts of a run, and which of them may speak for one."""

from __future__ import annotations

from collections.abc import Callable

from ...storage.commit.catalog import Catalog
from ...storage.errors import Fenced, NotARepository
from ...storage.format.parts import is_part
from ...storage.format.rank_spans import member_text
from ...storage.root.root_register import BEGIN_ANEW
from ...workers.protocol.messages import AskNextSave, CompareReplicas, JournalVote, RequestExport, RestoreVote, UnusedNames
from ...workers.protocol.messages.coordinator import Incarnation, RankSaveRequest
from .attempt import ANOTHER_RUN

MemberMessage = RankSaveRequest | AskNextSave | RestoreVote | UnusedNames | JournalVote | CompareReplicas | RequestExport


class Membership:
    """Not thread-safe. ``on_join``: called with the number of a rank or part that another process has taken, and the process that
    had it.

    Attributes:
        generation: The first rank that joins again, or with another world size, starts a new one.
    """

    def __init__(self, catalog: Catalog, on_join: Callable[[int, Incarnation | None], None]) -> None:
        self._catalog, self._on_join = catalog, on_join
        self._processes: dict[int, Incarnation] = {}
        self._ousted: set[Incarnation] = set()  # the processes that had ranks when another run took over from one of them
        self._assumed: set[int] = set()  # ranks whose process has joined an earlier coordinator only
        self._joined: dict[int, int] = {}  # rank -> generation in which its process joined
        self._world_size: int | None = None  # of that generation, once known
        self.generation = 0

    def get(self, rank: int) -> Incarnation | None:
        """The process that has a rank, if any has joined."""
        return self._processes.get(rank)

    def joined(self, rank: int) -> int:
        """The generation in which the process of a rank joined."""
        return self._joined[rank]

    def join(self, rank: int, incarnation: Incarnation, world_size: int | None = None) -> None:
        """A process has taken a rank or part. A part belongs to no generation: ranks go on without those that are restarted."""
        self._refuse_former(incarnation)
        self._assumed.discard(rank)
        previous = self._processes.get(rank)
        if previous == incarnation:
            return
        self._processes[rank] = incarnation
        if not is_part(rank):
            resized = world_size is not None and self._world_size not in (None, world_size)
            if resized or (previous is not None and self._joined[rank] == self.generation):
                self.generation += 1
            self._world_size = world_size or self._world_size
        self._joined[rank] = self.generation
        self._on_join(rank, previous)

    def assume(self, rank: int, incarnation: Incarnation, world_size: int | None = None) -> None:
        """Let a process join that did so before this coordinator was restarted. Of several, the one that started last does."""
        known = self._processes.get(rank)
        if known is None or (rank in self._assumed and incarnation > known):
            self.join(rank, incarnation, world_size)
            self._assumed.add(rank)

    def check(self, message: MemberMessage) -> None:
        """Raise ``Fenced`` if another process has taken the rank or part of the one that sends a message, or another run the
        repository, and ``NotARepository`` if the process began with one that is gone."""
        rank, incarnation, uri = message.rank, message.incarnation, self._catalog.uri
        self._refuse_former(incarnation)
        takes_over = isinstance(message, RankSaveRequest | AskNextSave) and message.on_fenced == "takeover"
        other_size = not is_part(rank) and self._world_size not in (None, message.world_size)
        if other_size and not takes_over and incarnation < (newest := max(self._ranks.values())):
            what = f"{newest} has begun a run of world size {self._world_size} after {incarnation}"
            raise Fenced(what, subject=uri, remedy=ANOTHER_RUN)
        self.assume(rank, incarnation, message.world_size)
        if takes_over and self._processes[rank] != incarnation:
            if self._processes[rank] not in self._ousted:  # by the first rank of a run: no attempt has ranks of both runs
                self._ousted = {*self._ranks.values()}
                self.generation += 1
            self.join(rank, incarnation, message.world_size)
        if self._processes[rank] != incarnation:
            what = f"{self._processes[rank]} has taken up this {'part' if is_part(rank) else 'rank'} after {incarnation}"
            remedy = f"run each rank once, and give each process its own rank; {ANOTHER_RUN}"
            if is_part(rank):
                remedy = f"run each part once; {ANOTHER_RUN}"
            raise Fenced(what, subject=f"{member_text(rank)} of {uri}", remedy=remedy)
        if takes_over:
            self._ousted.discard(incarnation)
        if incarnation in self._ousted:
            what = f"another run has taken over from that of {incarnation}"
            raise Fenced(what, subject=uri, remedy=ANOTHER_RUN)

    @property
    def _ranks(self) -> dict[int, Incarnation]:
        return {rank: process for rank, process in self._processes.items() if not is_part(rank)}

    def _refuse_former(self, incarnation: Incarnation) -> None:
        """Raise ``NotARepository`` if a process began with a repository that was here before."""
        if incarnation.repository != self._catalog.id:
            what = (
                f"{incarnation} began with repository {incarnation.repository}, in whose place is repository {self._catalog.id}"
            )
            raise NotARepository(f"{what} now", subject=self._catalog.uri, remedy=BEGIN_ANEW)
