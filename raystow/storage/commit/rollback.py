"""Rollback: one swap of the root makes a listed version the newest. Deletes nothing."""

from __future__ import annotations

from ..errors import NotFound
from ..format.root import Root
from ..root import history
from ..root.invariants import Claims
from ..versions.version import Version
from .catalog import Catalog


def rollback(catalog: Catalog, version: Version, claims: Claims = Claims()) -> list[Version]:  # noqa: B008  # immutable
    """See ``Repository.rollback``. ``claims``: see ``RootRegister.update``."""
    at, tried = catalog.clock.now(), list[Root]()

    def change(root: Root) -> Root:
        if all(entry.id != version.id for entry in root.listed):
            remedy = "`raystow ls` lists the versions"
            raise NotFound(f"version {version.id} was dropped meanwhile", subject=catalog.uri, remedy=remedy)
        if tried and root.rollbacks > tried[-1].rollbacks and _is_done(history.roll_back(tried[-1], version.id, at), root):
            return root  # the answer was lost, and others have written since
        tried.append(root)
        return history.roll_back(root, version.id, at)

    root = catalog.register.update(change, claims)
    gone = {one.entry.id for one in root.rolled_back}
    return [catalog.at(entry, siblings=root.listed) for entry in tried[-1].versions if entry.id in gone]


def _is_done(planned: Root, root: Root) -> bool:
    """Whether nothing is live that ``planned`` has rolled back, and its newest version is."""
    live = {entry.id for entry in root.versions}
    return planned.versions[-1].id in live and live.isdisjoint(one.entry.id for one in planned.rolled_back)
