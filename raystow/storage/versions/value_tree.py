"""Plain values of a version as the containers that they were saved in, and whose values they are."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate

from ..coding.digest import stored_digest
from ..errors import Damaged
from ..format.manifest import Value, parse_path
from ..format.values import loads

Path = tuple[str | int | tuple[str, int], ...]


def part_text(part: str | int | tuple[str, int]) -> str:
    """A part of a path as it is written in a name."""
    return str(part[1]) if isinstance(part, tuple) else str(part)


def containers(path: Path) -> Iterator[str]:
    """The names of the containers around what has this path, from the outermost on, and its own name."""
    return accumulate(map(part_text, path), lambda around, own: f"{around}.{own}")


def beneath(name: str, path: Path) -> Path | None:
    """The rest of a path beneath the container with a name (empty for the container itself); None if it is not there."""
    return next((path[depth:] for depth, around in enumerate(containers(path), 1) if around == name), None)


def nested(parts: Mapping[Path, object]) -> object:
    """The container that has these leaves, by path in it; the leaf itself if its path is empty.

    Raises ``Damaged`` for paths that are not those of one container, or of a list without some of its elements.
    """
    if () in parts:
        if len(parts) > 1:
            raise Damaged("a value is a container, too")
        return parts[()]
    inner: dict[str | int | tuple[str, int], dict[Path, object]] = {}
    for path, leaf in parts.items():
        inner.setdefault(path[0], {})[path[1:]] = leaf
    kinds = {part[0] if isinstance(part, tuple) else "dict" for part in inner}
    if len(kinds) != 1:
        raise Damaged(f"a container is both {' and '.join(sorted(kinds))}")
    if kinds == {"dict"}:
        return {key: nested(leaves) for key, leaves in inner.items()}
    places = sorted(part[1] for part in inner if isinstance(part, tuple))
    if places != list(range(len(places))):
        raise Damaged(f"a list or tuple lacks elements: it has {places!s:.80}")
    (kind,) = kinds
    made = [nested(inner[kind, place]) for place in places]
    return made if kind == "list" else tuple(made)


def rows_of_one_rank(rows: Iterable[Value], rank: int) -> list[Value]:
    """Those of ``rank``, or of the lowest rank that has any, so that a container is never made of the values of two ranks."""
    found = list(rows)
    if not any(rank in row.ranks for row in found):
        rank = min((min(row.ranks) for row in found), default=rank)
    return [row for row in found if rank in row.ranks]


def container(name: str, rows: Iterable[Value]) -> object:
    """The container with a name, or the value, from rows of one rank."""
    try:
        found = ((beneath(name, parse_path(row.path)), row) for row in rows)
        return nested({path: loads(row.text) for path, row in found if path is not None})
    except (Damaged, RecursionError) as error:
        raise Damaged(str(error) or "nested too deeply", subject=name) from error


class RankValues:
    """What ranks have saved under each name, to tell which values are lost or shared when ``world_size`` ranks restore.

    Keeps digests, not values: a version of thousands of ranks has millions of rows.
    """

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._kept: dict[str, dict[bytes, int]] = {}  # name -> digest of a value -> the lowest rank that has it
        self._gone: dict[tuple[str, bytes], list[int]] = {}
        self._counts: dict[str, int] = {}  # name -> number of ranks that have it

    def take(self, row: Value) -> None:
        """Note a row of the manifest."""
        digest = stored_digest(row.text.encode("utf-8", "surrogatepass"))[:16]
        kept = [rank for rank in row.ranks if rank < self._world_size]
        self._counts[row.name] = self._counts.get(row.name, 0) + len(row.ranks)
        if kept:
            digests = self._kept.setdefault(row.name, {})
            digests[digest] = min(*kept, digests.get(digest, kept[0]))
        else:
            self._gone.setdefault((row.name, digest), []).extend(row.ranks)

    @property
    def names(self) -> set[str]:
        """The names of values that ranks below ``world_size`` have saved."""
        return {*self._kept}

    def lost(self) -> dict[str, list[int]]:
        """The names of values that only ranks have that are gone, with these ranks."""
        found: dict[str, list[int]] = {}
        for (name, digest), ranks in self._gone.items():
            if digest not in self._kept.get(name, {}):
                found[name] = sorted({*found.get(name, []), *ranks})
        return dict(sorted(found.items()))

    def differing(self, saved: int) -> dict[str, list[int]]:
        """The names under which not all of the ``saved`` ranks have saved the same value, with the lowest rank that has one."""
        names = (name for name, found in sorted(self._kept.items()) if len(found) > 1 or self._counts[name] < saved)
        return {name: [min(self._kept[name].values())] for name in names}
