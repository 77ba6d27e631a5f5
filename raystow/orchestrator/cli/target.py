"""What a command is pointed at: the arguments that commands share, and the repository and version behind them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...storage.errors import NotFound

if TYPE_CHECKING:
    from ...storage.format.root import Entry, Root
    from ...storage.repository import Repository
    from ...storage.version import Version

Uri = Annotated[
    str, typer.Argument(metavar="URI", help="The repository: s3://bucket/prefix, file:///path, or a path.", show_default=False)
]
Which = Annotated[str, typer.Argument(metavar="VERSION", help="A version's id, the name of a pin, or 'latest'.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object; docs/cli.md names its fields.")]

LATEST = "latest"


@dataclass(frozen=True)
class Target:
    """A repository, and its root as it was when the command began: every version and pin from a single read."""

    repository: Repository
    root: Root

    def versions(self) -> list[Version]:
        """Every version, oldest first."""
        return [self.repository.at(entry, beside=self.root.versions) for entry in self.root.versions]

    def version(self, which: str) -> Version:
        """The version with this id or pin; ``NotFound`` if there is none."""
        id = int(which) if which.isdecimal() else self.root.pins.get(which)
        found = [v for v in self.versions() if v.id == id or which == LATEST]
        if not found:
            what = "there is no version yet" if which == LATEST else f"there is no version or pin {which!r}"
            remedy = "the first save makes one" if which == LATEST else "`raystow ls` lists what there is"
            raise NotFound(what, subject=self.repository.uri, remedy=remedy)
        return found[-1]

    def pins(self, id: int) -> list[str]:
        """The names that a version is pinned under."""
        return sorted(name for name, pinned in self.root.pins.items() if pinned == id)

    def age(self, created: float) -> float:
        """Seconds since ``created``."""
        return self.repository.clock.now() - created

    def facts(self, entry: Entry) -> dict[str, Any]:
        """What every command prints of a version with ``--json``; ``age`` in seconds."""
        age = round(self.age(entry.created), 3)
        return {"id": entry.id, "step": entry.step, "created": entry.created, "age": age, "stored": entry.stored}


def open_target(uri: str) -> Target:
    """Open the repository at ``uri``; ``NotARepository`` if there is none."""
    from ...storage.repository import open_repository

    repository = open_repository(uri)
    return Target(repository, repository.root())
