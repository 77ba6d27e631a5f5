"""Compares the names in ``into`` with those that a version holds, together with the other ranks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone

from ...storage.errors import StateError
from ...storage.versions.tensor_index import Finder, FoundRows, Seeker
from ...storage.versions.version import Version
from .name_match import NameMatch, is_within
from .name_patterns import NameRules, proposal

logger = logging.getLogger(__name__)

_LISTED = 20  # names in an error or a warning; further ones are counted


class Incomplete(StateError):
    """The version is whole but lacks names that are asked for: it was thinned, or is of another state."""


@dataclass(frozen=True)
class Unused:
    """The names that a rank leaves unused and may not: of ``tensors``, and of its own ``values``. ``listed``: all names of the
    version, the same and in the same order on all ranks, and those of them that this rank leaves unused and may not; may read the
    rest of the manifest."""

    tensors: Collection[str] = ()
    values: Collection[str] = ()
    listed: Callable[[], tuple[Sequence[str], Collection[str]]] = lambda: ((), ())

    @property
    def names(self) -> set[str]:
        return {*self.tensors, *self.values}


class OtherRanks:
    """The ranks that restore together: here of a rank that restores alone.

    Attributes:
        advice: What to do if other ranks use the names, and cannot be asked.
    """

    advice = ""

    @property
    def alike(self) -> bool:
        """Whether it is known that all ranks ask for tensors of the same names."""
        return True

    def unused(self, unused: Unused) -> Collection[str]:
        """Tell what this rank leaves unused, and return the names that no rank uses. Waits for the other ranks if there are
        any."""
        return unused.names


ALONE = OtherRanks()


def check_filled(version: Version, found: FoundRows, filled: Collection[str]) -> None:
    """``Incomplete`` if the version lacks a tensor that a damaged version may have filled."""
    if missing := sorted(set(filled) - found.chunks.keys()):
        why = f"{_thinned(version)}, and not" if version.record.thinned is not None else "does not hold"
        raise Incomplete(f"{why} {missing[0]!r}, which a damaged newer version holds", subject=f"version {version.id}")


def wants_all_names(finder: Finder, seeker: Seeker, rules: NameRules, *, divided: bool) -> bool:
    """Whether all names are needed to report or refuse those that are left out, though the rank's own rows are found.

    ``divided``: all ranks ask for the same names, of which each has tensors for itself. Then it is enough that each rank knows
    the names in the fragment of its node: these are all, and one that finds a name that is not asked for ends the restore of all.
    """
    if seeker.world_size != seeker.saved:
        divided = False
        if seeker.rank == 0:
            return True
    return not finder.complete and (seeker.rank == 0 if rules.unused.everything else not divided)


def unused_names(match: NameMatch, finder: Finder, rules: NameRules) -> Unused:
    """The names that this rank leaves unused and may not."""

    def listed() -> tuple[Sequence[str], Collection[str]]:
        found = finder.read_all()
        every = sorted(found.names | found.ranks.names)
        return every, [name for name in every if match.leaves(name) and name not in rules.unused]

    tensors, values = ([name for name in names if name not in rules.unused] for names in (match.tensors, match.values))
    return Unused(tensors, values, listed)


def check_names(version: Version, match: NameMatch, rules: NameRules, unused: Collection[str], advice: str) -> None:
    """``StateError`` for names that only one side has and may not. ``unused``: those of the version. ``advice``: see
    ``OtherRanks``."""
    missing, unused = sorted(leaf.name for leaf in match.missing if leaf.name not in rules.missing), sorted(unused)
    if not (missing or unused):
        return
    parts, arguments = differences(missing, unused), []
    if missing:
        arguments.append(proposal("allow_missing", missing, match.used, given=rules.missing.texts))
    if unused:
        arguments.append(proposal("allow_unused", unused, match.used, given=rules.unused.texts))
    subject, remedy = f"version {version.id}", f"pass {' and '.join(arguments)}"
    if missing and version.record.thinned is not None:
        parts.append(f"it {_thinned(version)}")
        remedy = f"restore a newer version to resume, or {remedy} for what this version holds"
        raise Incomplete("; ".join(parts), subject=subject, remedy=remedy)
    more = [match.advice((*missing, *unused)), advice if unused else ""]
    raise StateError("; ".join(parts), subject=subject, remedy=", or ".join(filter(None, ["make them match", remedy, *more])))


def report_left_out(version: Version, match: NameMatch, seeker: Seeker, peers: OtherRanks) -> None:
    """Log the names that the caller allows to be left out: rank 0 for all ranks, unless they lack different names."""
    missing = sorted(leaf.name for leaf in match.missing) if seeker.rank == 0 or not peers.alike else []
    left = sorted({*match.tensors, *match.values}) if seeker.rank == 0 else []
    if missing or left:
        why = f", which {_thinned(version)}," if version.record.thinned is not None else ""
        logger.warning("version %d%s is restored in part: %s", version.id, why, "; ".join(differences(missing, left)))


def report_ranks(version: Version, match: NameMatch, found: FoundRows, seeker: Seeker, rules: NameRules) -> None:
    """Log which values of other ranks are restored, and which are not restored because their ranks are gone."""
    lent = {row.name: [min(row.ranks)] for row in match.rows if seeker.rank not in row.ranks}
    if lent and seeker.rank < seeker.saved:
        what = "version %d has no value of rank %d under these names, which are restored from the lowest rank that has one: %s"
        logger.warning(what, version.id, seeker.rank, _with_ranks(lent))
    if seeker.rank != 0:
        return
    if seeker.world_size < seeker.saved:
        gone = {name: ranks for name, ranks in found.ranks.lost().items() if not is_within(name, match.elsewhere)}
        lost = {name: ranks for name, ranks in gone.items() if name in match.used or name not in rules.unused}
        if lost := {**lost, **match.lost}:
            what = "%d ranks restore version %d of %d ranks, and not these values; version.per_rank(name) returns them: %s"
            logger.warning(what, seeker.world_size, version.id, seeker.saved, _with_ranks(lost))
    elif seeker.world_size > seeker.saved:
        alone = {name: [0] for name in found.values if not is_within(name, match.objects)}
        differing = found.ranks.differing(seeker.saved) if seeker.saved > 1 else alone
        given = {name: ranks for name, ranks in differing.items() if name in match.used and not is_within(name, match.elsewhere)}
        if given := {**given, **match.lent}:
            what = "%s: these values, which may differ between ranks, are those of the lowest rank: %s"
            logger.warning(what, _new(seeker), _with_ranks(given))
        if match.lost:
            what = "%s: these values of other ranks are not restored there; version.per_rank(name) returns them: %s"
            logger.warning(what, _new(seeker), _with_ranks(match.lost))


def _new(seeker: Seeker) -> str:
    first, last = seeker.saved, seeker.world_size - 1
    return f"rank {first} is new" if first == last else f"ranks {first} to {last} are new"


def differences(missing: Sequence[str], unused: Sequence[str]) -> list[str]:
    """The names that only one side has, as texts."""
    both = (("in `into` but not saved", missing), ("saved but not in `into`", unused))
    return [f"{title}: {_listed(names)}" for title, names in both if names]


def _with_ranks(names: Mapping[str, Sequence[int]]) -> str:
    def ranks(of: Sequence[int]) -> str:
        return f"rank{'s' * (len(of) > 1)} {_listed([str(rank) for rank in of])}"

    return _listed([f"{name} ({ranks(of)})" for name, of in sorted(names.items())])


def _listed(texts: Sequence[str]) -> str:
    return ", ".join(texts[:_LISTED]) + (f" and {len(texts) - _LISTED} more" if len(texts) > _LISTED else "")


def _thinned(version: Version) -> str:
    thinned = version.record.thinned
    assert thinned is not None
    when = datetime.fromtimestamp(thinned.at, timezone.utc)
    return f"was thinned at {when:%Y-%m-%d %H:%M} UTC and holds its {' and '.join(thinned.groups)} only"
