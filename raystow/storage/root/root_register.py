"""The register of the root. Every swap of the root is made here, after ``invariants.check``."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection, Iterator

from ..errors import Damaged, NotARepository, NotFound, RaystowError, StateError, StoreError, StoreFull
from ..format import keys
from ..format.marker import Marker
from ..format.root import REPAIR, Root
from ..limits import MAX_MARKER, MAX_ROOT
from ..object_store import ObjectStore
from ..runtime.clock import Clock
from . import invariants
from .invariants import Claims
from .register import Register
from .seen_roots import SeenRoot

logger = logging.getLogger(__name__)

BEGIN_ANEW = "put it back, or begin anew there with a new Checkpointer"
"""The remedy if a repository was deleted or replaced while it was in use."""


class RootRegister:
    """Reads and swaps the root of one repository."""

    def __init__(self, store: ObjectStore, clock: Clock, *, repository: str) -> None:
        self._store, self._repository = store, repository
        self._register = Register(store, keys.ROOT, self._load, clock, max_bytes=MAX_ROOT)

    def read(self) -> Root:
        """The root now. Raises ``NotFound``, ``NotARepository`` if another repository has taken the place of this one, or
        ``Damaged`` if it cannot be read, is not of the marker's repository, or older than one that this machine remembers
        (``seen_roots``)."""
        with _remedy():
            seen = SeenRoot(self._store.uri, self._repository)
            root = self._register.read()
            seen.check(root)
            seen.note(root)
            return root

    def read_or_empty(self, abandoned: Collection[tuple[int, str]] = ()) -> Root:
        """As ``read``, but an empty root if none was created yet: a creator has written the marker, and maybe died. Raises
        ``Damaged`` if a root was lost, which is so if objects of versions exist, and ``NotARepository`` if the marker, too.
        ``abandoned``: attempts, by id and name, that never were versions: their objects do not count."""
        seen, empty = SeenRoot(self._store.uri, self._repository), Root(repository=self._repository)
        for _ in range(2):  # a root that is created meanwhile is written before the first of these objects
            with contextlib.suppress(NotFound):
                return self.read()
            self._check_marker()
            if all(keys.attempt_of(info.key) in (None, *abandoned) for info in self._store.list(keys.VERSIONS)):
                seen.check(empty)
                return empty
        raise self._lost()

    def create(self, root: Root) -> Root:
        """Write the first root, or return the one that another writer created first."""
        invariants.check(None, root)
        with _remedy():
            return self._register.create(root)

    def update(
        self,
        change: Callable[[Root], Root],
        claims: Claims = Claims(),  # noqa: B008  # immutable
        *,
        final: tuple[type[StoreError], ...] = (StoreFull,),
    ) -> Root:
        """Replace the root by ``change(root)``, as ``Register.update`` does. ``claims``: what else the change relies on.
        ``final``: errors after which it is not tried again.

        Raises ``Fenced`` if another epoch is in charge, ``InvariantError`` if the change would break an invariant, and
        ``NotARepository`` or ``Damaged`` if there is no root any more: nothing was written.
        """

        seen = SeenRoot(self._store.uri, self._repository)

        def checked(old: Root) -> Root:
            seen.check(old)
            new = change(old)
            if new is not old:
                invariants.check(old, new, claims)
            return new

        with _remedy():
            try:
                root = self._register.update(checked, final=final)
            except NotFound:
                self._check_root()
                raise  # of the change
        try:
            seen.note(root)
        except (NotFound, StateError, StoreError) as error:  # the swap was made all the same
            logger.warning("this machine cannot remember the root that it has written: %s", error)
        return root

    def _load(self, data: bytes) -> Root:
        root = Root.load(data)
        if root.repository != self._repository:
            self._check_marker()
            what = f"belongs to repository {root.repository}, but {keys.MARKER} names {self._repository}"
            raise Damaged(what, subject=keys.ROOT, remedy="move away the wrong one, then run `raystow repair URI`")
        return root

    def _check_root(self) -> None:
        """Raise if there is no root."""
        try:
            self._register.read()
        except NotFound:
            self._check_marker()
            raise self._lost() from None

    def _check_marker(self) -> None:
        """Raise ``NotARepository`` unless the marker is that of this repository."""
        try:
            marker = Marker.load(self._store.get(keys.MARKER, max_bytes=MAX_MARKER))
        except NotFound:
            what = f"{keys.MARKER} and {keys.ROOT} of repository {self._repository} do not exist any more: it was deleted"
        else:
            if marker.repository == self._repository:
                return
            what = f"repository {marker.repository} has taken the place of repository {self._repository}"
        raise NotARepository(what, subject=self._store.uri, remedy=BEGIN_ANEW)

    def _lost(self) -> RaystowError:
        return Damaged("the repository's root is missing", subject=keys.ROOT, remedy=REPAIR)


@contextlib.contextmanager
def _remedy() -> Iterator[None]:
    """Add the remedy to the error of a damaged root."""
    try:
        yield
    except Damaged as error:
        raise Damaged(error.what, subject=error.subject, remedy=error.remedy or REPAIR) from error
