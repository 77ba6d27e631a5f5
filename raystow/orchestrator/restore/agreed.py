"""Restores the version that all ranks agree on."""

from __future__ import annotations

import contextlib
import logging

from ...state.tree import State
from ...storage.errors import Damaged, RankRestarted, RaystowError
from ...storage.format.root import Entry
from ...storage.log import about
from ...storage.repository import Repository
from ...storage.runtime.clock import SYSTEM
from ...storage.runtime.gc_pause import uncollected
from ...storage.runtime.spans import Span, span
from ...storage.versions.version import Version
from . import progress_bar
from .agreement import Agreement
from .name_check import Incomplete
from .plan import Progress
from .planner import RestoreOptions, plan_restore

logger = logging.getLogger(__name__)


def restore_agreed(
    repository: Repository,
    into: State,
    agreement: Agreement,
    options: RestoreOptions = RestoreOptions(),  # noqa: B008
    *,
    progress: Progress | None = None,
) -> Version | None:
    """Restore the version that the agreement chooses, bit for bit; return it, or None if there is no version.

    Each rank reads the chunks that overlap its own shards. Raises ``StateError`` before anything is changed if ``into`` does not
    match the version.

    ``progress``: called with the decoded bytes of each chunk; None shows a bar where a person sees it.

    A damaged version is logged as an error. The next one tried must hold all tensors of ``into`` that the damaged one holds,
    whatever may be missing: they may be filled already, and a state made of two versions is never returned. Raises ``Damaged`` if
    no version is left.
    """
    begun = SYSTEM.monotonic()
    first = _settled(agreement, None, "")
    with span("restore.rank", agreement.trace, begun=begun, rank=options.rank, repository=repository.uri) as whole:
        Span("restore.agree", whole.trace, begun=begun).end()
        return _restore_first(first, repository, into, agreement, options, progress)


def _restore_first(
    first: Entry | None,
    repository: Repository,
    into: State,
    agreement: Agreement,
    options: RestoreOptions,
    progress: Progress | None,
) -> Version | None:
    """Restore the ``first`` version that the ranks have agreed on, or another one if that cannot be restored."""
    filled, entry = set[str](), first
    while entry is not None:
        damage, whole = "", True
        try:
            version = agreement.version(entry)
            with uncollected():
                with span("restore.plan", version=version.id):
                    plan = plan_restore(version, into, options, sources=agreement.sources, filled=filled, peers=agreement)
                filled.update(plan.names)
                fields = {"version": version.id, "attempt": version.attempt, "step": version.step, "rank": options.rank}
                log = about(logger, repository=repository.uri, **fields)
                log.info("restoring version %d (step %d): %s", version.id, version.step, plan.summary())
                with contextlib.ExitStack() as bar, span("restore.read", version=version.id, bytes=plan.nbytes):
                    title = f"restoring version {version.id}"
                    show = progress or bar.enter_context(progress_bar.shown(title, plan.raw, rank=options.rank))
                    plan.execute(_shared_progress(agreement, show))
                del plan
        except Damaged as error:
            damage, whole = str(error), False
        except RankRestarted:  # while the ranks compared names, so this one has changed nothing
            first = entry = _settled(agreement, None, "")
            continue
        except BaseException as error:
            if entry == first or not isinstance(error, Incomplete):
                agreement.give_up(str(error) or repr(error))
                raise
            damage = str(error)
        with span("restore.agree"):
            answer = _settled(agreement, entry, damage, whole=whole)
        if answer == entry:
            return repository.at(entry)
        entry = answer
    return None


def _settled(agreement: Agreement, tried: Entry | None, damage: str, *, whole: bool = False) -> Entry | None:
    """The answer of the other ranks, which are notified if this rank is interrupted while it waits."""
    try:
        return agreement.settle(tried, damage, whole=whole)
    except RaystowError:
        raise  # they have it too, or cannot be reached
    except BaseException as error:
        agreement.give_up(str(error) or repr(error))
        raise


def _shared_progress(agreement: Agreement, show: Progress) -> Progress:
    """``show``, and a report to the other ranks."""

    def tell(nbytes: int) -> None:
        show(nbytes)
        agreement.reading()

    return tell
