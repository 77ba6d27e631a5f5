"""``raystow verify``: whether versions are still what was written."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ...storage.chains import dependents
from ...storage.errors import Damaged, StoreError, Unsupported, Untrusted
from ...storage.journal import Journal, journal
from .present import emit, out, printable
from .progress import versions_bar
from .reporting import described, exit_code
from .target import LATEST, Json, Uri, open_target
from .verdict import DAMAGED, DEEP, OUTCOMES, QUICK, REMOVED, UNCHECKED, UNTRUSTED, WHOLE, Verdict, summary, tell_summary

if TYPE_CHECKING:
    from ...storage.repository import Repository
    from ...storage.version import Version

BACK = 24
"""Versions that are looked at for one that is whole: more than the longest row of differences, which are lost together, has."""


def verify(
    uri: Uri,
    version: Annotated[
        str | None, typer.Argument(metavar="VERSION", help="A version's id, the name of a pin, or 'latest' (the default).")
    ] = None,
    deep: Annotated[bool, typer.Option("--deep", help="Read every byte and hold it against its digests.")] = False,
    all: Annotated[bool, typer.Option("--all", help="Every version, oldest first, also after one that is damaged.")] = False,
    resume: Annotated[
        Path | None,
        typer.Option(metavar="FILE", dir_okay=False, help="With --deep: note what is done in FILE; skip what it says is done."),
    ] = None,
    json: Json = False,
) -> None:
    """Tell whether a version is whole.

    Checks record and manifest by their digests, and that every pack is there in its size. With --deep it reads the packs as well,
    and if the latest version is damaged goes back to one that is whole. Names the damaged object and exits with 3 if anything is
    missing, cut or changed.

    Example:  raystow verify s3://bucket/runs/llama --deep --all
    """
    if all and version is not None:
        raise typer.BadParameter("give a version or --all, not both")
    if resume is not None and not deep:
        raise typer.BadParameter("--resume goes with --deep: without it no pack is read")
    target = open_target(uri)
    repository = target.repository
    start = repository.clock.monotonic()
    look = partial(_verdicts, repository, deep=deep, resume=resume, quiet=json)
    versions = target.versions() if all else [target.version(version or LATEST)]
    back = deep and not all and version in (None, LATEST)
    verdicts = _until_whole(target.versions(), look) if back else look(versions)
    recorded, refused = _record(repository, verdicts) if deep else (None, None)
    sums = summary(verdicts, repository.clock.monotonic() - start)
    worst = min((v for v in verdicts if v.error is not None), key=lambda v: OUTCOMES.index(v.outcome), default=None)
    if json:
        rows = [verdict.fields for verdict in verdicts]
        facts = {"uri": repository.uri, "versions": rows, "summary": sums, "recorded": recorded}
        facts |= {"warning": described(refused)} if refused is not None else {}
        emit(facts | ({"error": worst.fields["error"]} if worst is not None else {}))
    elif not verdicts:
        out.print(f"no version yet in {repository.uri}", soft_wrap=True)
    else:
        if len(verdicts) > 1 or all or resume is not None or not deep:
            tell_summary(sums, DEEP if deep else QUICK, str(resume or ""))
        if refused is not None:
            typer.echo(printable(f"note: what was found is not noted in the root: {refused}"), err=True)
    if worst is not None and worst.error is not None:
        raise typer.Exit(exit_code(worst.error))


def _until_whole(versions: Sequence[Version], look: Callable[[Sequence[Version]], list[Verdict]]) -> list[Verdict]:
    """The verdict on the newest version, and while one is damaged on that before it, on ``BACK`` at most: so that the root has
    one noted that is whole, whatever has become of the newest."""
    verdicts = list[Verdict]()
    for version in reversed(versions[-BACK:]):
        verdicts += look([version])
        if verdicts[-1].outcome not in (DAMAGED, REMOVED):
            break
    return verdicts


def _verdicts(
    repository: Repository, versions: Sequence[Version], *, deep: bool, resume: Path | None, quiet: bool
) -> list[Verdict]:
    """The verdict on each version, told at once unless ``quiet``; on none after one for which the store failed."""
    verdicts = list[Verdict]()
    with (
        journal(resume, repository.id) if resume is not None else contextlib.nullcontext() as notes,
        versions_bar([version.raw for version in versions], deep=deep, quiet=quiet) as bar,
    ):
        for version in versions:
            verdicts.append(verdict := _verdict(repository, version, bar.advance, notes, deep=deep))
            with bar.ending():
                if not quiet:
                    verdict.tell()
            if isinstance(verdict.error, StoreError):
                break
    return verdicts


def _verdict(
    repository: Repository, version: Version, progress: Callable[[int], None], notes: Journal | None, *, deep: bool
) -> Verdict:
    clock, mode = repository.clock, DEEP if deep else QUICK
    start = clock.monotonic()
    try:
        try:
            found = repository.verify(version, progress if deep else lambda nbytes: None, deep=deep, journal=notes)
            return Verdict(version, mode, WHOLE, clock.monotonic() - start, found=found)
        except (Damaged, Untrusted) as error:
            entries = repository.root().versions
            if all(entry.attempt != version.attempt for entry in entries):
                return Verdict(version, mode, REMOVED, clock.monotonic() - start)
            outcome, lost = DAMAGED if isinstance(error, Damaged) else UNTRUSTED, dependents(entries, version.id)
            return Verdict(version, mode, outcome, clock.monotonic() - start, error=error, dependents=tuple(lost))
    except (StoreError, Unsupported) as error:
        return Verdict(version, mode, UNCHECKED, clock.monotonic() - start, error=error)


def _record(repository: Repository, verdicts: Sequence[Verdict]) -> tuple[int | None, StoreError | None]:
    """Note in the root which is the newest whole version, by what was found: retention keeps it. The id that the root notes
    then, None for none; or why the store refused."""
    whole = [verdict.version for verdict in verdicts if verdict.outcome == WHOLE]
    damaged = [verdict.version for verdict in verdicts if verdict.outcome == DAMAGED]
    try:
        return repository.record_verified(*whole, damaged=damaged) or None, None
    except StoreError as error:
        return None, error
