"""Recognises an export that is complete already: a process may be killed after its last file, before anybody knows of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ...storage.errors import StateError
from ...storage.object_store import Buffer
from .output_folder import Content, FilePlan, WriteFile


def compare_files(
    plan: FilePlan, sizes: Mapping[str, int], read: Callable[[str, int, int], Buffer], *, subject: str
) -> WriteFile:
    """Return what writes no file, but compares each one with that of the same name.

    Of a file of tensors, the size and the header are compared, which names the attempt that was saved: such files appear when
    they are whole. Of the others all bytes are compared.

    Args:
        plan: The files of the export.
        sizes: Bytes of the files that there are, by name.
        read: Returns bytes of one of them, given its name, their start and their number.
        subject: The folder or address.

    Raises:
        StateError: There are other files; the function that is returned raises it at a difference.
    """
    if sizes.keys() != {*plan.weights, *plan.others}:
        raise not_empty(subject)

    def compare(name: str, nbytes: int, content: Content) -> None:
        if sizes[name] != nbytes:
            raise not_empty(subject)
        start = 0
        for part in content():
            if bytes(read(name, start, len(part))) != bytes(part):
                raise not_empty(subject)
            start += len(part)
            if name in plan.weights:
                break

    return compare


def not_empty(subject: str) -> StateError:
    """The error of a folder or address that has other files than those of the export."""
    return StateError("is not an empty folder", subject=subject, remedy="use a new one")
