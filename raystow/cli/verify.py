"""``raystow verify``."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from ..storage.checks.verify import Verified
from ..storage.checks.verify_progress import VerifyJournal, journal
from ..storage.commit.segments import read_record, verify_segment
from ..storage.errors import Damaged, NotFound, RaystowError, StoreError, Unsupported, Untrusted
from ..storage.format.root import Segment
from ..storage.repository import Repository
from ..storage.root.delta_chain import dependents
from ..storage.versions.version import Version
from ..storage.versions.version_selector import LATEST
from .exit_codes import conclude, error_fields, exit_code, print_error
from .options import Json, Uri
from .output import count, out, printable, say, size
from .progress import versions_bar
from .target import Target, open_target

OUTCOMES = WHOLE, REMOVED, DAMAGED, UNTRUSTED, UNCHECKED = "whole", "removed", "damaged", "untrusted", "unchecked"
"""Unchanged; dropped by retention during the check; changed; not signed by a trusted key; not checked to the end, since the store
failed or this machine cannot decode it. Of the last three, the worst comes first."""

BACK = 24
"""Versions to check for one that is whole: more than the longest chain of deltas, all of which are lost with their base."""


def verify(
    uri: Uri,
    version: Annotated[
        str | None, typer.Argument(metavar="VERSION", help="Version id, pin name, 'step:60', or 'latest' (the default).")
    ] = None,
    deep: Annotated[bool, typer.Option("--deep", help="Read every byte and check it against its digests.")] = False,
    all: Annotated[bool, typer.Option("--all", help="Check every version, oldest first, past damaged ones.")] = False,
    resume: Annotated[
        Path | None,
        typer.Option(metavar="FILE", dir_okay=False, help="With --deep: record checked packs in FILE, and skip those it lists."),
    ] = None,
    json: Json = False,
) -> None:
    """Check that a version is whole.

    The quick check compares record and manifest with their digests, and the size of each pack with a listing of the store. --deep
    also reads and decodes every pack, and records the newest whole version in the root, so that retention keeps it; if the latest
    version is damaged, it continues with earlier ones. The latest version includes segments of the step journal. Outcomes: whole;
    removed (dropped during the check); damaged (exit code 3); untrusted (6); unchecked (1: the store failed, or this machine
    cannot decode the version). The worst outcome determines the exit code.

    Example:  raystow verify s3://bucket/runs/llama --deep --all
    """
    if all and version is not None:
        raise typer.BadParameter("give a version or --all, not both")
    if resume is not None and not deep:
        raise typer.BadParameter("--resume requires --deep: the quick check reads no pack")
    target = open_target(uri)
    repository = target.repository
    start = repository.clock.monotonic()
    check = partial(_verdicts, repository, deep=deep, resume=resume, quiet=json)
    versions = target.listed() if all else [target.version(version or LATEST)]
    back = deep and not all and version in (None, LATEST)
    verdicts = _until_whole(target.versions(), check) if back else check(versions)
    recorded, refused = _record(repository, verdicts) if deep else (None, None)
    summary = _summary(verdicts, repository.clock.monotonic() - start)
    segments = _segment_verdicts(target, deep=deep) if all or version in (None, LATEST) else []
    outcomes: list[Verdict | SegmentVerdict] = [*verdicts, *segments]
    worst_first = sorted(outcomes, key=lambda one: OUTCOMES.index(one.outcome))
    errors = [one.error for one in worst_first if one.error is not None]
    if json:
        rows = [verdict.fields() for verdict in verdicts]
        facts: dict[str, object] = {"uri": repository.uri, "versions": rows, "summary": summary, "recorded": recorded}
        facts["segments"] = [one.fields() for one in segments]
        facts |= {"warning": error_fields(refused)} if refused is not None else {}
        conclude(errors, facts)
        return
    if not verdicts:
        out.print(f"no version yet in {repository.uri}")
    else:
        if len(verdicts) > 1 or all or resume is not None or not deep:
            say(_summary_text(summary, deep, resume), style="dim")
        if refused is not None:
            typer.echo(printable(f"note: the result is not recorded in the root: {refused}"), err=True)
    for one in segments:
        one.print()
    if errors:
        raise typer.Exit(exit_code(errors[0]))


@dataclass(frozen=True)
class Verdict:
    """The outcome for one version: ``found`` if it is whole, ``error`` if not; ``dependents``: ids of the versions lost with
    it."""

    version: Version
    deep: bool
    outcome: str
    seconds: float
    found: Verified | None = None
    error: RaystowError | None = None
    dependents: tuple[int, ...] = ()

    def fields(self) -> dict[str, object]:
        """Return the JSON form."""
        version, found = self.version, self.found
        row: dict[str, object] = {
            "id": version.id,
            "step": version.step,
            "outcome": self.outcome,
            "mode": "deep" if self.deep else "quick",
            "raw": version.raw,
            "stored": version.bytes,
            "seconds": round(self.seconds, 3),
        }
        if found is not None:
            row |= {name: getattr(found, name) for name in ("tensors", "chunks", "packs", "read", "resumed")}
        if self.dependents:
            row["dependents"] = self.dependents
        if self.error is not None:
            row["error"] = error_fields(self.error)
        return row

    def print(self) -> None:
        """Print it; errors go to stderr."""
        name = f"version {self.version.id} (step {self.version.step})"
        if self.found is not None:
            say(f"{name}: whole, {self._checked(self.found)} ({self.seconds:.1f} s)")
        elif self.error is not None:
            out.print(f"{name}: {self.outcome.upper()}", style="bold red")
            print_error(self.error)
            if self.dependents:
                say(f"deltas to it, which cannot be read without it: versions {', '.join(map(str, self.dependents))}")
        else:  # its objects were deleted with it, which is no damage
            out.print(f"{name}: removed from the repository during the check")

    def _checked(self, found: Verified) -> str:
        counts = f"{count(found.tensors, 'tensor')}, {count(found.chunks, 'chunk')}"
        if not self.deep:
            return f"{counts}, {size(found.stored)} in {count(found.packs, 'pack')}"
        return f"{counts}, {size(found.read)} read" + (f" and {size(found.resumed)} before" if found.resumed else "")


@dataclass(frozen=True)
class SegmentVerdict:
    """The outcome for a segment of the step journal."""

    segment: Segment
    outcome: str
    error: RaystowError | None = None

    def fields(self) -> dict[str, object]:
        """Return the JSON form."""
        error = {"error": error_fields(self.error)} if self.error is not None else {}
        return {"number": self.segment.number, "step": self.segment.step, "outcome": self.outcome, **error}

    def print(self) -> None:
        """Print it."""
        name = f"segment {self.segment.number} of the journal (to step {self.segment.step})"
        if self.error is None:
            say(f"{name}: {self.outcome}")
        else:
            out.print(f"{name}: {self.outcome.upper()}", style="bold red")
            print_error(self.error)


def _segment_verdicts(target: Target, *, deep: bool) -> list[SegmentVerdict]:
    return [SegmentVerdict(one, *_segment_outcome(target.repository, one, deep=deep)) for one in target.root.segments]


def _segment_outcome(repository: Repository, segment: Segment, *, deep: bool) -> tuple[str, RaystowError | None]:
    try:
        record = read_record(repository.store, repository.id, segment, repository.trust)
        verify_segment(repository.store, record, deep=deep)
    except (Damaged, NotFound, Untrusted, StoreError, Unsupported) as error:
        if segment not in repository.root().segments:
            return REMOVED, None
        kinds = {Damaged: DAMAGED, Untrusted: UNTRUSTED}
        return next((outcome for kind, outcome in kinds.items() if isinstance(error, kind)), UNCHECKED), error
    return WHOLE, None


def _summary(verdicts: Sequence[Verdict], seconds: float) -> dict[str, float]:
    """The number of versions with each outcome, their stored bytes, and the bytes read now and skipped."""
    outcomes = Counter(verdict.outcome for verdict in verdicts)
    found = [verdict.found for verdict in verdicts if verdict.found is not None]
    return {
        "versions": len(verdicts),
        **{outcome: outcomes[outcome] for outcome in OUTCOMES},
        "stored": sum(verdict.version.bytes for verdict in verdicts),
        "read": sum(one.read for one in found),
        "resumed": sum(one.resumed for one in found),
        "seconds": round(seconds, 3),
    }


def _summary_text(summary: Mapping[str, float], deep: bool, resume: Path | None) -> str:
    counts = ", ".join(f"{summary[outcome]} {outcome}" for outcome in OUTCOMES if summary[outcome])
    if not deep:
        return f"{counts}; no pack was read: --deep reads them"
    skipped = f", {size(summary['resumed'])} skipped as listed in {resume}" if resume is not None else ""
    return f"{counts}; {size(summary['read'])} read{skipped} in {summary['seconds']:.1f} s"


def _until_whole(versions: Sequence[Version], check: Callable[[Sequence[Version]], list[Verdict]]) -> list[Verdict]:
    """Check the newest version and, while one is damaged, the version before it, so that the root names one that is whole."""
    verdicts = list[Verdict]()
    for version in reversed(versions[-BACK:]):
        verdicts += check([version])
        if verdicts[-1].outcome not in (DAMAGED, REMOVED):
            break
    return verdicts


def _verdicts(
    repository: Repository, versions: Sequence[Version], *, deep: bool, resume: Path | None, quiet: bool
) -> list[Verdict]:
    """Check versions until the store fails; print each verdict at once unless ``quiet``."""
    verdicts = list[Verdict]()
    with (
        journal(resume, repository.id) if resume is not None else contextlib.nullcontext() as notes,
        versions_bar([version.raw for version in versions], deep=deep, quiet=quiet) as bar,
    ):
        for version in versions:
            verdicts.append(verdict := _verdict(repository, version, bar.advance, notes, deep=deep))
            with bar.ending():
                if not quiet:
                    verdict.print()
            if isinstance(verdict.error, StoreError):
                break
    return verdicts


def _verdict(
    repository: Repository, version: Version, progress: Callable[[int], None], notes: VerifyJournal | None, *, deep: bool
) -> Verdict:
    start = repository.clock.monotonic()

    def seconds() -> float:
        return repository.clock.monotonic() - start

    try:
        try:
            found = repository.verify(version, progress if deep else lambda done: None, deep=deep, journal=notes)
            return Verdict(version, deep, WHOLE, seconds(), found=found)
        except (Damaged, Untrusted) as error:
            entries = repository.root().listed
            if all(entry.attempt != version.attempt for entry in entries):
                return Verdict(version, deep, REMOVED, seconds())
            outcome, lost = DAMAGED if isinstance(error, Damaged) else UNTRUSTED, dependents(entries, version.id)
            return Verdict(version, deep, outcome, seconds(), error=error, dependents=tuple(lost))
    except (NotFound, StoreError, Unsupported) as error:
        return Verdict(version, deep, UNCHECKED, seconds(), error=error)


def _record(repository: Repository, verdicts: Sequence[Verdict]) -> tuple[int | None, StoreError | None]:
    """Record the newest whole version in the root, so that retention keeps it; its id, or why the store refused."""
    whole = [verdict.version for verdict in verdicts if verdict.outcome == WHOLE]
    damaged = [verdict.version for verdict in verdicts if verdict.outcome == DAMAGED]
    try:
        return repository.record_verified(*whole, damaged=damaged) or None, None
    except StoreError as error:
        return None, error
