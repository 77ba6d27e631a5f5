"""The address that an export is written to."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from ...storage.addresses import local_path, parse
from ...storage.object_store import StreamedStore
from ...storage.real_paths import output_path, real_path
from ...storage.stores import open_store
from ...storage.stores.settings import JobSettings
from .output_dir import discard_abandoned, new_folder
from .output_folder import FilePlan, WriteFile
from .store_folder import discard_part, new_store_folder

_BUCKETS = ("s3", "gs", "az")


@dataclass(frozen=True)
class Destination:
    """A folder of this machine, or an address in an object store; one of the attributes is None."""

    folder: Path | None
    store: StreamedStore | None

    @classmethod
    def parse(cls, name: str, text: object, *, settings: JobSettings | None = None) -> Destination:
        """Return the destination that the argument ``name`` says. ``settings``: of a job, for stores of the same kind.

        Raises:
            StateError: It is neither a path nor an address of S3, Google Cloud Storage or Azure.
        """
        if isinstance(text, str) and parse(text)[0] in _BUCKETS:
            same = settings is not None and parse(settings.address.uri)[0] == parse(text)[0]
            store = open_store(text, settings=settings.given if settings is not None and same else None)
            assert isinstance(store, StreamedStore)
            return cls(None, store)
        return cls(local_path(name, text), None)

    @property
    def shown(self) -> str:
        """The absolute path without links, or the address."""
        return self.store.uri if self.store is not None else str(real_path(self.folder or Path()))

    def new(self, plan: FilePlan) -> AbstractContextManager[WriteFile]:
        """Return what yields the function that writes the files of ``plan``; see ``new_folder`` and ``new_store_folder``."""
        if self.store is not None:
            return new_store_folder(self.store, plan)
        return new_folder(self.folder or Path(), plan)

    def discard(self, source: str) -> None:
        """Delete the parts of an export of ``source`` (see ``FilePlan``) that was not completed."""
        if self.store is not None:
            discard_part(self.store, source)
        else:
            discard_abandoned(output_path(self.folder or Path()))
