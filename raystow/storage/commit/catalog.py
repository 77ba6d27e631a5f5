"""A repository's catalog: store, id, root and leases. Retention and commits depend on it; ``Repository`` is on top of them."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Sequence
from typing import TypeVar

from ..errors import NotFound
from ..format.root import Entry, Root
from ..format.signature import PublicKey, Signer, Trust
from ..object_store import ObjectStore
from ..root.delta_chain import needed
from ..root.root_register import RootRegister
from ..runtime.clock import SYSTEM, Clock
from ..versions.version import Version
from ..versions.version_selector import check_version
from . import leases, store_clock
from .leases import Lease

_Catalog = TypeVar("_Catalog", bound="Catalog")


class Catalog:
    """Finds the versions of one repository. ``trust``: whose signatures the versions must have; by default those of the keys
    ``signed_by``, which the marker names."""

    def __init__(
        self,
        store: ObjectStore,
        id: str,
        *,
        clock: Clock = SYSTEM,
        trust: Trust | None = None,
        signed_by: tuple[PublicKey, ...] = (),
    ) -> None:
        self.store, self.id, self.clock = store, id, clock
        self.trust, self.signed_by = trust or Trust(signed_by), signed_by
        self._own_keys = trust is not None
        self.register = RootRegister(store, clock, repository=id)

    @property
    def uri(self) -> str:
        """The address of the store."""
        return self.store.uri

    def root(self) -> Root:
        """Read the root; an empty one if the creation of the repository has not ended. Raises ``Damaged`` if the root was lost,
        cannot be read, or is of another repository."""
        return self.register.read_or_empty()

    def at(self, entry: Entry, *, store: ObjectStore | None = None, siblings: Sequence[Entry] = ()) -> Version:
        """Open the version of an entry of the root, or read it through another store. ``siblings``: see ``Version``."""
        return Version(store or self.store, entry, self.id, self.trust, siblings)

    def admit(self, signer: Signer | None) -> None:
        """Raise ``Untrusted`` unless its readers and this process take what ``signer`` signs; None: it is unsigned."""
        for trust in (Trust(self.signed_by), self.trust):
            trust.admit(signer)

    def trusting(self: _Catalog, signer: Signer | None) -> _Catalog:
        """Return the repository for a process that rewrites or copies versions and signs the result with ``signer``.

        Versions must be signed with one of its own trusted keys, or without these with its signing key. The marker's keys do not
        suffice: each writer of the store can add one.
        """
        if signer is None or self._own_keys:
            return self
        catalog = copy.copy(self)
        catalog.trust, catalog._own_keys = Trust((signer.public,)), True
        return catalog

    def now(self) -> float:
        """Seconds since 1970 by the store's clock."""
        return store_clock.now(self.store, self.clock)

    def leased(self) -> set[tuple[int, str]]:
        """The versions (id, attempt) under a lease now."""
        return leases.held(self.store, self.now())

    @contextlib.contextmanager
    def lease(self, version: Version) -> Iterator[None]:
        """Keep the objects of a version and of its bases in the store while it is read, even if it is dropped meanwhile.

        Args:
            version: The version.

        Returns:
            A context manager that holds the lease.

        Raises:
            NotFound: The version was dropped before.
            StateError: It is of another repository.
        """
        check_version(version, self.id)
        required, leased = {version.entry}, set[Entry]()
        with contextlib.ExitStack() as held:
            while fresh := required - leased:  # the root is read after a lease is written: what is live then stays readable
                for entry in fresh:
                    held.enter_context(Lease(self.store, entry.id, entry.attempt, self.clock))
                leased |= fresh
                versions = self.root().listed
                if version.entry not in versions:
                    raise NotFound(f"version {version.id} was dropped meanwhile", subject=self.uri, remedy="take a newer one")
                users = needed(versions, [version.id])
                required = {entry for entry in versions if entry.id in users}
            yield
