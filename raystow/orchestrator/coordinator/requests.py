"""The handlers of requests that need the state machine of saves only. Those that need more are in ``actor``."""

from __future__ import annotations

from collections.abc import Callable

from ...storage.errors import ProtocolError, RaystowError
from ...storage.format.parts import is_part, part_number
from ...workers.protocol import messages
from ...workers.protocol.messages import Acknowledged, Committed, FailureNoted, Message, Ticket
from .attempt import Attempt, Phase
from .attempts import Coordinator

_ASKING = (Phase.GATHERING, Phase.COMPARING)

Answer = Callable[[], Message | None]
"""Returns the answer to a request, or None while it waits for a change of the state machine. It may raise ``RaystowError``."""


def handle(core: Coordinator, request: Message) -> Answer:
    """Apply a request, and return its answer. Call the answer again after each change, until it is not None."""
    answer: Message = Acknowledged()
    match request:
        case messages.JoinRun(rank, incarnation, world_size, part):
            if rank != (part_number(part) if part else rank):
                raise ProtocolError(f"part {part!r} has another number than {rank}")
            core.join(rank, incarnation, world_size)
        case messages.AskNextSave(rank) if is_part(rank):
            return _once(lambda: core.next_cut(request))
        case messages.Begin(_, who) if is_part(who.rank):
            return _once(lambda: core.begin_part(request))
        case messages.AskNextSave():
            answer = core.next_save(request)
        case messages.Begin():
            answer = core.begin(request)
        case messages.RankFinished(ticket, rank, covered, digests):
            core.finished(ticket, rank, covered, digests)
        case messages.AwaitRanks(ticket, last, answers):
            core.answered(ticket, answers)
            return _when(core, ticket, last, lambda attempt: attempt.phase not in _ASKING, lambda attempt: Acknowledged())
        case messages.PartStaged(ticket, info):
            core.staged(ticket, info)
        case messages.PartStored(ticket, info, last):
            core.fragment(ticket, info)
            return _when(core, ticket, last, lambda attempt: attempt.phase.over, lambda attempt: Committed(attempt.result()))
        case messages.PartFailed(ticket, reason):
            core.failed(ticket, reason)
        case messages.RankSaveFailed(rank, incarnation, save, step, reason):
            answer = FailureNoted(core.save_failed(rank, incarnation, save, step, reason))
        case messages.RankDisconnected(rank, incarnation, reason):
            core.rank_disconnected(rank, incarnation, reason)
        case _:
            raise TypeError(f"no handler of {type(request).__name__}")
    return lambda: answer


def _once(make: Answer) -> Answer:
    """Give the first answer or error each time: to make it changes the state machine."""
    made: Message | RaystowError | None = None

    def answer() -> Message | None:
        nonlocal made
        if made is None:
            try:
                made = make()
            except RaystowError as error:
                made = error
        if isinstance(made, RaystowError):
            raise made
        return made

    return answer


def _when(
    core: Coordinator, ticket: Ticket, last: int, reached: Callable[[Attempt], bool], make: Callable[[Attempt], Message]
) -> Answer:
    """Answer when an attempt has reached a phase, or with the warning after the number ``last``."""
    attempt = core.attempt(ticket)

    def answer() -> Message | None:
        if attempt.phase is Phase.ABORTED and reached(attempt):
            attempt.result()  # raises
        if (asked := core.questions(ticket) or core.late(ticket, last)) is not None:  # also if it has become a version meanwhile
            return asked
        return make(attempt) if reached(attempt) else None

    return answer
