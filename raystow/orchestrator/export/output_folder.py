"""What an export writes its files into."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from ...storage.object_store import Buffer

Content: TypeAlias = Callable[[], Iterable[Buffer]]
"""Returns the parts of a file. A part is valid until the next one is requested."""


class OutputFolder(Protocol):
    """A new folder of this machine, or the objects below an address of a store."""

    def write(self, name: str, nbytes: int, content: Content) -> None:
        """Create a file of ``nbytes``."""


@dataclass(frozen=True)
class FilePlan:
    """The files of an export, before they are written.

    Attributes:
        digest: Identifies the content of all of them (hexadecimal).
        weights: The bytes of each file of tensors.
        others: The names of the other files.
    """

    digest: str
    weights: Mapping[str, int]
    others: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        """The bytes of all files of tensors."""
        return sum(self.weights.values())
