"""The root: one small object whose compare-and-swap is the commit, the fence, and the pin.

``Register`` makes an update linearizable on a store that may lose answers: each write carries a fresh write id, and whoever is
told nothing, or told that it lost, reads back and looks for its own id. So an update is applied once, or its caller knows that
it was not.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from ..clock import Clock
from ..errors import Damaged, NotFound, PreconditionFailed, StoreUnavailable
from ..limits import MAX_ROOT
from ..object_store import ObjectStore
from . import keys, records

REPAIR = "`raystow repair URI` makes it anew from the version records"
"""What to do about a root or marker that is lost."""


@dataclass(frozen=True)
class Entry:
    """One live version as the root knows it: where its record lies, and the record's BLAKE3 (hexadecimal) and size in bytes.

    ``step``, ``created`` (seconds since 1970), ``raw`` and ``stored`` (bytes) are repeated here so that a listing needs one read;
    ``bases``, the ids of the versions that it cannot be read without, so that none of them is dropped before it; and the
    ``groups`` that a thinned version still holds, none of one that holds all that was saved. ``saved``: the attempt that it was
    when it was saved, if it was written anew since.
    """

    id: int
    attempt: str
    digest: str
    size: int
    step: int
    created: float
    raw: int
    stored: int
    bases: tuple[int, ...] = ()
    groups: tuple[str, ...] = ()
    saved: str = ""

    @property
    def origin(self) -> str:
        """The attempt that it was when it was saved: with the id, a name that stays, and that no other version has."""
        return self.saved or self.attempt

    @property
    def resumable(self) -> bool:
        """Whether it holds all that was saved."""
        return not self.groups


@dataclass(frozen=True)
class Dropped:
    """A version that retention has dropped, or an attempt that another has taken the place of, and whose objects are not deleted
    yet. ``at``: when, in seconds since 1970 by the store's clock."""

    id: int
    attempt: str
    at: float


@dataclass(frozen=True)
class Rewrite:
    """An attempt that is being written to take the place of a live version's. ``at``: since when, as of ``Dropped``."""

    id: int
    attempt: str
    at: float


@dataclass(frozen=True)
class Root:
    """``epoch``: the fencing token of the coordinator in charge, ``owner`` its name. ``next_id``: no id below is free.
    ``verified``: the newest version that was read whole and found to be as written, 0 if none was. ``rewrites``: attempts at ids
    that are passed, and that may become versions all the same."""

    repository: str
    epoch: int = 0
    owner: str = ""
    next_id: int = 1
    write_id: str = ""
    pins: dict[str, int] = field(default_factory=dict)
    versions: tuple[Entry, ...] = ()
    dropped: tuple[Dropped, ...] = ()
    verified: int = 0
    rewrites: tuple[Rewrite, ...] = ()

    def dump(self) -> bytes:
        """The bytes of ``root.json``."""
        versions = [{name: value for name, value in vars(entry).items() if value not in ((), "")} for entry in self.versions]
        parts = {
            "versions": versions,
            "dropped": [vars(d) for d in self.dropped],
            "rewrites": [vars(r) for r in self.rewrites],
        }
        return records.dump({**vars(self), **parts}, keys.ROOT)

    @staticmethod
    def load(data: bytes) -> Root:
        """Parse and check ``root.json``."""
        fields = records.load(data, keys.ROOT)

        def get(name: str, kind: type, of: dict[str, Any] = fields) -> Any:
            return records.field(of, name, kind, keys.ROOT)

        versions = tuple(
            Entry(
                id=get("id", int, entry),
                attempt=get("attempt", str, entry),
                digest=get("digest", str, entry),
                size=get("size", int, entry),
                step=get("step", int, entry),
                created=records.time(entry, "created", keys.ROOT),
                raw=get("raw", int, entry),
                stored=get("stored", int, entry),
                bases=records.ids(entry, "bases", keys.ROOT) if "bases" in entry else (),
                groups=records.texts(entry, "groups", keys.ROOT) if "groups" in entry else (),
                saved=get("saved", str, entry) if "saved" in entry else "",
            )
            for entry in _objects(fields, "versions")
        )
        attempts = {
            name: [
                (get("id", int, entry), get("attempt", str, entry), records.time(entry, "at", keys.ROOT))
                for entry in (_objects(fields, name) if name in fields else ())
            ]
            for name in ("dropped", "rewrites")
        }
        if any(a.id >= b.id for a, b in itertools.pairwise(versions)):
            raise Damaged("version ids are not ascending", subject=keys.ROOT)
        pins = {str(name): get(name, int, fields["pins"]) for name in get("pins", dict)}
        return Root(
            repository=get("repository", str),
            epoch=get("epoch", int),
            owner=get("owner", str),
            next_id=get("next_id", int),
            write_id=get("write_id", str),
            pins=pins,
            versions=versions,
            dropped=tuple(Dropped(*attempt) for attempt in attempts["dropped"]),
            verified=get("verified", int) if "verified" in fields else 0,
            rewrites=tuple(Rewrite(*attempt) for attempt in attempts["rewrites"]),
        )


