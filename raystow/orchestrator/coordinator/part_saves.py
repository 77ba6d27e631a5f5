"""Saves of parts that wait until a rank has begun to save the same step: only ranks open attempts."""

from __future__ import annotations

from collections.abc import Sequence

from ...storage.errors import DeadlineExceeded, SaveFailed
from ...storage.format.parts import name_of
from ...storage.format.rank_spans import member_text
from ...storage.runtime.clock import Clock
from ...workers.protocol.messages import AskNextSave, NextSave
from ...workers.protocol.messages.coordinator import RankSaveRequest
from .attempt import Attempt, Phase

UNSAVED = "what it has saved for this step is in no version"


class PartSaves:
    """What parts wait for."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._since: dict[tuple[int, int], tuple[float, float]] = {}  # part and save -> when it began, and its deadline
        self._asked: dict[tuple[int, int], float] = {}  # part and step -> until when it waits
        self._joined: dict[int, float] = {}  # part -> when its process joined

    def joined(self, part: int) -> None:
        """A process has taken a part. What it saves is not compared with what the ranks saved before."""
        self._joined[part] = self._clock.monotonic()
        self._since = {key: times for key, times in self._since.items() if key[0] != part}
        self._asked = {key: until for key, until in self._asked.items() if key[0] != part}

    def taken_since(self, attempt: Attempt) -> list[int]:
        """The parts that an attempt waits for, and that other processes have taken since it was opened."""
        lacking = attempt.parts.keys() - attempt.ranks.keys()
        return sorted(part for part in lacking if self._joined.get(part, 0.0) > attempt.opened)

    def joins(self, request: RankSaveRequest, attempt: Attempt) -> None:
        """The save of a part joins an attempt. Raises ``SaveFailed`` if it must not."""
        part = member_text(request.rank)
        if request.rank not in attempt.parts:
            remedy = f"pass parts=(..., {name_of(request.rank)!r}) to the Checkpointer of each rank"
            raise SaveFailed("the ranks do not declare it", subject=part, remedy=remedy)
        if attempt.has_other_past(request):
            what = f"it has not restored together with the ranks; {UNSAVED}"
            remedy = "end this process if another one has taken the part, else restore on all ranks and parts"
            raise SaveFailed(what, subject=f"{part}, save of step {request.step}", remedy=remedy)
        self._ended(request)

    def _ended(self, request: RankSaveRequest) -> None:
        self._since.pop((request.rank, request.save), None)

    def check(self, request: RankSaveRequest, attempts: Sequence[Attempt], generation: int) -> None:
        """Raise ``SaveFailed`` if no rank will save the step of a part any more. ``attempts``: all, oldest first; ``generation``:
        that of the ranks."""
        part, now = request.rank, self._clock.monotonic()
        begun, deadline = self._since.setdefault((part, request.save), (now, now + request.timeout))
        since = self._joined.get(part, 0.0)
        seen = [one for one in attempts if one.opened >= since and one.generation == generation]
        why = f"no rank has begun to save it for {now - begun:.0f} s" if now >= deadline else ""
        if seen and seen[-1].step > request.step:
            why = f"the ranks have gone on to step {seen[-1].step}"
        elif seen and seen[-1].step == request.step and seen[-1].phase is Phase.ABORTED:
            why = f"the ranks have given it up: {seen[-1].reason}"
        if why:
            self._ended(request)
            raise SaveFailed(f"{why}; {UNSAVED}", subject=f"{member_text(part)}, save of step {request.step}")

    def skipped(self, ask: AskNextSave, attempts: Sequence[Attempt]) -> list[Attempt]:
        """The attempts that wait for a part, which waits for a later step and does not save theirs."""
        lacking = [
            one for one in attempts if one.phase is Phase.GATHERING and ask.rank in one.parts and ask.rank not in one.ranks
        ]
        return [one for one in lacking if one.step < ask.first and one.step not in ask.saving]

    def next(self, ask: AskNextSave, attempts: Sequence[Attempt]) -> NextSave | None:
        """The oldest save that waits for a part, that rank 0 has begun; None if there is none yet. Raises
        ``DeadlineExceeded`` if the part has waited for too long."""
        key, now = (ask.rank, ask.first), self._clock.monotonic()
        deadline = self._asked.setdefault(key, now + ask.timeout)
        for attempt in attempts:
            waits = attempt.phase is Phase.GATHERING and 0 in attempt.ranks and ask.rank in attempt.parts
            if waits and ask.rank not in attempt.ranks and attempt.step >= ask.first:
                del self._asked[key]
                return NextSave(attempt.step, True, attempt.cut)
        if now >= deadline:
            del self._asked[key]
            what = f"the ranks have not begun to save step {ask.first} or a later one for {ask.timeout:.0f} s"
            raise DeadlineExceeded(what, subject=member_text(ask.rank), remedy="wait again, or end: the training may have ended")
        return None

    def tick(self) -> bool:
        """Whether a deadline is over, so that who waits must be answered."""
        now = self._clock.monotonic()
        return any(now >= until for _, until in self._since.values()) or any(now >= until for until in self._asked.values())
