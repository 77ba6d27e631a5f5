"""The files of an export, and what writes them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from ...storage.object_store import Buffer

Content: TypeAlias = Callable[[], Iterable[Buffer]]
"""Returns the parts of a file. A part is valid until the next one is requested."""


WriteFile: TypeAlias = Callable[[str, int, Content], None]
"""Creates a file, given its name, its bytes and its content: in a new folder of this machine, or below an address of a store. The
first part of a file of tensors is its header."""


@dataclass(frozen=True)
class FilePlan:
    """The files of an export, before they are written.

    Attributes:
        digest: Identifies the content of all of them (hexadecimal).
        weights: The bytes of each file of tensors.
        others: The names of the other files.
        source: The repository and the version that they are made of.
    """

    digest: str
    weights: Mapping[str, int]
    others: tuple[str, ...]
    source: str

    @property
    def nbytes(self) -> int:
        """The bytes of all files of tensors."""
        return sum(self.weights.values())