def _objects(fields: dict[str, Any], name: str) -> list[dict[str, Any]]:
    found: list[Any] = records.field(fields, name, list, keys.ROOT)
    if not all(isinstance(entry, dict) for entry in found):
        raise Damaged(f"an entry of {name!r} is not an object", subject=keys.ROOT)
    return found


class Register:
    """Reads and swaps the root of one repository."""

    def __init__(self, store: ObjectStore, clock: Clock, *, repository: str, deadline: float = 60.0) -> None:
        self._store, self._clock, self._repository, self._deadline = store, clock, repository, deadline

    def read(self) -> Root:
        """The root as it is now; ``NotFound`` if there is none, ``Damaged`` if it is not this repository's."""
        return self._read()[0]

    def _read(self) -> tuple[Root, str]:
        try:
            tagged = self._store.get_tagged(keys.ROOT, max_bytes=MAX_ROOT)
            root = Root.load(tagged.data)
        except Damaged as error:
            raise Damaged(error.what, subject=error.subject, remedy=REPAIR) from error
        if root.repository != self._repository:
            what = f"is of repository {root.repository}, but {keys.MARKER} says {self._repository}: one of them is another's"
            raise Damaged(what, subject=keys.ROOT, remedy="move away the wrong one, then run `raystow repair URI`")
        return root, tagged.tag

    def create(self, root: Root) -> Root:
        """Write the first root, or return the one that another creator wrote first."""
        root = replace(root, write_id=self._clock.token())
        try:
            self._store.put_if(keys.ROOT, root.dump(), None)
        except PreconditionFailed:
            return self.read()
        except StoreUnavailable:
            try:
                return self.read()  # ours, if the answer was lost, or another's: either serves
            except NotFound:
                raise StoreUnavailable("the repository's root could not be written", subject=keys.ROOT) from None
        return root

    def update(self, change: Callable[[Root], Root]) -> Root:
        """Replace the root by ``change(root)``; the root that holds the change.

        ``change`` may be called several times, on newer roots each. It must return its argument itself when what it wants is
        already there (an own write whose answer was lost, and on which others have built since), and may raise to give up.
        Raises ``StoreUnavailable`` after the deadline; then the change may or may not have been made.
        """
        give_up = self._clock.monotonic() + self._deadline
        ours: set[str] = set()
        pause = 0.01
        while True:
            try:
                root, tag = self._read()
                if root.write_id in ours:
                    return root
                wanted = change(root)
                if wanted is root:
                    return root
                wanted = replace(wanted, write_id=self._clock.token())
                ours.add(wanted.write_id)
                self._store.put_if(keys.ROOT, wanted.dump(), tag)
                return wanted
            except (PreconditionFailed, StoreUnavailable) as error:
                # Lost, or won with a lost answer: reading again tells. A write that is still on its way carries the old tag: it
                # and a retry cannot both take effect, and either is ours.
                if self._clock.monotonic() + pause > give_up:
                    raise StoreUnavailable(
                        f"not swapped within {self._deadline:.0f} s: {error.what}", subject=keys.ROOT
                    ) from error
                self._clock.sleep(pause)
                pause = min(2 * pause, 5.0)
