"""Recognizes checkpoints of torch's ``FileSystemWriter``, which are not repositories."""

from __future__ import annotations

from ....storage.errors import NotARepository
from ....storage.stores import open_store


def refuse_torch_files(uri: str) -> None:
    """Raise ``NotARepository`` if torch's ``FileSystemWriter`` has saved to this address."""
    store = open_store(uri)
    if any(info.key.endswith(".distcp") for info in store.list("__")):
        remedy = "dcp.load it with FileSystemReader; save to another address with raystow.dcp.Writer"
        raise NotARepository("these are files of torch's FileSystemWriter, not a repository", subject=store.uri, remedy=remedy)
