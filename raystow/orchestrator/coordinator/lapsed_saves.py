"""Open saves that a rank or part will not add to, because it restores: what it saves from then on has another past."""

from __future__ import annotations

from collections.abc import Sequence

from ...storage.errors import SaveFailed
from ...storage.format.parts import is_part
from ...storage.format.rank_spans import member_text
from ...workers.protocol.messages import Incarnation, RestoreVote
from ...workers.protocol.messages.coordinator import RankSaveRequest
from .attempt import Attempt, Phase
from .part_saves import UNSAVED


class LapsedSaves:
    """Not thread-safe."""

    def __init__(self) -> None:
        self._restores: dict[int, tuple[Incarnation, int]] = {}  # rank or part -> its newest restore
        self._lapsed: set[tuple[int, Incarnation, int]] = set()  # part, process, and save that no rank had begun when it restored

    def restores(self, vote: RestoreVote, open: Sequence[Attempt], generation: int, *, exists: bool) -> list[Attempt]:
        """Note a restore, and return those of the ``open`` attempts that wait for its rank or part, unless its own save is on its
        way. While no version ``exists``, it may be one that starts late, if the ranks have not been restarted since."""
        rank, which = vote.rank, (vote.incarnation, vote.number)
        if vote.tried is not None or self._restores.get(rank) == which:  # later in the same restore, or a repetition
            return []
        self._restores[rank] = which
        if is_part(rank):
            begun = {attempt.step for attempt in open}
            of_others = {key for key in self._lapsed if key[0] != rank}
            self._lapsed = of_others | {(rank, vote.incarnation, save) for save, step in vote.saving if step not in begun}
        steps = {step for _, step in vote.saving}
        gathering = [one for one in open if one.phase is Phase.GATHERING and one.step not in steps]
        waiting = [one for one in gathering if rank in one.members and rank not in one.ranks]
        return [one for one in waiting if exists or one.generation < generation]

    def check(self, request: RankSaveRequest) -> None:
        """Raise ``SaveFailed`` for a save that a part began before it restored."""
        if (request.rank, request.incarnation, request.save) in self._lapsed:
            what = f"the part has restored a version since it began; {UNSAVED}"
            raise SaveFailed(what, subject=f"{member_text(request.rank)}, save of step {request.step}")
