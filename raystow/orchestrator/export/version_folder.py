"""Writes all tensors and plain values of a version as files: what ``raystow restore`` does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby

from ...storage.versions.version import Version
from . import version_files
from .output_folder import FilePlan, WriteFile
from .safetensors_file import SafetensorsFile, files

_VALUES = "values.json"


@dataclass(frozen=True)
class VersionFolder:
    """The content of a folder: ``files`` of tensors, an index for each group in several of them, and plain values."""

    version: Version
    files: list[SafetensorsFile]

    @property
    def raw(self) -> int:
        """The bytes of the tensors."""
        return sum(file.nbytes for file in self.files)

    @property
    def plan(self) -> FilePlan:
        """The files, before they are written."""
        indices = [version_files.index_name(parts) for parts in self._split()]
        return version_files.file_plan(self.version, self.files, [_VALUES, *indices])

    def write(self, write: WriteFile, progress: Callable[[int], None]) -> None:
        """Fill an empty folder. Memory is bounded by the slab of ``version_files``. Indices are the last files."""
        for file in self.files:
            version_files.write_file(write, file, self.version, progress)
        version_files.write_json(write, _VALUES, version_files.plain_values(self.version))
        for parts in self._split():
            version_files.write_index(write, parts)

    def _split(self) -> list[list[SafetensorsFile]]:
        groups = [[*parts] for _, parts in groupby(self.files, key=lambda file: file.group)]
        return [parts for parts in groups if len(parts) > 1]


def plan_version_folder(version: Version, *, limit: int) -> VersionFolder:
    """Decide which files a folder contains.

    Args:
        version: The version to write.
        limit: The bytes of a file; a larger tensor has a file of its own.

    Raises:
        StateError: A name is reserved in safetensors files.
    """
    return VersionFolder(version, files(version.tensors(), limit=limit))
