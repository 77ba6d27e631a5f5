"""What the root says to keep besides the newest version: pins, and the version that was verified last."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from .arguments import refused
from .catalog import Catalog
from .delta_chain import dependents
from .errors import StateError
from .format.root import Root
from .version import Version
from .version_selector import is_reserved


def pin(catalog: Catalog, version: Version, name: str, *, move: bool) -> None:
    """See ``Repository.pin``."""
    if not isinstance(name, str) or not name or is_reserved(name):
        raise refused("name", name, "a name that is no number, not 'latest', and does not begin with 'step:'")

    def change(root: Root) -> Root:
        if all(entry.id != version.id for entry in root.listed):
            remedy = "`raystow ls` lists the versions"
            raise StateError(f"there is no version {version.id} to pin", subject=catalog.uri, remedy=remedy)
        if not move and (held := root.pins.get(name, version.id)) != version.id:
            raise StateError(f"{name!r} is version {held}", subject=catalog.uri, remedy="--move moves the name")
        return root if root.pins.get(name) == version.id else replace(root, pins={**root.pins, name: version.id})

    catalog.register.update(change)


def unpin(catalog: Catalog, name: str) -> None:
    """See ``Repository.unpin``."""
    if not isinstance(name, str):
        raise refused("name", name, "the name of a pin")

    def change(root: Root) -> Root:
        return replace(root, pins={k: v for k, v in root.pins.items() if k != name}) if name in root.pins else root

    catalog.register.update(change)


def record_verified(catalog: Catalog, whole: Collection[Version], damaged: Collection[Version]) -> int:
    """See ``Repository.record_verified``."""

    def change(root: Root) -> Root:
        found = {version.entry for version in whole}
        newest = max((entry.id for entry in root.versions if entry in found), default=0)
        broken = [version.id for version in damaged if version.entry in root.versions]
        lost = {id for one in broken for id in (one, *dependents(root.versions, one))}
        verified = newest if root.verified in lost else max(newest, root.verified)
        return root if verified == root.verified else replace(root, verified=verified)

    return catalog.register.update(change).verified
